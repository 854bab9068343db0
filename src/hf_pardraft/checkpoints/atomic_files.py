"""Writing a file that is there as a whole or not at all, and what to say when there is no room for it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .locks import PATIENCE, locked

# A full disk, a quota, a limit on the size of files.
NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

AS_BEFORE = "what was there before is as it was. Make room, or choose another place"


def write_whole(path: str | Path, text: str, kept: str = AS_BEFORE) -> None:
    """Write a text beside its place and put it there.

    Args:
        kept: what an error says of a full disk: what is left, and what to do.

    Raises:
        OSError: if it can't be written; what was there is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for all, so that what a killed writer has left is written over.
    beside = path.with_name(f".{path.name}.part")
    with (
        explained(path, kept),
        locked(path.with_name(f".{path.name}.lock"), path, PATIENCE),
    ):
        try:
            beside.write_text(text, encoding="utf-8", newline="")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def check_place_to_write(path: Path) -> None:
    """Raise an `OSError` for a file or folder that can't be made: what is no folder is in its way, or there is no permission."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(
            f"can't write {path}: {parent} is a file, and a folder would have to be there; nothing was changed there"
        )
    place = path if path.is_dir() else parent
    if not os.access(place, os.W_OK):
        raise PermissionError(f"can't write {path}: no permission for {place}; nothing was changed there")


def check_no_file(folder: Path) -> None:
    """Raise a `FileExistsError` if something that is no folder is where a folder is to be."""
    if folder.is_dir() or not os.path.lexists(folder):
        return
    found = "a file" if folder.exists() else "a link that leads nowhere"
    raise FileExistsError(f"expected a folder to write to, and {folder} is {found}: choose another name")


def check_folder_to_write(folder: Path) -> None:
    """Raise an `OSError` for a folder that can't be made or written; see [`check_no_file`] and [`check_place_to_write`]."""
    check_no_file(folder)
    check_place_to_write(folder)


class NoRoomError(OSError):
    """There is no room for a file; raised from what the system or a library says of it."""


@contextmanager
def explained(path: str | Path, kept: str) -> Iterator[None]:
    """Name what there was no room for, and what is left of it: the system's own message has neither.

    Args:
        path: what is written.
        kept: what is left of it and what to do, as the end of a sentence.

    Raises:
        NoRoomError: for a full disk, a quota or a limit on files; all else passes as it is.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in NO_ROOM:
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NoRoomError(
            f"there is no room to write {path} ({reason}; {told_size(free_bytes(path))} free): {kept}"
        ) from error


def is_no_room(error: BaseException) -> bool:
    """Whether an error says that there is no room, in the system's words, a library's or [`explained`]."""
    is_the_systems = isinstance(error, OSError) and error.errno in NO_ROOM
    return is_the_systems or isinstance(error, (SafetensorError, NoRoomError))


def free_bytes(path: str | Path) -> int:
    """What is free where `path` is, or will be."""
    path = Path(path).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def told_size(num_bytes: int) -> str:
    """A size with a unit in which it is not zero."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
