"""The copies that `datasets` keeps on the disk of what it reads and makes, where they can't be kept, or have no room."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoints.atomic_files import explained, is_no_room

# What an error of a full disk says besides.
KEPT = (
    "the package datasets keeps there what it makes of a data set. Make room, or name other folders in the environment variables "
    "HF_DATASETS_CACHE and TMPDIR"
)


@contextmanager
def copying(place: str | Path) -> Iterator[None]:
    """Say where there is no room for a copy: `datasets` tells of it at times by what failed next (a closed file, say).

    Raises:
        NoRoomError: for a full disk, a quota or a limit on files; all else passes as it is.
    """
    full = None
    try:
        yield
    except Exception as error:
        full = _no_room_before(error)
        if full is None:
            raise
    if full is not None:
        with explained(place, KEPT):
            raise full


def _no_room_before(error: BaseException | None) -> BaseException | None:
    """What said that there is no room, among an error and those that it came of."""
    while error is not None and not is_no_room(error):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def copies_of(data: Any) -> Iterator[None]:
    """What is made of a data set is kept beside its files, as ever, or, where these can only be read, in a temporary folder.

    Raises:
        NoRoomError: see [`copying`].
    """
    import datasets

    files = data.cache_files if isinstance(data, datasets.Dataset) and datasets.is_caching_enabled() else []
    place = Path(files[0]["filename"]).parent if files else Path(tempfile.gettempdir())
    is_elsewhere = bool(files) and not os.access(place, os.W_OK)
    if is_elsewhere:
        place = Path(tempfile.gettempdir())
        datasets.disable_caching()
    try:
        with copying(place):
            yield
    finally:
        if is_elsewhere:
            datasets.enable_caching()
