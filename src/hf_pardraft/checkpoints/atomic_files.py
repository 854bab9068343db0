"""Writing a file that is there as a whole or not at all."""

import os
from pathlib import Path

from .locks import PATIENCE, locked
from .write_errors import explained

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
