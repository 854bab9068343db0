"""Options that several commands have, what is read of them, and how a command tells what it found out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..user_input.files import parse_json, quoted

# Commands that hand their settings on, so that each is described in one place.
ANY_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

Target = Annotated[str, typer.Option(help="The model whose text it is: a folder or a Hub repository.")]
Drafter = Annotated[str | None, typer.Option(help="Its drafter, likewise. Without one: plain generate.")]
ChatTemplateKwargs = Annotated[
    str | None, typer.Option(help='JSON for the chat template, such as {"enable_thinking": false}.')
]
PromptFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Read the prompt from this file.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code that comes with the target. No drafter's code is run."),
]
TrustTokenizerCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with the tokenizer.")
]


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """The settings of the chat template, from JSON.

    Raises:
        ValueError: if it is no JSON object.
    """
    parsed = parse_json(text, f"--chat-template-kwargs {quoted(text)}") if text else {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected --chat-template-kwargs as a JSON object, got {quoted(text)}")
    return parsed


def print_facts(facts: dict[str, object]) -> None:
    for name, value in facts.items():
        print(f"{name}: {value}")
