"""What is saved with a drafter besides weights and configs: the code that loads it where this package is not installed."""

import inspect
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils.hub import ModelCard, create_and_tag_model_card, hf_api

from .generate_anywhere import generate

CARD = "README.md"
CONFIG = "config.json"
CUSTOM_GENERATE = "custom_generate/generate.py"
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


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """A model's class as it was written; FSDP puts one of its own, made on the fly, before it."""
    return next(cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))


def code_file(cls: type) -> Path | None:
    """The file that defines a class; `None` for a script or a notebook, which can't travel."""
    return None if cls.__module__ == "__main__" else Path(sys.modules[cls.__module__].__file__)


def auto_map_of(model: PreTrainedModel) -> dict[str, str]:
    """For config.json: which class of the saved code each of transformers' Auto classes is to take."""
    classes = {"AutoConfig": type(model.config), "AutoModel": own_class(model)}
    if model.can_generate():
        # Without trust_remote_code it stays the base architecture's causal LM; with it, AutoConfig gives a class of ours.
        classes["AutoModelForCausalLM"] = own_class(model)
    if any(code_file(cls) is None for cls in classes.values()):
        return {}
    return {auto: f"{code_file(cls).stem}.{cls.__name__}" for auto, cls in classes.items()}


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, whose files take their places in `folder` when all are written; none does after an error.

    The package has a better one, which a kill in between doesn't hurt. Here config.json goes first and comes last, so that
    nothing loads that is partly an earlier drafter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as name:
        workspace = Path(name)
        yield workspace
        files = [path.relative_to(workspace) for path in workspace.rglob("*") if path.is_file()]
        (folder / CONFIG).unlink(missing_ok=True)
        # Weights in other shards would be loaded instead of, or beside, those that are written.
        for stale in [*folder.glob("model.safetensors*"), *folder.glob("model-*-of-*.safetensors")]:
            stale.unlink()
        for file in sorted(files, key=lambda file: file.name == CONFIG):
            (folder / file).parent.mkdir(exist_ok=True)
            (workspace / file).replace(folder / file)


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
    destination = folder / CUSTOM_GENERATE
    destination.parent.mkdir(exist_ok=True)
    shutil.copyfile(inspect.getsourcefile(generate), destination)


def push_drafter(
    model: PreTrainedModel,
    repo_id: str,
    card: Path | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    tags: list[str] | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    **save_arguments: Any,
) -> Any:
    """Save a drafter to a temporary folder and upload that.

    Args:
        model: the drafter.
        repo_id: the repository, made if it does not exist.
        card: the model card to upload. By default the repository keeps its own, and gets a fresh one only if it has none.
        private, token, revision, tags, commit_message, commit_description, create_pr: as for
            `PreTrainedModel.push_to_hub`.
        **save_arguments: for `save_pretrained`.
    """
    api = hf_api()
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    if revision is not None and not create_pr and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    with tempfile.TemporaryDirectory() as workspace:
        folder = Path(workspace)
        model.save_pretrained(folder, repo_id=repo_id, **save_arguments)
        place_card(folder / CARD, repo_id, card, tags, token)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Upload {own_class(model).__name__}",
            commit_description=commit_description,
        )


def place_card(
    destination: Path, repo_id: str, card: Path | None, tags: list[str] | None, token: bool | str | None
) -> None:
    """Put the card to upload where a freshly made one may lie; see [`push_drafter`]."""
    if card is not None and card.exists():
        shutil.copyfile(card, destination)
    elif not destination.exists() or hf_api().file_exists(repo_id, CARD, token=token):
        create_and_tag_model_card(repo_id, token=token).save(destination)
    if tags:
        tagged = ModelCard.load(destination)
        tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or []), *tags]))
        tagged.save(destination)
