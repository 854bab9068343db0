"""`pardraft make`: a drafter for a target, from nothing, in the hours that there are."""

from pathlib import Path
from typing import Annotated

import typer

from .options import ChatTemplateKwargs, parse_template_kwargs


def make(
    target: Annotated[str, typer.Option(help="The model to draft for: a folder or a Hub repository.")],
    output: Annotated[
        Path, typer.Option(help="Folder of the run. The same command goes on with one that was cut off.")
    ],
    kind: Annotated[str, typer.Option(help="Of the drafter: dflare, dflash, dart or pard.")] = "dflare",
    hours: Annotated[float, typer.Option(help="That all of it may take, about.")] = 4.0,
    dataset: Annotated[
        str | None,
        typer.Option(help="Prompts for the target to answer, a file or a data set; by default it writes them itself."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="pard: a small LM with the target's tokenizer, to begin with.",
            show_default="the target with fewer layers",
        ),
    ] = None,
    bf16: Annotated[
        bool | None,
        typer.Option("--bf16/--no-bf16", help="Compute in bfloat16.", show_default="where an accelerator does it"),
    ] = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with the target.")
    ] = False,
) -> None:
    """Make a drafter for a target: the target writes text, a drafter learns it, is measured, and gets its card.

    Each step is a command of its own, which is printed, so that it can be repeated or changed by hand.
    """
    # As for `pardraft train`.
    from ..making.run import make_drafter
    from ..making.settings import MakeSettings

    settings = MakeSettings(
        target=target,
        kind=kind,
        hours=hours,
        dataset=dataset,
        base=base,
        bf16=bf16,
        chat_template_kwargs=parse_template_kwargs(chat_template_kwargs),
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    lines = make_drafter(settings, output, tell=lambda line: print(line, flush=True))
    print("\n" + "\n".join(lines))
