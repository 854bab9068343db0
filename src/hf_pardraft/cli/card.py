"""`pardraft card`: a drafter's model card."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import ModelCard

from ..checkpoints.atomic_folders import CARD, finish_interrupted
from ..demo.family_facts import family_facts
from ..hub.cards import CardFacts, card_gaps, make_card, save_card, update_card
from ..hub.results import read_results
from ..hub.upload import check_holds_drafter, read_card
from ..models.base import ParallelDrafter
from ..user_input.files import check_file_to_write, read_text
from ..user_input.models import load_drafter
from .options import print_facts


def card(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of the drafter.")],
    results: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Measured results: the JSON of pardraft eval.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Name of a row of the results that is this drafter's; may be repeated.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Markdown: how and on what it was trained.")
    ] = None,
    usage: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Markdown: how to use it, if not as by default.")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Repository that it is published in.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The target's repository.")] = None,
    license: Annotated[str | None, typer.Option(help="Identifier of its licence, such as apache-2.0.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Repository of a data set that it was trained on; may be repeated.")
    ] = None,
    language: Annotated[list[str] | None, typer.Option(help="ISO code; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of README.md in the folder.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from the template, and drop the card that is there.")
    ] = False,
) -> None:
    """Write or renew a drafter's model card, say with measured results, and say what it still lacks."""
    path = output or folder / CARD
    check_file_to_write(path)
    # Files first: they cost less to read than a drafter.
    facts = CardFacts(
        repo_id=repo,
        base_model=base_model,
        licence=license,
        datasets=dataset or [],
        languages=language or [],
        recipe=None if recipe is None else read_markdown(recipe),
        usage=None if usage is None else read_markdown(usage),
        results=None if results is None else read_results(results),
        row_names=row or [],
    )
    drafter = load_folder(folder)
    write_card(drafter, facts, folder, path, fresh)
    gaps = card_gaps(ModelCard.load(path))
    print_facts({"card": str(path), **{f"gap {number}": gap for number, gap in enumerate(gaps, start=1)}})


def write_card(drafter: ParallelDrafter, facts: CardFacts, folder: Path, path: Path, fresh: bool) -> None:
    """Write a card, or renew what is there, or else the folder's, unless it is to be `fresh`."""
    name = folder.resolve().name
    # A demo family says more about its drafters than their folders do.
    family = family_facts(folder)
    if family is not None:
        facts = replace(family, **{key: value for key, value in vars(facts).items() if value})
    old = None
    if not fresh and family is None:
        old = (read_card(path.parent) if path.name == CARD else None) or read_card(folder)
    save_card(make_card(drafter, facts, name) if old is None else update_card(old, drafter, facts, name), path)


def read_markdown(path: Path) -> str:
    text = read_text(path).strip()
    if not text:
        raise ValueError(f"{path} is empty: give a file with Markdown")
    return text


def load_folder(folder: Path) -> ParallelDrafter:
    """The drafter in a folder; an interrupted save is finished first.

    Raises:
        OSError, ValueError: if there is none, or it can't be loaded.
    """
    finish_interrupted(folder)
    check_holds_drafter(folder)
    return load_drafter(str(folder), dtype="auto", local_files_only=True)
