"""`pardraft convert`: a drafter in another layout."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.convert import convert as convert_drafter
from ..checkpoints.layouts import LAYOUTS, NATIVE
from ..user_input.models import naming
from .options import print_facts


def convert(
    source: Annotated[
        str, typer.Argument(help="The drafter: a folder or a Hub repository, in any layout that is read; no adapter.")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder for the converted drafter.")],
    to: Annotated[str, typer.Option(help=f"The layout to write: {', '.join((NATIVE, *LAYOUTS))}.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is there.")] = False,
    revision: Annotated[str | None, typer.Option(help="Of the repository: a branch, tag or commit.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Of the source, with the drafter.")] = None,
    target: Annotated[str | None, typer.Option(help="Its target's name, where its config does not say it.")] = None,
) -> None:
    """Convert a drafter into another layout, bit by bit: for vLLM, SGLang, other packages, or this one."""
    options = {"revision": revision, "subfolder": subfolder, "target": target}
    given = {name: value for name, value in options.items() if value is not None}
    done = convert_drafter(source, destination, to, overwrite, reading=naming(source), **given)
    facts = {"drafter": done.kind, "layout": done.layout, "weights": done.num_weights, "used by": done.served_by}
    left = {f"not read, {name}": why for name, why in done.unread.items()}
    print_facts({**facts, **left, "written to": destination})
