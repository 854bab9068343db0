"""Cases of three things or more, in which every two meet: a fault is the business of two, and few products have to be whole."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def every_two_meet(*axes: Iterable[Any]) -> list[tuple]:
    """Combinations of one value of each axis, such that any two values of different axes are together in one of them."""

    def meetings(case: tuple[int, ...]) -> set[tuple]:
        return set(combinations(enumerate(case), 2))

    axes = [list(axis) for axis in axes]
    combined = list(product(*(range(len(axis)) for axis in axes)))
    missing, cases = set().union(*map(meetings, combined)), []
    while missing:
        case = max(combined, key=lambda case: len(meetings(case) & missing))
        missing -= meetings(case)
        cases.append(tuple(axis[index] for axis, index in zip(axes, case, strict=True)))
    return cases
