"""Runs that are killed at a chosen place: before the n-th time that they change something in a folder."""

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.processes import in_a_process

# What the interpreter reports before it is done; `os.replace` is called a rename, too.
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def num_changes(work: Callable[[], Any], folder: Path) -> int:
    """How often `work`, in a process of its own, changes something in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch) / "count"

        def counted() -> None:
            seen = []
            _on_each_change(folder, lambda: seen.append(1))
            work()
            count = len(seen)
            note.write_bytes(pickle.dumps(count))

        assert in_a_process(counted) == 0
        return pickle.loads(note.read_bytes())


def kill_before_change(work: Callable[[], Any], folder: Path, place: int) -> bool:
    """Run `work` in a process of its own and kill it before its change number `place`; whether it came to that."""

    def doomed() -> None:
        seen = []

        def count() -> None:
            seen.append(1)
            if len(seen) == place:
                os.kill(os.getpid(), signal.SIGKILL)

        _on_each_change(folder, count)
        work()

    code = in_a_process(doomed)
    assert code in (0, -signal.SIGKILL), f"exit code {code}: see the trace above"
    return code != 0


def _on_each_change(folder: Path, notice: Callable[[], None]) -> None:
    place = str(folder.resolve())

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            is_change = isinstance(flags, int) and bool(flags & WRITING)
        else:
            # Inside of a tree that is removed, names come with the folder's descriptor.
            path, is_change = arguments[0] if arguments else None, event in CHANGES
        if is_change and isinstance(path, (str, bytes, os.PathLike)):
            path = os.fsdecode(path)
            if not os.path.isabs(path) or path.startswith(place):
                notice()

    # It stays as long as the process, which is short.
    sys.addaudithook(hook)
