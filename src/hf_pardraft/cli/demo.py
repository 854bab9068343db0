"""`pardraft demo`: what drafters do, shown on a tiny family that the package brings along."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..demo.family import SHIPPED_FAMILY
from .options import PromptFile


def demo(
    prompt_file: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 96,
    family: Annotated[
        Path, typer.Option(help="Folder with a target and its drafters.", show_default="the one shipped")
    ] = SHIPPED_FAMILY,
    tree_budget: Annotated[
        int, typer.Option(min=0, help="Nodes of the token trees to compare with chains; 0: chains alone.")
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts to decode at once.")] = 1,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compare with compiled rounds, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table only, as JSON.")] = False,
) -> None:
    """Complete Python code with a tiny target and its drafters, and compare them with plain generate."""
    from ..demo.show import DemoOptions, demo_json, show_demo

    # Tensors this small only wait for a second thread.
    torch.set_num_threads(1)
    options = DemoOptions(family, prompt_file, max_new_tokens, tree_budget, batch_size, compiled)
    if as_json:
        print(demo_json(options))
    else:
        show_demo(options, Console())
