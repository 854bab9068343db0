"""Replacing what a checkpoint consists of in one switch: after a kill a folder holds the old one or the new one, never both.

New files are written to `.saving-*` in the folder. When all are there, that is renamed to `.saved-*`, and from then on the new
checkpoint is the one that counts: the files that make a folder a checkpoint go first and come last, so that nothing loads in
between, and whoever reads or writes the folder next moves what a killed run had not moved yet.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..models.modeling_pard import VOCABULARY_FILE
from ..models.target_projection import PROJECTION_FILES
from .atomic_files import check_folder_to_write
from .locks import LOCK, PATIENCE, locked

SAVING, SAVED, PLAN = ".saving-", ".saved-", "plan.json"
# What the dead leave in a folder. Nothing in it is anyone's, once the folder's lock is ours.
LEFTOVERS = (f"{SAVING}*", ".ngram-*", ".card-*", ".tuning.*", ".model*.safetensors.checksums")
# The files that make a folder a checkpoint.
SWITCHES = ("config.json", "adapter_config.json")
# A card, which somebody may have written by hand.
CARD = "README.md"
MAIN_WEIGHTS = re.compile(r"(adapter_)?model(\.(?P<variant>[\w-]+?))?(-\d+-of-\d+)?\.safetensors")
WEIGHT_PATTERNS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*-of-*.bin",
    *PROJECTION_FILES,
    VOCABULARY_FILE,
)
# The same of weights that were saved as a variant.
VARIANT_PATTERNS = (
    "model.{0}.safetensors",
    "model.safetensors.index.{0}.json",
    "model.{0}-*-of-*.safetensors",
    "model-*-of-*.{0}.safetensors",
)

Stale = Callable[[Path, set[str]], Iterable[str]]


def stale_weights(folder: Path, files: set[str]) -> list[str]:
    """Weights of an earlier save, see [`stale_among`], in a folder."""
    found = (
        path
        for pattern in stale_patterns(files)
        for path in folder.glob(pattern)
        if path.is_symlink() or path.is_file()
    )
    return stale_among((path.relative_to(folder).as_posix() for path in found), files)


def stale_among(found: Iterable[str], files: set[str]) -> list[str]:
    """Of the names that are `found`, weights of an earlier save, say in other shards or as an adapter, that would be loaded
    instead of, or beside, those among `files`."""
    patterns = stale_patterns(files)
    return sorted(name for name in {*found} - files if any(fnmatchcase(name, pattern) for pattern in patterns))


def stale_patterns(files: Iterable[str]) -> list[str]:
    """Patterns of the weights that those among `files` replace: a variant replaces itself alone."""
    variants = {match["variant"] for match in map(MAIN_WEIGHTS.fullmatch, files) if match}
    return [
        pattern.format(variant)
        for variant in variants
        for pattern in (WEIGHT_PATTERNS if variant is None else VARIANT_PATTERNS)
    ]


@contextmanager
def writing_folder(folder: str | Path, wait: float = 0.0) -> Iterator[None]:
    """Be the only one who writes a folder, made if need be, with nothing in it of runs that were killed.

    A folder that was made, and got nothing, is removed.

    Raises:
        OSError: if somebody else writes it, or it can't be written.
    """
    folder = Path(folder)
    check_folder_to_write(folder)
    missing = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, folder, wait) as is_outermost:
            if is_outermost:
                clear_leftovers(folder)
            yield
    finally:
        for place in missing:
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()


@contextmanager
def replaced_files(folder: str | Path, stale: Stale = stale_weights) -> Iterator[Path]:
    """An empty folder of the same name to write to, whose files replace those in `folder` at once when all are written.

    What else `folder` holds stays, and so does a card. After an error all is as it was.

    Args:
        folder: made if need be.
        stale: which other files of `folder` go, given the names of the new ones.

    Raises:
        OSError: if it can't be written.
    """
    folder = Path(folder)
    with writing_folder(folder, PATIENCE):
        workspace = Path(tempfile.mkdtemp(prefix=SAVING, dir=folder))
        try:
            content = workspace / (folder.resolve().name or "files")
            content.mkdir()
            yield content
            if (folder / CARD).exists():
                (content / CARD).unlink(missing_ok=True)
            saved = commit(workspace, content, folder, stale)
        except BaseException:
            shutil.rmtree(workspace, ignore_errors=True)
            raise
        finish(saved, folder)


def commit(workspace: Path, content: Path, folder: Path, stale: Stale) -> Path:
    """Write down what is to be done, and rename the workspace: from then on, the new files count.

    Raises:
        FileExistsError: if something is in the way of one of them, or of its removal.
    """
    files = {path.relative_to(content).as_posix() for path in content.rglob("*") if path.is_file()}
    plan = {"content": content.name, "files": sorted(files), "stale": sorted(stale(folder, files))}
    for name in (*plan["files"], *plan["stale"]):
        reason = obstacle(folder, name)
        if reason is not None:
            raise FileExistsError(
                f"can't write {folder / name}: {reason}. Take that away, or choose another folder; nothing was changed there"
            )
    (workspace / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    return workspace.rename(folder / workspace.name.replace(SAVING, SAVED, 1))


def obstacle(folder: Path, name: str) -> str | None:
    """What keeps a file from its place in a folder; `None` if nothing does."""
    place = folder / name
    for above in (folder / parent for parent in Path(name).parents if parent.name):
        if not above.resolve().is_relative_to(folder.resolve()):
            return f"{above} is a link that leads out of the folder"
        if os.path.lexists(above) and not above.is_dir():
            return f"{above} is no folder"
        if above.is_dir() and not os.access(above, os.W_OK):
            return f"there is no permission to write {above}"
    # A link is replaced, and not what it shows.
    return f"{place} is a folder" if place.is_dir() and not place.is_symlink() else None


def finish(saved: Path, folder: Path) -> None:
    """Move the files of a finished save to their places; it may have been begun before.

    Raises:
        OSError: if one of them can't be moved.
        ValueError: see [`read_plan`].
    """
    try:
        move_to_places(saved, folder)
    except OSError as error:
        raise OSError(
            f"all files of a save into {folder} are written, and not all could be moved to their places ({error}): mend that, "
            "and load or save it again, which goes on there"
        ) from error


def move_to_places(saved: Path, folder: Path) -> None:
    """See [`finish`]."""
    try:
        plan = read_plan(saved / PLAN, folder)
    except FileNotFoundError:
        # It was being removed, which is the last thing that is done.
        shutil.rmtree(saved, ignore_errors=True)
        return
    content = saved / plan["content"]
    for name in SWITCHES:
        if (content / name).exists():
            (folder / name).unlink(missing_ok=True)
    for name in plan["stale"]:
        place = folder / name
        place.unlink(missing_ok=True)
        if place.parent != folder and place.parent.is_dir() and not any(place.parent.iterdir()):
            place.parent.rmdir()
    for name in sorted(plan["files"], key=lambda name: name in SWITCHES):
        if (content / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(content / name, folder / name)
    shutil.rmtree(saved, ignore_errors=True)


def read_plan(path: Path, folder: Path) -> dict[str, Any]:
    """What is to be done in `folder`. It may be somebody else's, so nothing outside of it is touched.

    Raises:
        ValueError: if it is no plan, or leads elsewhere.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        places = [path.parent / plan["content"] / "any", *(folder / name for name in (*plan["files"], *plan["stale"]))]
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not what a save writes there ({error!r}): remove {path.parent}") from error
    # A link may lead elsewhere, too. One that is a file itself is moved or removed, and not what it shows.
    for place in places:
        if place.name == ".." or not place.parent.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{path} names files outside of its folder, or a link leads out of it ({place}): take the link away, and don't "
                "use this folder unless you trust it"
            )
    return plan


def finish_interrupted(name_or_path: Any) -> None:
    """Finish a save into a folder that was killed while its files were moved; nothing for other folders, and for no folder.

    Raises:
        OSError: if somebody writes it for too long, or it can't be written.
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.path.isdir(name_or_path):
        return
    folder = Path(name_or_path)
    if not any(folder.glob(f"{SAVED}*")):
        return
    try:
        with writing_folder(folder, PATIENCE):
            pass
    except PermissionError as error:
        raise OSError(
            f"a save into {folder} was cut off while its files were moved to their places, and can't be finished here ({error}): "
            "load it once where it can be written"
        ) from error


def is_leftover(path: Path) -> bool:
    """Whether something in a folder is a writer's own affair, and goes with the next one."""
    return path.name == LOCK or any(path.match(pattern) for pattern in (*LEFTOVERS, f"{SAVED}*"))


def clear_leftovers(folder: Path) -> None:
    """Finish the saves that a kill has cut off, and remove what else the dead left. The folder's lock must be held."""
    for saved in folder.glob(f"{SAVED}*"):
        finish(saved, folder)
    for pattern in LEFTOVERS:
        for left in folder.glob(pattern):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
