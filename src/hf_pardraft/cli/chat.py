"""`pardraft chat`: a conversation in the terminal, with a drafter or without."""

import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..terminal.conversation import Conversation
from ..terminal.safe_text import harmless
from ..terminal.sampling import Sampling
from ..terminal.session import Session
from ..terminal.writer import Writer
from ..user_input.files import decode_text, has_half_characters
from ..user_input.models import end_of_text_ids, load_models
from .options import ChatTemplateKwargs, Device, Drafter, Dtype, TrustRemoteCode, parse_template_kwargs

PROMPT = "> "


def chat(
    target: Annotated[str, typer.Option(help="The model that answers: a folder or a Hub repository.")],
    drafter: Drafter = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    runs: Annotated[
        bool, typer.Option("--runs", help="Mark what one draft and one forward of the target added (/runs).")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            help="After each answer tell tokens a second, tau, and what plain generate would have taken: it writes the first "
            "tokens of an answer, the same ones, to be timed."
        ),
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; by default what the target's generation config says.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of the law to draw from.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="How many tokens to draw from; 0: all.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, what was said becomes less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn.")] = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Go on from what is typed as it stands.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Chat with a target and its drafter. Ctrl-C stops an answer, /help lists what can be typed."""
    template_kwargs = parse_template_kwargs(chat_template_kwargs)
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty)
    tokenizer, model, assistant = load_models(target, drafter, dtype, device, trust_remote_code)
    if seed is not None:
        torch.manual_seed(seed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows another.
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    writer = Writer(model, assistant, tokenizer, sampling, compares=stats)
    conversation = Conversation(tokenizer, end_of_text_ids(model), system, not no_chat_template, template_kwargs)
    session = Session(conversation, writer, console, line_reader(console), marks=runs, tells=stats)
    with_drafter = "without a drafter" if assistant is None else f"with {type(assistant).__name__} {drafter}"
    session.say(f"{target} {with_drafter}. /help lists what can be typed, /quit leaves.")
    if not conversation.use_template:
        session.say("Without a chat template: the target goes on from what you type as it stands.")
    session.run()


def line_reader(console: Console) -> Callable[[], str]:
    """What returns the user's next line: typed at a prompt, or from a pipe or file and then shown."""
    if not sys.stdin.isatty():
        return partial(piped_line, console)
    with contextlib.suppress(ImportError):
        # Arrow keys and history, where the platform has them.
        import readline  # noqa: F401
    return typed_line


def typed_line() -> str:
    """A line that is typed.

    Raises:
        EOFError: at Ctrl-D.
        ValueError: if it is no UTF-8.
    """
    line = input(PROMPT)
    if has_half_characters(line):
        raise ValueError("the message is no UTF-8 text: set the terminal to UTF-8")
    return line


def piped_line(console: Console) -> str:
    """The next line of standard input, whatever the terminal's encoding is thought to be; it is shown as if it were typed."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    text = decode_text(line, "standard input").rstrip("\r\n")
    console.print(PROMPT + harmless(text), markup=False, highlight=False, soft_wrap=True)
    return text
