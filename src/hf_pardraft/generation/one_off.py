"""What is made once, packed weights and compiled code, and takes many rounds' time: no round is judged by it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]
CLOCKS: tuple[Clock, ...] = (time.thread_time, time.perf_counter)


class _Spent(threading.local):
    """Seconds of this thread by each clock; `depth` tells what is made while something else is."""

    def __init__(self) -> None:
        self.seconds, self.depth = dict.fromkeys(CLOCKS, 0.0), 0


_spent = _Spent()


@contextmanager
def made_once() -> Iterator[None]:
    """Something is made that lasts."""
    started = [clock() for clock in CLOCKS]
    _spent.depth += 1
    try:
        yield
    finally:
        _spent.depth -= 1
        if not _spent.depth:
            for clock, start in zip(CLOCKS, started, strict=True):
                _spent.seconds[clock] += clock() - start


def seconds_spent(clock: Clock) -> float:
    """Seconds of this thread that such things took so far, by a clock of [`CLOCKS`]; of others nothing is known."""
    return _spent.seconds.get(clock, 0.0)
