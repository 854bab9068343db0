"""Writing a checkpoint over another one: what a checkpoint consists of is replaced, in one switch, and all else stays."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.dynamic_module_utils import get_relative_import_files

from ..models.base import CUSTOM_GENERATE
from .atomic_files import NoRoomError, check_no_file
from .atomic_folders import finish_interrupted, is_leftover, replaced_files, stale_weights

# What a folder must hold to be taken for a checkpoint, which may be replaced.
CHECKPOINT_MARK = "config.json"
# Files that go with a drafter in any layout.
LICENCES = ("LICENSE", "NOTICE")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def check_destination(destination: str | Path, overwrite: bool = False) -> None:
    """Raise an error if a folder can't be written in this place, or something of another kind would be lost.

    Raises:
        FileExistsError: if there is a file, a folder that is not empty (without `overwrite`), or one that is no checkpoint.
    """
    destination = Path(destination)
    check_no_file(destination)
    if destination.is_symlink():
        raise FileExistsError(f"expected a folder to write to, and {destination} is a link: choose another name")
    finish_interrupted(destination)
    if not destination.is_dir() or all(is_leftover(path) for path in destination.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(
            f"{destination} is not empty: choose another folder, or pass --overwrite to replace the checkpoint in it"
        )
    if not (destination / CHECKPOINT_MARK).is_file():
        raise FileExistsError(
            f"{destination} holds no {CHECKPOINT_MARK}, so it is no checkpoint and is not replaced: choose another folder"
        )


@contextmanager
def replaced_checkpoint(destination: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write a checkpoint into, which replaces the one in `destination` if nothing fails.

    Nothing but writing belongs into the `with` block: each `OSError` in it is told as one of writing.

    Raises:
        FileExistsError: see [`check_destination`].
        OSError: if there is no room or no permission to write; `destination` is as it was.
    """
    check_destination(destination, overwrite)
    try:
        with replaced_files(destination, stale_files) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, NoRoomError):
            # No error of the system's, and told already.
            raise
        # What is told of a full disk names a folder that is gone by now.
        reason = error.__cause__ if isinstance(error, NoRoomError) else error
        raise OSError(f"can't write {destination} ({reason}): nothing was changed there") from error


def stale_files(folder: Path, files: set[str]) -> list[str]:
    """What else of the checkpoint in `folder` goes with its weights: a tokenizer that is replaced, and its own code."""
    brings_tokenizer = any(name in files for name in TOKENIZER_FILES)
    tokenizer = [name for name in TOKENIZER_FILES if brings_tokenizer and (folder / name).is_file()]
    return sorted({*stale_weights(folder, files), *tokenizer, *own_code(folder)} - files)


def own_code(folder: Path) -> list[str]:
    """The files of code in a checkpoint's folder that its config refers to, and nobody else's."""
    try:
        config = json.loads((folder / CHECKPOINT_MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # Whatever it is, it refers to nothing.
        return []
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    modules = {str(name).split(".")[0] for name in auto_map.values()} if isinstance(auto_map, dict) else set()
    files = {folder / f"{module}.py" for module in modules if module.isidentifier()}
    present = [file for file in files if file.is_file()]
    try:
        needed = {Path(other) for file in present for other in get_relative_import_files(file)}
    except OSError:
        # One that it imports is missing.
        needed = set()
    code = [file for file in {*present, *needed} if file.parent == folder and file.is_file()]
    custom = [CUSTOM_GENERATE] if present and (folder / CUSTOM_GENERATE).is_file() else []
    return sorted([*(file.name for file in code), *custom])
