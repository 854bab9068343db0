"""`pardraft train`: a drafter from a recipe."""

from typing import Annotated

import typer

from .options import print_facts


def train(
    context: typer.Context,
    show_help: Annotated[bool, typer.Option("--help", help="Explain the settings.")] = False,
    show_all: Annotated[bool, typer.Option("--help-all", help="Explain all settings.")] = False,
) -> None:
    """Train a drafter by a recipe, evaluate it and save it."""
    # Training pulls in accelerate and the Trainer, which other commands have no use for.
    from ..training.recipe_help import help_text
    from ..training.run import train_drafter

    if show_help or show_all or not context.args:
        print(help_text(everything=show_all))
        return
    print_facts(train_drafter(context.args))
