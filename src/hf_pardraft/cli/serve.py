"""`pardraft serve`: Transformers' own server, with a drafter."""

from typing import Annotated

import typer
from transformers.utils.import_utils import is_serve_available

from .options import Target


def serve(
    context: typer.Context,
    target: Target,
    drafter: Annotated[str, typer.Option(help="Its drafter, likewise.")],
) -> None:
    """Serve a target with its drafter, as `transformers serve TARGET` does without one.

    Takes all options of that command, too: --host, --port, --dtype, --device, --compile, ...; `transformers serve --help`
    explains them.
    """
    if not is_serve_available():
        raise ImportError("serving needs fastapi, uvicorn and openai: pip install 'hf-pardraft[serve]'")
    # With the web libraries that it imports, this takes a second that other commands have no use for.
    from transformers.cli.serve import Serve

    from ..serving import drafting_with

    server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    server.command()(Serve)
    try:
        with drafting_with(drafter):
            server([target, *context.args], prog_name="pardraft serve")
    # What it looks up unchecked, or hands on to the operating system.
    except (LookupError, OverflowError) as error:
        raise ValueError(
            f"transformers serve can't start with {' '.join(context.args)} ({type(error).__name__}: {error}): see "
            "transformers serve --help"
        ) from error
