"""A branch from the text itself: the drafter alone, transformers' prompt lookup alone, and both in one tree, by category.

    python benchmarks/text_lookup.py --target PATH/SmolLM2-135M-Instruct --questions spec_bench/question.jsonl
    python benchmarks/text_lookup.py --family

Greedy, in float32, one text at a time. `--questions` are Spec-Bench's, first turns, as chats; `--family` continues Python code
with the shipped demo family instead. Without `--drafter` an untrained DFlash drafter takes part, and with `--right` its guesses
are SIMULATED: right with that probability at each position, whatever the text, and the rows say so. All ways take turns on each
text. tau is tokens per forward of the target. Seconds are those after the first token, so that reading the prompt is no part.

Rows that were measured before, of other categories, drafters, budgets or schedules, are kept in the result, so that a long
measurement can be made of several commands.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_pardraft import AutoDrafter, DFlashDrafter
from hf_pardraft.demo.family import DRAFTER_NAMES, SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import built_in_prompts
from hf_pardraft.evaluation.calls import Condition, run
from hf_pardraft.evaluation.encoding import Chat, encode
from hf_pardraft.evaluation.entries import PLAIN, Entry, plain_entry, prompt_lookup_entry
from hf_pardraft.evaluation.measurement import padded_batch
from hf_pardraft.evaluation.prompts import turns
from hf_pardraft.generation.settings import DEFAULT_LOOKUP
from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.user_input.models import load_model, load_tokenizer
from result_files import RESULTS, public_command, save, this_machine

RESULT = RESULTS / "text_lookup.json"
# Of a row, what a busy machine does not change.
COUNTS = ("name", "tau", "texts", "same_texts")


@dataclass
class Texts:
    """What is continued, by category: `(1, length)` each."""

    name: str
    target: PreTrainedModel
    drafters: dict[str, ParallelDrafter]
    prompts: dict[str, list[torch.LongTensor]]
    simulated: float | None = None


@dataclass
class Tally:
    """What a way did with all texts of a category."""

    tokens: int = 0
    forwards: int = 0
    seconds: list[float] = field(default_factory=list)
    same: int = 0


class Simulated:
    """Lets a drafter do its work, and then be right about a known text with some probability at each position.

    Luck depends on the place of the text and the position in the draft alone, so that all ways meet the same.
    """

    def __init__(self, drafter: ParallelDrafter, right: float) -> None:
        self.draft, self.right, self.text = drafter.draft, right, torch.zeros(0, dtype=torch.long)
        vars(drafter)["draft"] = self

    def __call__(self, context, state, depth: int) -> torch.Tensor:
        logits = self.draft(context, state, depth)
        anchor = int(context.new_positions[0, -1])
        luck = torch.rand(depth, generator=torch.Generator().manual_seed(anchor))
        # Right or wrong, it says of its guess what is true: that it is right with this probability.
        claims = logits[0].logsumexp(dim=-1) + math.log(self.right / (1 - self.right))
        for position, token in enumerate(self.text[anchor + 1 : anchor + 1 + depth].tolist()):
            guess = token if luck[position] < self.right else (token + 1) % logits.shape[2]
            logits[0, position, guess] = claims[position]
        return logits


def ways(drafters: dict[str, ParallelDrafter], budget: int, schedules: list[str]) -> list[Entry]:
    """All that is compared, plain `generate` first."""
    entries = [plain_entry(), prompt_lookup_entry()]
    alone, lookup = ({"prompt_lookup_num_tokens": count} for count in (0, DEFAULT_LOOKUP))
    for name, drafter in drafters.items():
        for schedule in schedules:
            setting = {"tree_budget": budget, "draft_schedule": schedule}
            entries.append(Entry(f"{name}, {schedule}", drafter, {**setting, **alone}))
            entries.append(Entry(f"{name} and the text, {schedule}", drafter, {**setting, **lookup}))
    return entries


def read_family(arguments: argparse.Namespace) -> Texts:
    # Tensors this small only wait for a second thread.
    torch.set_num_threads(1)
    family = load_family(SHIPPED_FAMILY)
    prompts = [family.tokenizer(text, return_tensors="pt").input_ids for text in built_in_prompts()]
    chosen = spread(prompts, arguments.prompts or len(prompts))
    return Texts("demo family", family.target, family.drafters, {"Python code": chosen})


def read_questions(arguments: argparse.Namespace) -> Texts:
    tokenizer = load_tokenizer(str(arguments.target))
    target = load_model(str(arguments.target), dtype=torch.float32)
    if arguments.drafter:
        drafter = AutoDrafter.from_pretrained(arguments.drafter, dtype=torch.float32)
        drafters = {DRAFTER_NAMES[drafter.config.drafter_kind]: drafter}
    else:
        torch.manual_seed(0)
        name = "untrained drafter" if arguments.right is None else "simulated drafter"
        drafters = {name: DFlashDrafter.for_target(target, num_layers=1, block_size=8, mask_token_id=0)}
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    prompts: dict[str, list[torch.LongTensor]] = {}
    for row in rows:
        category = "multi-turn conversation" if row["category"] in MT_BENCH else row["category"]
        ids = encode(turns(row), tokenizer, Chat(tokenizer.chat_template is not None))
        if category in arguments.categories and ids.shape[1] <= arguments.longest:
            prompts.setdefault(category, []).append(ids)
    if arguments.right is not None:
        (drafter,) = drafters.values()
        Simulated(drafter, arguments.right)
    chosen = {category: spread(all_of_it, arguments.prompts or 2) for category, all_of_it in prompts.items()}
    return Texts(arguments.target.name, target, drafters, chosen, arguments.right)


# Spec-Bench calls these multi-turn conversation.
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CATEGORIES = ("multi-turn conversation", "translation", "summarization", "qa", "math_reasoning", "rag")


def spread(prompts: list[torch.LongTensor], count: int) -> list[torch.LongTensor]:
    """Some prompts, evenly spread."""
    return prompts[:: max(1, len(prompts) // count)][:count]


@contextmanager
def counted_forwards(target: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens that each forward of the target reads."""
    counts: list[int] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield counts
    finally:
        handle.remove()


