"""The `pardraft` command: arguments only, no logic."""

import sys
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from .commands import Completion, complete, describe_environment, read_prompt
from .demo.family import SHIPPED_FAMILY
from .demo.show import DemoOptions, demo_json, show_demo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
TextFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Read the prompt from this file.")]


@app.callback()
def pardraft() -> None:
    """Parallel drafters for speculative decoding: the same text, sooner."""
    # Loading bars and notes on generation settings would drown the text.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@app.command()
def demo(
    prompt_file: TextFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 96,
    family: Annotated[
        Path, typer.Option(help="Folder with a target and its drafters.", show_default="the one shipped")
    ] = SHIPPED_FAMILY,
    tree_budget: Annotated[
        int, typer.Option(min=0, help="Nodes of the token trees to compare with chains; 0: chains alone.")
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts to decode at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table only, as JSON.")] = False,
) -> None:
    """Complete Python code with a tiny target and its drafters, and compare them with plain generate."""
    options = DemoOptions(family, prompt_file, max_new_tokens, tree_budget, batch_size)
    if as_json:
        print(demo_json(options))
    else:
        show_demo(options, Console())


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="The model whose text it is: a folder or a Hub repository.")],
    drafter: Annotated[str | None, typer.Option(help="Its drafter, likewise. Without one: plain generate.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; standard input by default.")] = None,
    prompt_file: TextFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error how drafting went.")] = False,
) -> None:
    """Complete a prompt, with a drafter or without."""
    text = read_prompt(prompt, prompt_file)
    summary = complete(Completion(target, drafter, text, max_new_tokens, temperature, dtype, device))
    if stats and summary:
        print(summary, file=sys.stderr)


@app.command()
def env() -> None:
    """Print versions and devices, for a bug report."""
    for name, value in describe_environment().items():
        print(f"{name}: {value}")


def main() -> None:
    """Entry point: an error that the user can mend is one line, without a traceback."""
    try:
        app()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
