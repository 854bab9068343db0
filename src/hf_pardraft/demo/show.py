"""`pardraft demo`: complete Python code with every drafter of a family, then compare them with plain `generate`."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from ..evaluation.benchmark import compare
from ..evaluation.metrics import ComparisonRow
from .display import RunStreamer, can_shade, results_table
from .family import Family, load_family
from .prompts import PROMPTS

REPEATS = 2


def show_demo(family_path: Path, prompt_file: Path | None, max_new_tokens: int, console: Console) -> None:
    """Print each drafter's text as it appears, then the table.

    Raises:
        FileNotFoundError: if there is no family in `family_path`.
        ValueError: if the prompt file holds no text, or `max_new_tokens` leaves no room for a prompt.
    """
    texts = read_prompts(prompt_file)
    family = load_family(family_path)
    prompts = [encode(family, text, max_new_tokens) for text in texts]
    mark = "Each coloured stretch" if can_shade(console) else "Between two bars"
    console.print(f"{mark}: what one draft and one forward of the target added.")
    for name in family.drafters:
        stream_completion(family, name, prompts[0], max_new_tokens, console)
    # A line that stands still: a spinner's thread would take its share of the time that is measured.
    console.print("\nMeasuring ...")
    console.print(results_table(compare(family.target, family.drafters, prompts, max_new_tokens, REPEATS)))
    console.print(
        f"Greedy, float32, up to {max_new_tokens} new tokens. Prompts: {len(prompts)}, best of {REPEATS} runs, "
        f"threads: {torch.get_num_threads()}.\ntau: mean tokens committed per forward of the target.",
        highlight=False,
    )


def demo_json(family_path: Path, prompt_file: Path | None, max_new_tokens: int) -> str:
    """The table of [`show_demo`] alone, as a JSON list of rows. Raises what `show_demo` raises."""
    texts = read_prompts(prompt_file)
    family = load_family(family_path)
    prompts = [encode(family, text, max_new_tokens) for text in texts]
    return rows_to_json(compare(family.target, family.drafters, prompts, max_new_tokens, REPEATS))


def rows_to_json(rows: list[ComparisonRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def read_prompts(prompt_file: Path | None) -> list[str]:
    """The text of the user's file, or the built-in prompts."""
    if prompt_file is None:
        return list(PROMPTS)
    text = prompt_file.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{prompt_file} holds no text: give a file with the beginning of some Python code")
    return [text]


def encode(family: Family, text: str, max_new_tokens: int) -> torch.LongTensor:
    """Token ids of `(1, length)`: the end of the text, as much of it as the target's context has room for."""
    context_length = family.target.config.max_position_embeddings
    room = context_length - max_new_tokens
    if room < 1:
        raise ValueError(
            f"{max_new_tokens} new tokens leave no room for a prompt, since the target's context is {context_length} "
            f"tokens: ask for at most {context_length - 1}"
        )
    return family.tokenizer(text, return_tensors="pt").input_ids[:, -room:]


def stream_completion(
    family: Family, name: str, prompt: torch.LongTensor, max_new_tokens: int, console: Console
) -> None:
    """Complete one prompt with one drafter, while printing."""
    drafter = family.drafters[name]
    console.rule(name, align="left")
    output_ids = family.target.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        streamer=RunStreamer(family.tokenizer, console),
    )
    num_tokens = output_ids.shape[1] - prompt.shape[1]
    console.print(f"{num_tokens} tokens in {drafter.last_stats.rounds} rounds", style="dim", highlight=False)
