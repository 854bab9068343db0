"""Words that users read: in what is told while work goes on, in summaries and on cards."""

from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str) -> str:
    """How many of them there are: "1 prompt", "2 prompts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def told_differences(begun: dict[str, Any], now: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The settings that are no longer what work was begun with, each as in "layers 2 (now 4)"."""
    return [f"{name} {begun.get(name)!r} (now {now.get(name)!r})" for name in names if begun.get(name) != now.get(name)]
