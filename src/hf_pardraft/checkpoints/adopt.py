"""Drafters that were loaded with the code that came with them, made ours."""

import weakref
from typing import Any

from ..models.base import ParallelDrafter
from .published import class_of_config

_adopted: "weakref.WeakKeyDictionary[Any, ParallelDrafter]" = weakref.WeakKeyDictionary()


def adopted(drafter: Any) -> ParallelDrafter:
    """A drafter as an instance of our own class, if its class is an earlier one of the same name.

    What travels with a drafter (`trust_remote_code=True`) may be older than this package, and the decode loops call methods by
    today's names. Ours and the given one share all attributes, modules and settings included: what is noted of a call
    (`last_stats`) arrives at both. The modules stay those of its own code. They are what its weights were saved from, and called
    today as they were then.

    Args:
        drafter: any assistant with a drafter's config. One of a class that this package doesn't know is returned as it is.
    """
    if isinstance(drafter, ParallelDrafter):
        return drafter
    own_class = class_of_config(drafter.config)
    if own_class is None or own_class.__name__ != type(drafter).__name__:
        return drafter
    if drafter not in _adopted:
        ours = object.__new__(own_class)
        ours.__dict__ = vars(drafter)
        _adopted[drafter] = ours
    return _adopted[drafter]
