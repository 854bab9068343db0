"""What the commands `pardraft generate` and `pardraft env` do; cli/app.py only reads their arguments."""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, TextStreamer

from ..user_input.files import decode_text, read_text
from ..user_input.models import load_models
from ..user_input.options import available_devices, check_temperature


@dataclass
class Completion:
    """What `pardraft generate` is asked to do. `temperature` 0 is greedy; `drafter` `None` is plain `generate`;
    `trust_remote_code` lets the target run the code that comes with it."""

    target: str
    drafter: str | None
    prompt: str
    max_new_tokens: int
    temperature: float
    dtype: str
    device: str
    trust_remote_code: bool = False


def complete(request: Completion) -> str:
    """Print the completion as it appears; return a line about the rounds (empty without a drafter).

    Raises:
        OSError, ValueError: if a model can't be loaded, or the drafter does not fit the target.
    """
    check_temperature(request.temperature)
    tokenizer, target, drafter = load_models(
        request.target, request.drafter, request.dtype, request.device, request.trust_remote_code
    )
    inputs = tokenizer(request.prompt, return_tensors="pt").to(target.device)
    max_new_tokens = fitting_length(target, inputs["input_ids"].shape[1], request.max_new_tokens)
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        # A drafter that was trained with another tokenizer says so.
        tokenizer=tokenizer,
        **sampling,
    )
    if drafter is None:
        return ""
    stats = drafter.last_stats
    return f"{sum(stats.tokens_per_round)} tokens in {stats.rounds} rounds, {stats.tau:.2f} a round (tau)"


def fitting_length(target: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> int:
    """How many tokens fit into the target's context behind a prompt, `max_new_tokens` at most; says so if it is fewer.

    Raises:
        ValueError: if there is no room for any, or no prompt.
    """
    if prompt_length == 0:
        raise ValueError("the prompt has no token: the target needs one at least to go on from")
    context = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    if context is None or prompt_length + max_new_tokens <= context:
        return max_new_tokens
    if prompt_length >= context:
        raise ValueError(
            f"the prompt has {prompt_length} tokens, and the target's context is {context}: shorten the prompt"
        )
    print(
        f"The target's context of {context} tokens has room for {context - prompt_length} behind the prompt, not for "
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
    # Bytes of a command line that are no UTF-8 arrive as half characters.
    elif any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is no UTF-8 text: pass it in a file with --prompt-file, saved as UTF-8")
    if not prompt:
        raise ValueError("expected a prompt, got an empty text: the target needs at least one token to go on from")
    return prompt


def read_stdin() -> str:
    """All of standard input, whatever the terminal's encoding is thought to be."""
    return decode_text(sys.stdin.buffer.read(), "standard input").replace("\r\n", "\n")


def describe_environment() -> dict[str, str]:
    """What a bug report should say about this machine."""
    from ..evaluation.facts import installed_versions

    return {
        **installed_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(available_devices()),
    }
