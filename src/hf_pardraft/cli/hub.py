"""What the commands `pardraft card` and `pardraft push` do; cli/app.py only reads their arguments."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import ModelCard

from ..checkpoints.atomic_folders import finish_interrupted
from ..demo.family_facts import family_facts
from ..hub.cards import FILE_NAME, CardFacts, card_gaps, make_card, save_card, update_card
from ..hub.push import Upload, check_publishable, check_repository, plan_upload, push, read_card
from ..hub.results import read_results
from ..models.base import ParallelDrafter
from ..user_input.files import check_file_to_write, read_text
from ..user_input.models import load_drafter as load_named_drafter


@dataclass
class CardRequest:
    """What `pardraft card` is asked to write. `output` `None` is the folder's README.md; `fresh` drops what is there."""

    folder: Path
    results: Path | None = None
    row_names: list[str] = field(default_factory=list)
    recipe: Path | None = None
    usage: Path | None = None
    repo_id: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    output: Path | None = None
    fresh: bool = False


@dataclass
class PushRequest:
    """What `pardraft push` is asked to do; the last fields are those of [`push`]."""

    folder: Path
    repo_id: str
    dry_run: bool = False
    allow_unmeasured: bool = False
    private: bool | None = None
    revision: str | None = None
    token: str | None = None
    commit_message: str | None = None
    create_pr: bool = False


def write_card(request: CardRequest) -> dict[str, object]:
    """Write or renew a card; returns where it is, and what it still lacks.

    Raises:
        OSError, ValueError: if the folder holds no drafter, or a file that was passed can't be used.
    """
    check_file_to_write(request.output)
    # Files first: they cost less to read than a drafter.
    facts = facts_of(request)
    drafter = load_drafter(request.folder)
    name = request.folder.resolve().name
    path = request.output or request.folder / FILE_NAME
    # A demo family says more about its drafters than their folders do.
    family = family_facts(request.folder)
    old = None if request.fresh or family is not None else read_card(path.parent) if path.name == FILE_NAME else None
    if family is not None:
        facts = with_defaults(facts, family)
    card = make_card(drafter, facts, name) if old is None else update_card(old, drafter, facts, name)
    save_card(card, path)
    gaps = card_gaps(ModelCard.load(path))
    return {"card": str(path), **{f"gap {number}": gap for number, gap in enumerate(gaps, start=1)}}


def facts_of(request: CardRequest) -> CardFacts:
    return CardFacts(
        repo_id=request.repo_id,
        base_model=request.base_model,
        licence=request.licence,
        datasets=request.datasets,
        languages=request.languages,
        recipe=None if request.recipe is None else read_markdown(request.recipe),
        usage=None if request.usage is None else read_markdown(request.usage),
        results=None if request.results is None else read_results(request.results),
        row_names=request.row_names,
    )


def with_defaults(facts: CardFacts, defaults: CardFacts) -> CardFacts:
    """`facts`, and where nothing was said what `defaults` say."""
    return replace(defaults, **{name: value for name, value in vars(facts).items() if value})


def read_markdown(path: Path) -> str:
    text = read_text(path).strip()
    if not text:
        raise ValueError(f"{path} is empty: give a file with Markdown")
    return text


def load_drafter(folder: Path) -> ParallelDrafter:
    finish_interrupted(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no drafter: expected a folder with config.json, as save_pretrained writes it"
        )
    return load_named_drafter(str(folder), dtype="auto", local_files_only=True)


def push_folder(request: PushRequest) -> dict[str, object]:
    """Upload a folder, or say what would be uploaded.

    Raises:
        OSError, ValueError: if it does not load, may not be published as it is, or the Hub refuses.
    """
    finish_interrupted(request.folder)
    check_repository(request.repo_id)
    upload = plan_upload(request.folder, load_drafter)
    if request.dry_run:
        return describe_upload(upload, request)
    check_publishable(upload, request.allow_unmeasured)
    url = push(
        upload,
        request.repo_id,
        request.private,
        request.revision,
        request.token,
        request.commit_message,
        request.create_pr,
    )
    return {**describe_upload(upload, request), "uploaded": url}


def describe_upload(upload: Upload, request: PushRequest) -> dict[str, object]:
    """Every file with its size, what is left out and why, and what a reader would miss."""
    return {
        "repository": f"{request.repo_id}{f' ({request.revision})' if request.revision else ''}",
        **{f"file {name}": f"{size} bytes" for name, size in upload.files.items()},
        "total": f"{len(upload.files)} files, {upload.num_bytes} bytes",
        **{f"left out {name}": why for name, why in upload.left_out.items()},
        **{f"gap {number}": gap for number, gap in enumerate(upload.gaps, start=1)},
    }
