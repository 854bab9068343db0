"""Calls that run at once."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(count: int, call: Callable[[], Any]) -> list[Any]:
    """What so many calls return, each in a thread of its own, begun before the first has ended; of one that fails, nothing."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
