"""One writer at a time: a lock in a folder, or beside a file, which the system releases when its holder ends, however it ends."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

# The underscore keeps it out of what a `Trainer` uploads.
LOCK = "_pardraft.lock"
# Seconds to wait for what a dead writer has started and not yet ended, such as the workers of its data loader.
GRACE = 10.0
# Seconds to wait for a writer who takes a few of them.
PATIENCE = 60.0
POLL = 0.1


@dataclass
class _Held:
    """A lock, and who has it."""

    lock: FileLock
    process: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_mine(self) -> bool:
        return (self.process, self.thread) == (os.getpid(), threading.get_ident())


_held: dict[Path, _Held] = {}


@contextmanager
def locked(lock_file: Path, output: Path, wait: float = 0.0, nests: bool = True) -> Iterator[bool]:
    """Be the only one who writes `output`.

    Args:
        lock_file: what is locked; its folder is there. It goes with the lock.
        output: what the message names.
        wait: seconds to wait for another writer.
        nests: whether the thread that holds it may take it once more.

    Yields:
        Whether this is the outermost of several.

    Raises:
        OSError: if somebody else writes it.
    """
    place = lock_file.resolve()
    held = _held.get(place)
    if nests and held is not None and held.is_mine:
        yield False
        return
    lock = _acquired(place, output, wait)
    _held[place] = _Held(lock)
    try:
        # A full disk, or Windows, where a locked file is not written to: then nobody knows whose it is.
        with contextlib.suppress(OSError):
            place.write_text(json.dumps(_this_process()), encoding="utf-8")
        yield True
    finally:
        del _held[place]
        # While it is held, so that nobody else's is removed. Windows removes no open file, and leaves an empty one.
        with contextlib.suppress(OSError):
            place.unlink()
        lock.release()


def _acquired(place: Path, output: Path, wait: float) -> FileLock:
    started = time.monotonic()
    while True:
        lock = FileLock(place)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            holder = _holder(place)
            patience = max(wait, GRACE) if _has_ended(holder) else wait
            if time.monotonic() - started >= patience:
                raise OSError(
                    f"{output} is being written by {_told(holder)}: wait for it, or choose another output"
                ) from error
            time.sleep(POLL)
            continue
        if place.exists():
            return lock
        # Whoever had it before removed the file between our opening and our locking it.
        lock.release()


def _this_process() -> dict[str, str | int]:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]) if sys.argv else "python"
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _holder(place: Path) -> dict[str, str | int]:
    """Who wrote down that the lock is theirs; empty where that can't be read."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_ended(holder: dict[str, str | int]) -> bool:
    # Elsewhere than on POSIX, signal 0 would be one.
    if os.name != "posix" or holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _told(holder: dict[str, str | int]) -> str:
    if "pid" not in holder:
        return "another process"
    place = "" if holder.get("host") == socket.gethostname() else f" on {holder.get('host')}"
    return f"process {holder['pid']}{place} ({holder.get('command')}, since {holder.get('since')})"
