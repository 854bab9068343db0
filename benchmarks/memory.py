"""What a step needs of memory, in a process of its own, whose peak is its own."""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def in_a_process(start: str, function: Callable, *arguments: Any) -> Any:
    """What `function` returns in a process that was started by this method of `multiprocessing`: "fork" is quick; "spawn" begins
    with nothing, and with the environment as it is now. It may start others itself."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as pool:
        return pool.submit(function, *arguments).result()


def held_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Memory that it had at most: its largest resident set. (`getrusage` tells that of the process that started it, too.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
