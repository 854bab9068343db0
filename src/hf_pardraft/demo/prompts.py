"""Unfinished Python for the demo target to complete: beginnings of functions in the library of the Python that runs it."""

import contextlib
import csv
import heapq
import inspect
import json.encoder
import queue
import textwrap
from collections.abc import Callable

# From the modules whose completions the drafters of the shipped family learned (examples/train_demo.py).
BEGINNINGS: tuple[Callable | type, ...] = (
    heapq.merge,
    textwrap.TextWrapper,
    queue.Queue.put,
    json.encoder.JSONEncoder,
    csv.Sniffer,
    contextlib.contextmanager,
)
NUM_LINES = 12


def built_in_prompts() -> list[str]:
    """The first lines of some functions and classes that the demo target knows.

    Raises:
        ValueError: if this Python comes without the source of its library.
    """
    try:
        sources = [inspect.getsource(beginning) for beginning in BEGINNINGS]
    except OSError as error:
        raise ValueError(
            f"the demo completes code of Python's library, whose source this Python lacks ({error}): give it a file of your "
            "own with --prompt-file"
        ) from error
    return ["\n".join(source.split("\n")[:NUM_LINES]).rstrip() for source in sources]
