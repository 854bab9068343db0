"""`pardraft cache-features`: the target's hidden states, stored before a drafter is trained."""

from typing import Annotated

import typer

from .options import print_facts


def cache_features(
    context: typer.Context,
    folder: Annotated[str, typer.Option("--output", help="Folder for the states.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that the target reads at once.")] = 8,
) -> None:
    """Store the target's hidden states, for `pardraft train --features-folder`; all other settings are those of train."""
    # As for `pardraft train`.
    from ..training.run import cache_target_features

    print_facts(cache_target_features(context.args, folder, dtype, batch_size))
