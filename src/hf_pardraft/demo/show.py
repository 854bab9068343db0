"""`pardraft demo`: complete Python code with every drafter of a family, then compare them with plain `generate`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import GenerationConfig

from ..evaluation.calls import Condition
from ..evaluation.encoding import room_for_prompts
from ..evaluation.entries import Entry, compiled_twin, plain_entry
from ..evaluation.measurement import race
from ..evaluation.report import print_table
from ..evaluation.rows import Comparison, compare
from ..terminal.runs import RunStreamer, can_shade
from ..user_input.files import read_text
from .display import results_table
from .family import SHIPPED_FAMILY, Family, load_family
from .prompts import built_in_prompts

REPEATS = 2


@dataclass(frozen=True)
class DemoOptions:
    """What `pardraft demo` is asked to show.

    Attributes:
        family_path: folder of the family.
        prompt_file: Python code to complete; `None` for the built-in prompts.
        max_new_tokens: tokens to write per prompt.
        tree_budget: nodes of the token trees that are compared with chains; 0 for chains alone.
        batch_size: prompts to decode at once.
        compiled: whether to compare with compiled rounds, too.
    """

    family_path: Path = SHIPPED_FAMILY
    prompt_file: Path | None = None
    max_new_tokens: int = 96
    tree_budget: int = 0
    batch_size: int = 1
    compiled: bool = False


def show_demo(options: DemoOptions, console: Console) -> None:
    """Print each drafter's text as it appears, then the table.

    Raises:
        FileNotFoundError: if there is no family in `family_path`.
        ValueError: if the prompt file holds no text, or `max_new_tokens` leaves no room for a prompt.
    """
    family, prompts = load(options)
    mark = "Each coloured stretch" if can_shade(console) else "Between two bars"
    console.print(f"{mark}: what one draft and one forward of the target added.")
    for name in family.drafters:
        stream_completion(family, name, prompts[0], options, console)
    # A line that stands still: a spinner's thread would take its share of the time that is measured.
    compiling = " Compiling takes a minute or two for each drafter." if options.compiled else ""
    console.print(f"\nMeasuring ...{compiling}")
    print_table(results_table(measured(family, prompts, options)), console)
    at_once = f", {options.batch_size} at once" if options.batch_size > 1 else ""
    console.print(
        f"Greedy, float32, up to {options.max_new_tokens} new tokens. Prompts: {len(prompts)}{at_once}, best of {REPEATS} "
        f"runs, threads: {torch.get_num_threads()}.\ntau: mean tokens that a forward of the target commits to a text.",
        highlight=False,
    )


def demo_json(options: DemoOptions) -> str:
    """The table of [`show_demo`] alone, as a JSON list. Raises what `show_demo` raises."""
    family, prompts = load(options)
    return rows_to_json(measured(family, prompts, options))


def load(options: DemoOptions) -> tuple[Family, list[torch.LongTensor]]:
    """The family, and the prompts' token ids, `(1, length)` each."""
    texts = read_prompts(options.prompt_file)
    family = load_family(options.family_path)
    return family, [encode(family, text, options.max_new_tokens) for text in texts]


def measured(family: Family, prompts: list[torch.LongTensor], options: DemoOptions) -> list[Comparison]:
    """Each drafter with chains, with trees if there is a budget for them, and all of these compiled if that is asked for."""
    entries = [plain_entry()]
    for name, drafter in family.drafters.items():
        ways = [Entry(name, drafter)]
        if options.tree_budget:
            ways.append(Entry(f"{name}, tree of {options.tree_budget}", drafter, tree_settings(options)))
        for entry in ways:
            entries += [entry, compiled_twin(entry)] if options.compiled else [entry]
    condition = Condition(options.batch_size, max_new_tokens=options.max_new_tokens, repeats=REPEATS)
    return compare(race(family.target, entries, prompts, condition), condition)


def tree_settings(options: DemoOptions) -> dict[str, int]:
    return {"tree_budget": options.tree_budget} if options.tree_budget else {}


def rows_to_json(rows: list[Comparison]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def read_prompts(prompt_file: Path | None) -> list[str]:
    """The text of the user's file, or the built-in prompts."""
    if prompt_file is None:
        return built_in_prompts()
    text = read_text(prompt_file)
    if not text.strip():
        raise ValueError(f"{prompt_file} holds no text: give a file with the beginning of some Python code")
    return [text]


def encode(family: Family, text: str, max_new_tokens: int) -> torch.LongTensor:
    """Token ids of `(1, length)`: the end of the text, as much of it as the target's context has room for."""
    room = room_for_prompts(family.target.config, max_new_tokens) or 0
    return family.tokenizer(text, return_tensors="pt").input_ids[:, -room:]


def stream_completion(
    family: Family, name: str, prompt: torch.LongTensor, options: DemoOptions, console: Console
) -> None:
    """Complete one prompt with one drafter, while printing."""
    drafter = family.drafters[name]
    console.rule(name, align="left")
    config = GenerationConfig(do_sample=False, max_new_tokens=options.max_new_tokens, **tree_settings(options))
    output_ids = family.target.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        generation_config=config,
        streamer=RunStreamer(family.tokenizer, console),
    )
    num_tokens = output_ids.shape[1] - prompt.shape[1]
    console.print(f"{num_tokens} tokens in {drafter.last_stats.rounds} rounds", style="dim", highlight=False)
