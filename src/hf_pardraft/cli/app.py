"""The `pardraft` command: which commands there are, and how all of them begin and end."""

import io
import os
import sys
from importlib import metadata
from typing import Annotated

import transformers
import typer

from .cache_features import cache_features
from .card import card
from .chat import chat
from .convert import convert
from .demo import demo
from .env import env
from .errors import DEBUG_VARIABLE, finish
from .eval import ManyValues, evaluate
from .generate import generate
from .make import make
from .ngram import ngram
from .options import ANY_SETTINGS
from .push import push
from .regenerate import regenerate
from .serve import serve
from .train import train

# Rich's tables would cut the names of long options off in a narrow terminal.
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pardraft {metadata.version('hf-pardraft')}")
        raise typer.Exit


@app.callback()
def pardraft(
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the traceback of an error, as {DEBUG_VARIABLE}=1 does.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=tell_version)
    ] = False,
) -> None:
    """Parallel drafters for speculative decoding: the same text, sooner."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    quieten()


app.command("eval", cls=ManyValues)(evaluate)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(regenerate)
app.command()(make)
app.command(context_settings=ANY_SETTINGS, add_help_option=False)(train)
app.command(context_settings=ANY_SETTINGS)(cache_features)
app.command()(convert)
app.command()(card)
app.command()(push)
app.command(context_settings=ANY_SETTINGS)(serve)
app.command()(env)
app.add_typer(ngram, name="ngram")


def quieten() -> None:
    """Loading bars and notes on generation settings would drown the text."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def open_closed_streams() -> None:
    """Where a shell (`<&-`) or a service closed a standard stream: there is nothing to read, and nobody who reads."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def escape_what_output_lacks() -> None:
    """A character that the encoding of a pipe or file lacks is escaped, as on standard error: it would end a finished work."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main(command: typer.Typer = app) -> None:
    """Entry point: an error is one line, without a traceback unless that is asked for."""
    open_closed_streams()
    escape_what_output_lacks()
    try:
        command()
    # The one place where all of them end; a bug says there that it is one.
    except Exception as error:  # noqa: BLE001
        sys.exit(finish(error))
