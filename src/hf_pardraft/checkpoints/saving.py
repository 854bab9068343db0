"""Saving a drafter: weights with checksums, and besides them the code that loads it where this package is not installed."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from ..models import generate_anywhere
from ..models.base import CUSTOM_GENERATE, ParallelDrafter
from ..models.modeling_pard import VOCABULARY_FILE
from .atomic_files import AS_BEFORE, explained
from .atomic_folders import CARD, replaced_files
from .checksums import add_checksums
from .vocabulary import check_vocabulary_is_named

# Arguments of save_pretrained that are for push_to_hub alone.
PUSH_ARGUMENTS = (
    "repo_id",
    "commit_message",
    "commit_description",
    "private",
    "revision",
    "create_pr",
    "tags",
)
# Our files with weights, which have their checksums in them.
CHECKSUMMED = ("model*.safetensors", "target_projection/*.safetensors", VOCABULARY_FILE)


def save_drafter(
    drafter: ParallelDrafter,
    folder: str | Path,
    write_card: Callable[[ParallelDrafter, Path, str], None],
    is_main_process: bool = True,
    push_to_hub: bool = False,
    with_code: bool = True,
    **kwargs: Any,
) -> None:
    """See [`ParallelDrafter.save_pretrained`].

    Args:
        write_card: writes a drafter's card, under a name, into a folder.
        drafter, folder, is_main_process, push_to_hub, with_code, kwargs: see there.
    """
    check_vocabulary_is_named(drafter)
    pushed = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
    set_auto_map(drafter, with_code)
    if not drafter.should_save_on_this_rank(is_main_process):
        # It takes part in gathering the weights of a sharded drafter, and writes nothing.
        drafter.save_weights(folder, is_main_process, **kwargs)
        return
    folder = Path(folder)
    with explained(folder, AS_BEFORE), replaced_files(folder) as workspace:
        # A distributed checkpoint is written by all processes, each to the folder itself.
        weights_folder = folder if kwargs.get("distributed_checkpoint") else workspace
        drafter.save_weights(weights_folder, is_main_process, **kwargs)
        for path in checksummed_files(weights_folder):
            add_checksums(path)
        drafter.generation_config.save_pretrained(workspace)
        if with_code:
            write_code(drafter, workspace)
            if not (folder / CARD).exists():
                write_card(drafter, workspace, pushed.get("repo_id") or folder.resolve().name)
    if push_to_hub:
        # It is saved as it was saved here.
        options = {**kwargs, **pushed, "card": folder / CARD, "with_code": with_code}
        drafter.push_to_hub(options.pop("repo_id", folder.name), **options)


def checksummed_files(folder: str | Path) -> list[Path]:
    """The files of a drafter's folder that have checksums, or are to get them."""
    return [path for pattern in CHECKSUMMED for path in Path(folder).glob(pattern)]


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """A model's class as it was written; FSDP puts one of its own, made on the fly, before it."""
    return next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))


def code_file(cls: type) -> Path | None:
    """The file that defines a class; `None` for a script or a notebook, which can't travel."""
    return None if cls.__module__ == "__main__" else Path(sys.modules[cls.__module__].__file__)


def auto_map_of(model: PreTrainedModel) -> dict[str, str]:
    """For config.json: which class of the saved code each of transformers' Auto classes is to take."""
    # An assistant is what `AutoModelForCausalLM` loads, whether it writes text of its own or not.
    classes = {
        "AutoConfig": type(model.config),
        **dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), own_class(model)),
    }
    if any(code_file(cls) is None for cls in classes.values()):
        return {}
    return {auto: f"{code_file(cls).stem}.{cls.__name__}" for auto, cls in classes.items()}


def set_auto_map(model: PreTrainedModel, with_code: bool) -> None:
    """Let a drafter's config say which code is saved with it, and nothing else: it may come from a repository with other code."""
    auto_map = auto_map_of(model) if with_code else {}
    vars(model.config).pop("auto_map", None)
    if auto_map:
        model.config.auto_map = auto_map


def write_code(model: PreTrainedModel, folder: Path) -> None:
    """Copy the file that defines a drafter's class, all siblings that it imports, and `custom_generate/generate.py`."""
    source = code_file(own_class(model))
    for file in [] if source is None else [source, *map(Path, get_relative_import_files(source))]:
        shutil.copyfile(file, folder / file.name)
    write_custom_generate(folder)


def write_custom_generate(folder: Path) -> None:
    """Write what `generate(..., custom_generate=folder)` runs."""
    destination = folder / CUSTOM_GENERATE
    destination.parent.mkdir(exist_ok=True)
    shutil.copyfile(generate_anywhere.__file__, destination)
