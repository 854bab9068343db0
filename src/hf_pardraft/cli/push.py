"""`pardraft push`: a drafter's folder, published on the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.atomic_folders import finish_interrupted
from ..hub.push import check_repository
from ..hub.push import push as push_to_hub
from ..hub.upload import Upload, check_publishable, plan_upload
from .card import load_folder
from .options import print_facts


def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of the drafter.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, as user/name; made if it does not exist.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded, and upload nothing.")] = False,
    allow_unmeasured: Annotated[
        bool, typer.Option("--allow-unmeasured", help="Even if the card has no measured numbers.")
    ] = False,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who can see a new repository.", show_default="the account's"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if it does not exist.", show_default="main")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Access token.", show_default="the one of hf auth login")] = None,
    commit_message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
) -> None:
    """Publish a drafter's folder on the Hub: it must load, and its card have measured numbers."""
    finish_interrupted(folder)
    check_repository(repo)
    upload = plan_upload(folder, load_folder)
    facts = {"repository": f"{repo} ({revision})" if revision else repo, **describe_upload(upload)}
    try:
        check_publishable(upload, allow_unmeasured)
    except ValueError as error:
        if not dry_run:
            raise
        facts["would be refused"] = error
    if not dry_run:
        facts["uploaded"] = push_to_hub(upload, repo, private, revision, token, commit_message, create_pr)
    print_facts(facts)


def describe_upload(upload: Upload) -> dict[str, object]:
    """Every file with its size, what is left out and why, and what a reader would miss."""
    return {
        **{f"file {name}": f"{size} bytes" for name, size in upload.files.items()},
        "total": f"{len(upload.files)} files, {upload.num_bytes} bytes",
        **{f"left out {name}": why for name, why in upload.left_out.items()},
        **{f"gap {number}": gap for number, gap in enumerate(upload.gaps, start=1)},
    }
