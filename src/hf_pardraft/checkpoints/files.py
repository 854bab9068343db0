"""The files of a checkpoint, found as transformers finds them. A shard index may name files elsewhere: it is not believed."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import is_offline_mode
from transformers.utils import cached_file

from ..models.base import hub_arguments

# What says that a folder holds an adapter of PEFT's.
ADAPTER_FILE = "adapter_config.json"
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# "name" or "owner/name".
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read_json_object(path: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if it holds no JSON, or something else than an object.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    # No UTF-8, no JSON, a number of thousands of digits, or lists in lists without end.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): get the file again, or mend it") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} should hold a JSON object, got a {type(found).__name__}: get the file again, or mend it"
        )
    return found


def check_place(name_or_path) -> None:
    """Raise an error for what can be neither a folder here nor the name of a repository."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"expected a folder or the name of a repository on the Hub, got {name_or_path!r}")
    name = os.fspath(name_or_path)
    if os.path.isfile(name):
        raise NotADirectoryError(f"{name} is a file: name the folder that it is in")
    if not os.path.isdir(name) and not REPOSITORY.fullmatch(name):
        raise FileNotFoundError(f"{name!r} is no folder here, and no name of a repository on the Hub: check the path")


def read_config_file(name_or_path, **source: Any) -> dict[str, Any]:
    """The config.json of a folder or repository, as it is.

    Args:
        name_or_path: a folder, or a repository on the Hub; or the file itself.
        **source: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.

    Raises:
        OSError: if there is none, or it can't be reached (offline, gated, ...).
        ValueError: if it is no JSON object.
    """
    if os.path.isfile(name_or_path):
        return read_json_object(name_or_path)
    try:
        path = cached_file(name_or_path, "config.json", **source)
    except OSError as error:
        if str(name_or_path) in str(error):
            raise
        # Transformers does not always say what could not be reached.
        raise OSError(f"can't load {name_or_path}: {error}") from error
    if path is None:
        raise OSError(f"{name_or_path} holds no config.json: name a folder or a repository with a drafter in it")
    return read_json_object(path)


def find_optional(folder, name: str, **source: Any) -> str | None:
    """The path of a file in a folder or repository; `None` if it is not there.

    Raises:
        OSError: if the repository can't be reached.
    """
    return cached_file(folder, name, _raise_exceptions_for_missing_entries=False, **source)


def check_generation_config(name_or_path, **source: Any) -> None:
    """Raise a `ValueError` if there is a generation_config.json that can't be read, which transformers would pass over.

    Args:
        name_or_path: a folder, or a repository on the Hub.
        **source: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.
    """
    path = find_optional(name_or_path, "generation_config.json", **source)
    if path is not None:
        read_json_object(path)


def find_weight_files(name_or_path, kwargs: dict[str, Any]) -> list[str]:
    """Paths of the files that `from_pretrained` reads the weights of a folder or repository from; downloads them if need be.

    Safetensors come before pickles, and one file before several. `kwargs` are those of `from_pretrained`, `use_safetensors` and
    `variant` among them.

    Raises:
        OSError: if there are none.
        ValueError: if an index names files that are not beside it, or a file is a link that leads out of the folder.
    """
    source, variant, choice = hub_arguments(kwargs), kwargs.get("variant"), kwargs.get("use_safetensors")
    names = {True: SAFETENSORS_FILES, False: PICKLE_FILES, None: SAFETENSORS_FILES + PICKLE_FILES}[choice]
    if variant is not None:
        # "model.fp16.safetensors", "model.safetensors.index.fp16.json"
        names = [f".{variant}.".join(name.rsplit(".", 1)) for name in names]
    for name in names:
        path = find_optional(name_or_path, name, **source)
        if path is None:
            continue
        check_beside(path, Path(path).parent)
        if not name.endswith(".json"):
            return [path]
        return [shard_path(name_or_path, path, shard, **source) for shard in shard_names(path)]
    raise OSError(
        f"{name_or_path} holds no weights: expected one of {', '.join(names)}{if_offline(name_or_path, source)}"
    )


def if_offline(name_or_path, source: dict[str, Any]) -> str:
    """What to add where a file is missing and the repository may have it; nothing for a folder, or where the Hub was asked."""
    is_asked = not (source.get("local_files_only") or is_offline_mode())
    if os.path.isdir(name_or_path) or is_asked:
        return ""
    return ". Only the cache was looked into (local_files_only or HF_HUB_OFFLINE), and the repository may have it: load it online"


def shard_names(index_path: str) -> list[str]:
    """The files that a shard index names, each once.

    Raises:
        ValueError: if it is no index, or names a file that is not beside it.
    """
    index = read_json_object(index_path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index_path} should map weights to files under weight_map: get the file again")
    if not isinstance(index.get("metadata"), dict):
        # Transformers notes things there.
        raise ValueError(
            f"{index_path} should hold an object under metadata, got {index.get('metadata')!r}: get the file again, or write "
            '"metadata": {} there'
        )
    for name in sorted(set(shards.values())):
        # Windows takes both kinds of separators, and no plain name has either.
        if (
            not name
            or name in (".", "..")
            or name not in (PurePosixPath(name).name, PureWindowsPath(name).name)
            or "\\" in name
        ):
            raise ValueError(
                f"{index_path} names the file {name!r}, which is not beside it: an index lists plain file names. Don't load this "
                "checkpoint unless you trust it and have mended its index"
            )
    return sorted(set(shards.values()))


def shard_path(name_or_path, index_path: str, name: str, **source: Any) -> str:
    """The path of a shard beside its index.

    Raises:
        OSError: if it is not there.
        ValueError: if it is a link that leads out of the folder (other than into the Hub's own cache).
    """
    path = find_optional(name_or_path, name, **source)
    if path is None:
        raise OSError(
            f"{index_path} names {name}, which is missing: get the checkpoint again{if_offline(name_or_path, source)}"
        )
    check_beside(path, Path(index_path).parent)
    return path


def find_separate(folder, names: Sequence[str], **source: Any) -> str | None:
    """The path of the first of some files with weights that a drafter keeps outside the main ones; `None` if there is none.

    Args:
        folder: or a repository on the Hub.
        names: of the files, in it.
        **source: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.

    Raises:
        ValueError: if it is a link that leads out of the folder.
    """
    for name in names:
        found = find_optional(folder, name, **source)
        if found is not None:
            check_beside(found, Path(found).parents[len(Path(name).parts) - 1])
            return found
    return None


def check_beside(path: str, folder: Path) -> None:
    """Raise a `ValueError` if a file in a folder is a link that leads out of it (other than into the Hub's own cache)."""
    real = Path(path).resolve()
    # Files of a downloaded snapshot are links to their contents, `snapshots/<commit>/name` to `blobs/<hash>`.
    blobs = [parent.parent / "blobs" for parent in folder.resolve().parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(place.resolve()) for place in [folder, *blobs]):
        raise ValueError(
            f"{path} is a link to {real}, outside of its folder: copy the file into the folder if you trust it"
        )
