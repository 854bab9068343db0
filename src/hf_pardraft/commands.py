"""What the commands `pardraft generate` and `pardraft env` do; cli.py only reads their arguments."""

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .auto import AutoDrafter
from .models.drafting import ParallelDrafter

DISTRIBUTIONS = ("hf-pardraft", "torch", "transformers", "tokenizers", "accelerate", "datasets")


@dataclass
class Completion:
    """What `pardraft generate` is asked to do. `temperature` 0 is greedy; `drafter` `None` is plain `generate`."""

    target: str
    drafter: str | None
    prompt: str
    max_new_tokens: int
    temperature: float
    dtype: str
    device: str


def complete(request: Completion) -> str:
    """Print the completion as it appears; return a line about the rounds (empty without a drafter).

    Raises:
        OSError, ValueError: if a model can't be loaded, or the drafter does not fit the target.
    """
    tokenizer, target, drafter = load_models(request.target, request.drafter, request.dtype, request.device)
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    target.generate(
        **tokenizer(request.prompt, return_tensors="pt").to(target.device),
        assistant_model=drafter,
        max_new_tokens=request.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        # A drafter that was trained with another tokenizer says so.
        tokenizer=tokenizer,
        **sampling,
    )
    if drafter is None:
        return ""
    stats = drafter.last_stats
    return f"{sum(stats.tokens_per_round)} tokens in {stats.rounds} rounds, {stats.tau:.2f} a round (tau)"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    with naming(name):
        return AutoTokenizer.from_pretrained(name)


def load_models(
    target: str, drafter: str | None, dtype: str, device: str
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, ParallelDrafter | None]:
    """The target's tokenizer, the target, and its drafter if one is named.

    Raises:
        OSError, ValueError: if one can't be loaded.
    """
    options = {"dtype": dtype, "device_map": device}
    tokenizer = load_tokenizer(target)
    with naming(target):
        loaded = AutoModelForCausalLM.from_pretrained(target, **options)
    if not drafter:
        return tokenizer, loaded, None
    with naming(drafter):
        return tokenizer, loaded, AutoDrafter.from_pretrained(drafter, **options)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Say what could not be loaded: transformers' own message may not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"can't load {source!r}: {error}") from error


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt given as an argument, in a file, or on standard input.

    Raises:
        ValueError: if there is none, or both an argument and a file.
    """
    if prompt is not None and prompt_file is not None:
        raise ValueError("expected one prompt, got both an argument and --prompt-file: leave one of them out")
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise ValueError("expected a prompt: pass it as an argument, with --prompt-file, or on standard input")
    if prompt is None:
        prompt = sys.stdin.read() if prompt_file is None else prompt_file.read_text(encoding="utf-8")
    if not prompt:
        raise ValueError("expected a prompt, got an empty text: the target needs at least one token to go on from")
    return prompt


def describe_environment() -> dict[str, str]:
    """What a bug report should say about this machine."""
    return {
        **{name: installed_version(name) for name in DISTRIBUTIONS},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(available_devices()),
    }


def installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def available_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count()
    names = [] if accelerator is None else [f"{accelerator.type}:{index}" for index in range(count)]
    return ["cpu", *names]
