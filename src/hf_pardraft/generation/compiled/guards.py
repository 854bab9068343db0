"""Compiled code without its guards, once they have been checked.

Dynamo looks at all that compiled code depends on (each module's attributes, global functions, ...) whenever it is called. For
small models, that takes a third of a round. None of it changes between the rounds of one call of `generate`.
"""

import types
from collections.abc import Callable
from typing import Any

import torch

from ..tree.token_tree import TokenTree


def code_for(function: Callable, arguments: tuple[Any, ...]) -> Callable | None:
    """The compiled code of a function that these arguments may run, as a function that checks nothing.

    Args:
        function: what was given to `torch.compile`.
        arguments: of the call, by position.

    Returns:
        `None` if nothing was compiled for such arguments, or if it can't run by itself (it is in several pieces, or this torch
        keeps it elsewhere). Where somebody told torch to run everything eager, nothing compiled is returned either.
    """
    try:
        if torch._dynamo.eval_frame._stance.stance == "force_eager":
            return None
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        given = dict(zip(function.__code__.co_varnames, arguments, strict=False))
        code = next((entry.code for entry in entries if entry.guard_manager.check(given)), None)
    except (AttributeError, TypeError):
        return None
    # What follows a graph break is compiled by itself, and only found by Dynamo.
    if code is None or any(name.startswith("__resume_at") for name in code.co_names):
        return None
    return types.FunctionType(code, function.__globals__, function.__name__)


def layout(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and strides of the tensors and trees among some arguments."""
    found = []
    for value in arguments:
        if isinstance(value, TokenTree):
            # The rest of a chain follows from the shape of its tokens.
            rest = () if value.is_chain else (value.parents.stride(), value.ancestors.stride())
            found.append((value.is_chain, value.tokens.shape, value.tokens.stride(), rest))
        elif isinstance(value, torch.Tensor):
            found.append((value.shape, value.stride()))
    return tuple(found)
