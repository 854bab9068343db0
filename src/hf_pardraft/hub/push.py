"""Publish a drafter, or its folder: what would be uploaded, what stands against it, and the upload itself."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils.hub import create_and_tag_model_card, hf_api

from ..checkpoints.atomic_folders import CARD, WEIGHT_PATTERNS, stale_among
from ..checkpoints.files import check_beside
from ..checkpoints.locks import LOCK
from ..checkpoints.saving import own_class
from ..user_input.files import read_json
from ..user_input.redaction import redacted
from .cards import card_gaps, has_measured_numbers

# What lies beside a drafter and is no part of it.
LEFT_OUT_FOLDERS = {
    "checkpoint-*": "a checkpoint of training",
    "runs": "logs of training",
    "__pycache__": "compiled code",
}
LEFT_OUT_FILES = {
    "train_settings.yaml": "settings of training, which name local folders",
    "trainer_state.json": "a log of training, which names local folders",
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
PICKLED_WEIGHTS = ("pytorch_model*.bin", "warp_model.bin")


@dataclass(frozen=True)
class Upload:
    """What a folder would become on the Hub.

    Attributes:
        folder: on this machine.
        files: what would be uploaded, and how many bytes each has, by path in the repository.
        left_out: what lies in the folder and would not be, and why.
        gaps: what the model card does not say, and other things that a reader would miss.
        is_measured: whether the card has measured numbers.
    """

    folder: Path
    files: dict[str, int]
    left_out: dict[str, str]
    gaps: list[str]
    is_measured: bool

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def plan_upload(folder: Path, load: Callable[[Path], Any]) -> Upload:
    """Look at a folder and load the drafter in it; nothing leaves this machine.

    Args:
        folder: what `save_pretrained` wrote.
        load: loads a drafter without any code from the folder, and raises if that can't be done.

    Raises:
        FileNotFoundError: if the folder holds no drafter.
        ValueError: if its weights are pickled, its code is incomplete, a link leads out of it, or it does not load.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no drafter: expected a folder with config.json, as save_pretrained writes it"
        )
    pickled = sorted(path.name for pattern in PICKLED_WEIGHTS for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has pickled weights ({', '.join(pickled)}), which can run code where they are loaded and are not "
            "published: write safetensors with AutoDrafter.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    # Before anything is read that a link may show.
    files, left_out = folder_contents(folder)
    check_code(folder)
    load(folder)
    card = read_card(folder)
    gaps = ["no model card (README.md): pardraft card FOLDER"] if card is None else card_gaps(card)
    if not auto_map_of(folder):
        gaps.append(
            "no code: it loads only where hf_pardraft is installed; AutoDrafter.from_pretrained(FOLDER).save_pretrained(FOLDER) "
            "writes it"
        )
    return Upload(folder, files, left_out, gaps, card is not None and has_measured_numbers(card))


def folder_contents(folder: Path, root: Path | None = None) -> tuple[dict[str, int], dict[str, str]]:
    """The files to upload with their sizes, and what is left out with the reason; by path below `folder`, sorted.

    Args:
        folder: where to look.
        root: of what is uploaded, if that is not `folder` itself.

    Raises:
        ValueError: if there is a link to something outside of `root`, or to a folder: what it shows is not the drafter's.
    """
    files, left_out = {}, {}
    for path in sorted(folder.iterdir()):
        reason = reason_to_leave_out(path)
        if reason:
            left_out[path.name] = reason
            continue
        check_link(path, root or folder)
        if path.is_dir():
            below, below_out = folder_contents(path, root or folder)
            files |= {f"{path.name}/{name}": size for name, size in below.items()}
            left_out |= {f"{path.name}/{name}": why for name, why in below_out.items()}
        else:
            files[path.name] = path.stat().st_size
    return files, left_out


def check_link(path: Path, root: Path) -> None:
    """Raise a `ValueError` if a path is a link to a folder, or to a file that is not in `root` (or in the Hub's own cache)."""
    if path.is_symlink() and path.is_dir():
        raise ValueError(
            f"{path} is a link to the folder {path.resolve()}, and no link to a folder is followed: remove it, or copy what "
            "you mean to publish"
        )
    check_beside(str(path), root)


def reason_to_leave_out(path: Path) -> str | None:
    """Why a file or folder is not published; `None` if it is."""
    if path.name.startswith("."):
        return "hidden"
    if path.name == LOCK:
        return "of whoever writes the folder now"
    if path.is_dir():
        return next((why for pattern, why in LEFT_OUT_FOLDERS.items() if path.match(pattern)), None)
    if any(path.match(pattern) for pattern in PICKLES):
        return "a pickle, which can run code where it is loaded"
    return LEFT_OUT_FILES.get(path.name) if path.is_file() else "no file"


def auto_map_of(folder: Path) -> dict[str, str]:
    config = read_json(folder / "config.json")
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    return auto_map if isinstance(auto_map, dict) else {}


def check_code(folder: Path) -> None:
    """Raise a `ValueError` if a file of code is missing that config.json, or another one, refers to."""
    modules = {str(path).rsplit(".", 1)[0] for path in auto_map_of(folder).values() if "--" not in str(path)}
    for module in sorted(modules):
        try:
            for needed in (folder / f"{module}.py", *get_relative_import_files(folder / f"{module}.py")):
                Path(needed).read_bytes()
        except FileNotFoundError as error:
            raise ValueError(
                f"the code in {folder} is incomplete: {Path(error.filename).name} is missing, so that it can't be loaded with "
                "trust_remote_code=True. Save it again: AutoDrafter.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            ) from error


def read_card(folder: Path) -> ModelCard | None:
    """The folder's model card, or `None`.

    Raises:
        ValueError: if its metadata can't be read.
    """
    if not (folder / CARD).is_file():
        return None
    try:
        return ModelCard.load(folder / CARD)
    except Exception as error:
        raise ValueError(f"the metadata of {folder / CARD} can't be read ({error}): mend its YAML block") from error


def check_repository(repo_id: str) -> None:
    """Raise a `ValueError` for what can't be the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"no repository can be called {repo_id!r} ({error}): expected user/name") from error


def check_publishable(upload: Upload, allow_unmeasured: bool) -> None:
    """Raise a `ValueError` for a card without measured numbers, unless that is allowed."""
    if not upload.is_measured and not allow_unmeasured:
        raise ValueError(
            f"the card of {upload.folder} has no measured numbers, and a drafter is worth what it measures: run pardraft eval "
            "and pardraft card FOLDER --results FILE, or pass --allow-unmeasured"
        )


def push(
    upload: Upload,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload, in one commit, exactly the files of an [`Upload`]; weights of an earlier drafter in the repository go.

    Args:
        upload: what [`plan_upload`] found.
        repo_id: the repository, made if it does not exist.
        private: who can see it, if it is made; `None` leaves that to the account's default.
        revision: the branch, made if it does not exist; by default `main`.
        token: by default the one that `hf auth login` stored.
        commit_message: of the commit.
        create_pr: open a pull request instead.

    Returns:
        Where the commit, or the pull request, can be seen.

    Raises:
        OSError: if the Hub can't be reached or refuses.
        ValueError: if a file has become a link that leads out of the folder.
    """
    api = HfApi(token=token, library_name="hf_pardraft")
    for name in upload.files:
        # Once more, since time has passed: a file may have become a link.
        for path in [upload.folder / name, *(upload.folder / name).parents][: len(Path(name).parts)]:
            check_link(path, upload.folder)
    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=upload.folder / name) for name in upload.files]
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # A pull request is made of the main branch.
        before = api.list_repo_files(repo_id, revision=None if create_pr else revision)
        stale = stale_among(before, {*upload.files})
        commit = api.create_commit(
            repo_id,
            operations=[*added, *map(CommitOperationDelete, stale)],
            commit_message=commit_message or "Upload drafter",
            revision=revision,
            create_pr=create_pr,
        )
    # A file that does not get through, after several attempts, is a RuntimeError to huggingface_hub.
    except (HTTPError, RuntimeError) as error:
        told = redacted(f"can't upload to {repo_id} at {api.endpoint}: {failure(error)}", [token])
        raise OSError(told) from error
    return commit.pr_url or commit.commit_url


def failure(error: Exception) -> str:
    """What went wrong with an upload, and what to do if it is the token."""
    cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
    advice = ""
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        advice = "\nLog in with hf auth login, or pass --token, with a token that may write there"
    return f"{error}{cause}{advice}. Nothing was committed"


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
    """Save a drafter to a temporary folder and upload that; weights of an earlier drafter in the repository go.

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
            # Of those that are uploaded none is deleted.
            delete_patterns=[*WEIGHT_PATTERNS],
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