def measure(texts: Texts, prompts: list[torch.LongTensor], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way, of the texts of two tokens and more; none if there are no such texts."""
    entries = ways(texts.drafters, arguments.budget, arguments.schedules)
    tallies, condition = {entry.name: Tally() for entry in entries}, Condition(max_new_tokens=arguments.max_new_tokens)
    plain = entries[0]
    for prompt in prompts:
        batch = padded_batch([prompt])
        first = min(run(texts.target, plain, batch, condition, max_new_tokens=1).seconds for _ in range(2))
        for _ in range(arguments.repeats):
            for entry in entries:
                with counted_forwards(texts.target) as counts:
                    result = run(texts.target, entry, batch, condition)
                if entry.is_plain:
                    expected = result.texts
                    for drafter in texts.drafters.values():
                        if isinstance(simulated := vars(drafter).get("draft"), Simulated):
                            simulated.text = torch.cat([prompt[0], torch.tensor(expected[0])])
                    if len(expected[0]) < 2:
                        # There are no seconds after the first token.
                        break
                tally = tallies[entry.name]
                tally.tokens += result.num_tokens
                tally.forwards += len(counts)
                tally.same += result.texts == expected
                tally.seconds.append((result.seconds - first) / (result.num_tokens - 1))
    rows = [row_of(name, tally, tallies[PLAIN]) for name, tally in tallies.items() if tally.seconds]
    return rows if arguments.timed else [{key: row[key] for key in COUNTS} for row in rows]


def row_of(name: str, tally: Tally, plain: Tally) -> dict[str, Any]:
    ratios = [theirs / own for own, theirs in zip(tally.seconds, plain.seconds, strict=True)]
    return {
        "name": name,
        "tau": round(tally.tokens / tally.forwards, 2),
        "ms_per_token": round(1000 * statistics.mean(tally.seconds), 2),
        "speedup": round(statistics.mean(plain.seconds) / statistics.mean(tally.seconds), 2),
        "speedup_least": round(min(ratios), 2),
        "speedup_most": round(max(ratios), 2),
        "texts": len(tally.seconds),
        "same_texts": tally.same,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, help="folder of the target")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter for it; by default an untrained one")
    parser.add_argument("--questions", type=Path, help="question.jsonl of Spec-Bench")
    parser.add_argument("--family", action="store_true", help="the demo family on Python code instead")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    parser.add_argument("--right", type=float, help="how often a simulated drafter is right at a position, below 1")
    parser.add_argument("--budget", type=int, default=16, help="nodes of a tree")
    parser.add_argument("--schedules", nargs="+", choices=["fixed", "auto"], default=["fixed"], help="draft_schedule")
    parser.add_argument("--prompts", type=int, help="of each category; by default 2, or all of the family's")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--untimed", dest="timed", action="store_false", help="tau alone, on a machine that is busy")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if not arguments.family and not (arguments.target and arguments.questions):
        parser.error("give --target and --questions, or --family")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    texts = read_family(arguments) if arguments.family else read_questions(arguments)
    runs = json.loads(arguments.output.read_text())["runs"] if arguments.output.exists() else []
    for category, prompts in texts.prompts.items():
        started = time.perf_counter()
        about = {
            "target": texts.name,
            "drafters": list(texts.drafters),
            "category": category,
            "simulated_rate": texts.simulated,
            "tree_budget": arguments.budget,
            "schedules": sorted(arguments.schedules),
        }
        rows = measure(texts, prompts, arguments)
        if not rows:
            print(f"{texts.name}, {category}: the target writes no text of two tokens")
            continue
        facts = {
            "dtype": "float32",
            "machine": this_machine(),
            "command": public_command(),
            "lookup_tokens": DEFAULT_LOOKUP,
            "new_tokens_at_most": arguments.max_new_tokens,
            "prompts": len(prompts),
            "prompt_tokens": [prompt.shape[1] for prompt in prompts],
            "seconds": round(time.perf_counter() - started, 1),
        }
        runs = [run for run in runs if {key: run[key] for key in about} != about]
        runs.append({**about, **facts, "rows": rows})
        save(arguments.output, {"runs": runs})
        print(f"{texts.name}, {category}, {len(prompts)} prompts")
        for row in rows:
            seconds = f"{row['ms_per_token']:8.2f} ms  {row['speedup']:5.2f}x" if arguments.timed else ""
            print(f"  {row['name']:40} tau {row['tau']:5.2f}  {seconds}")


if __name__ == "__main__":
    main()
