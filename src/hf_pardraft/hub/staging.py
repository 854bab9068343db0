"""Writing a folder in one piece: it is made beside its place and renamed, so that nothing partial is ever seen there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

# What a folder must hold to be taken for a checkpoint, which may be replaced.
CHECKPOINT_MARK = "config.json"


def check_destination(destination: str | Path, overwrite: bool = False) -> None:
    """Raise an error if a folder can't be written in this place, or something of another kind would be lost.

    Raises:
        FileExistsError: if there is a file, a folder that is not empty (without `overwrite`), or one that is no checkpoint.
    """
    destination = Path(destination)
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise FileExistsError(f"{destination} is a file or a link: choose the name of a new folder")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{destination} is not empty: choose another folder, or pass --overwrite to replace it")
    if not (destination / CHECKPOINT_MARK).is_file():
        raise FileExistsError(
            f"{destination} holds no {CHECKPOINT_MARK}, so it is no checkpoint and is not replaced: choose another folder"
        )


@contextmanager
def written_beside(destination: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside `destination` to write into, which takes its place if nothing fails, and is removed if something does.

    Nothing but writing belongs into the `with` block: each `OSError` in it is told as one of writing.

    Raises:
        FileExistsError: see [`check_destination`].
        OSError: if there is no room or no permission to write; `destination` is as it was.
    """
    destination = Path(os.path.abspath(destination))
    check_destination(destination, overwrite)
    staging = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        # A temporary folder is its owner's alone; this one is to be like any other.
        staging.chmod(0o777 & ~current_umask())
        yield staging
        put_in_place(staging, destination)
    except (OSError, SafetensorError) as error:
        raise OSError(f"can't write {destination} ({error}): nothing was changed there") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def put_in_place(staging: Path, destination: Path) -> None:
    """Rename `staging` to `destination`; what was there is kept until that is done."""
    if not destination.exists():
        os.rename(staging, destination)
        return
    replaced = staging.with_name(f"{staging.name}.replaced")
    os.rename(destination, replaced)
    try:
        os.rename(staging, destination)
    except OSError:
        os.rename(replaced, destination)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def current_umask() -> int:
    """The process' mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
