"""Calls that run at once, and how many threads torch has."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def in_threads(count: int, call: Callable[[], Any]) -> list[Any]:
    """What so many calls return, each in a thread of its own, begun before the first has ended; of one that fails, nothing."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """While it is entered, torch computes with so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
