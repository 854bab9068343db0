"""Publishing a drafter: the upload of its folder, or of what `push_to_hub` saves of it."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.utils.hub import create_and_tag_model_card, hf_api

from ..checkpoints.atomic_folders import CARD, stale_among, stale_patterns
from ..checkpoints.saving import own_class
from ..user_input.redaction import redacted
from .upload import Upload, check_link


def check_repository(repo_id: str) -> None:
    """Raise a `ValueError` for what can't be the name of a repository."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"no repository can be called {repo_id!r} ({error}): expected user/name") from error


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
            delete_patterns=stale_patterns(path.name for path in folder.iterdir()),
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
