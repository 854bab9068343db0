"""`pardraft generate`: one prompt, completed with a drafter or without."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..terminal.safe_text import HarmlessStreamer
from ..user_input.files import decode_text, has_half_characters, read_text
from ..user_input.models import context_length, load_models
from ..user_input.options import check_temperature
from .options import Device, Drafter, Dtype, PromptFile, Target, TrustRemoteCode


def generate(
    target: Target,
    drafter: Drafter = None,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; standard input by default.")] = None,
    prompt_file: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error how drafting went.")] = False,
) -> None:
    """Complete a prompt, with a drafter or without."""
    text = read_prompt(prompt, prompt_file)
    check_temperature(temperature)
    tokenizer, model, assistant = load_models(target, drafter, dtype, device, trust_remote_code)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    model.generate(
        **inputs,
        assistant_model=assistant,
        max_new_tokens=fitting_length(model, inputs["input_ids"].shape[1], max_new_tokens),
        streamer=streamer_for(tokenizer),
        # A drafter that was trained with another tokenizer says so.
        tokenizer=tokenizer,
        **sampling,
    )
    if stats and assistant is not None:
        told = assistant.last_stats
        line = f"{sum(told.tokens_per_round)} tokens in {told.rounds} rounds, {told.tau:.2f} a round (tau)"
        print(line, file=sys.stderr)


def streamer_for(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """What prints the text: as it is into a pipe or a file, and so that it can't steer a terminal."""
    kind = HarmlessStreamer if sys.stdout.isatty() else TextStreamer
    return kind(tokenizer, skip_prompt=True, skip_special_tokens=True)


def fitting_length(target: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> int:
    """How many tokens fit into the target's context after a prompt, `max_new_tokens` at most; says so if it is fewer.

    Raises:
        ValueError: if there is no room for any, or no prompt.
    """
    if prompt_length == 0:
        raise ValueError("the prompt has no token: the target needs one at least to go on from")
    context = context_length(target.config)
    if context is None or prompt_length + max_new_tokens <= context:
        return max_new_tokens
    if prompt_length >= context:
        raise ValueError(
            f"the prompt has {prompt_length} tokens, and the target's context is {context}: shorten the prompt"
        )
    print(
        f"The target's context of {context} tokens has room for {context - prompt_length} after the prompt, not for "
        f"{max_new_tokens}.",
        file=sys.stderr,
    )
    return context - prompt_length


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt given as an argument, in a file, or on standard input.

    Raises:
        OSError: if a file can't be read.
        ValueError: if there is none, both an argument and a file, or it is no UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise ValueError("expected one prompt, got both an argument and --prompt-file: leave one of them out")
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise ValueError("expected a prompt: pass it as an argument, with --prompt-file, or on standard input")
    if prompt is None:
        prompt = read_stdin() if prompt_file is None else read_text(prompt_file)
    elif has_half_characters(prompt):
        raise ValueError("the prompt is no UTF-8 text: pass it in a file with --prompt-file, saved as UTF-8")
    if not prompt:
        raise ValueError("expected a prompt, got an empty text: the target needs at least one token to go on from")
    return prompt


def read_stdin() -> str:
    """All of standard input, whatever the terminal's encoding is thought to be."""
    return decode_text(sys.stdin.buffer.read(), "standard input").replace("\r\n", "\n")
