"""What sampled_text.py measures: speed and tau of sampled text in turns, and how far it stays plain `generate`'s in float32."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_pardraft import AutoDrafter, DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.evaluation.calls import Condition, run
from hf_pardraft.evaluation.entries import PLAIN, Entry, plain_entry
from hf_pardraft.evaluation.measurement import kept_random_state, padded_batch
from hf_pardraft.models.base import ParallelDrafter
from loop_overhead import random_target
from stories260k import EVALUATION_TOKENS, story_beginnings

TREE_BUDGET = 16
# Equal work in every round, whatever the machine.
FIXED = {"draft_schedule": "fixed"}
WAYS = {
    "chain": FIXED,
    "tree": {"tree_budget": TREE_BUDGET, **FIXED},
    "rejection": {"verification": "rejection", **FIXED},
}
# Greedy text is drawn from nothing.
GREEDY_WAYS = ("chain", "tree")


@dataclass(frozen=True)
class Case:
    """A target, beginnings of texts `(1, length)` each, and where the drafters are."""

    target: PreTrainedModel
    prompts: list[torch.LongTensor]
    drafters: Path | None

    def drafter(self, kind: str) -> ParallelDrafter:
        """A trained drafter, or an untrained one where the target is random."""
        if self.drafters is not None:
            return AutoDrafter.from_pretrained(self.drafters / kind)
        if kind == "PARD":
            drafter = PardDrafter.from_causal_lm(self.target, mask_token_id=1)
            drafter.generation_config.num_assistant_tokens = 4
            return drafter
        if kind == "DART":
            return DartDrafter.for_target(self.target, draft_length=3)
        drafter_class = {"DFlash": DFlashDrafter, "DFlare": DFlareDrafter}[kind]
        return drafter_class.for_target(self.target, num_layers=1, block_size=5, mask_token_id=1)


def case_of(arguments: Namespace, num_prompts: int) -> Case:
    """stories260K with its drafters, and the beginnings of some stories."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.stories)
    target = AutoModelForCausalLM.from_pretrained(arguments.stories, dtype=torch.float32).eval()
    prompts = story_beginnings(arguments.prompt_text, tokenizer, num_prompts, EVALUATION_TOKENS)
    return Case(target, list(prompts.split(1)), arguments.drafters)


def quick_case(num_prompts: int) -> Case:
    """A tiny random target, which shows that everything runs."""
    prompts = torch.randint(3, 500, (num_prompts, 8), generator=torch.Generator().manual_seed(0))
    return Case(random_target(quick=True), list(prompts.split(1)), None)


def entries_of(kind: str, drafter: ParallelDrafter, temperature: float) -> list[Entry]:
    """Plain `generate`, and all that a drafter can do at a temperature."""
    ways = WAYS if temperature else GREEDY_WAYS
    return [plain_entry(), *(Entry(f"{kind}, {way}", drafter, WAYS[way]) for way in ways)]


@dataclass(frozen=True)
class Turn:
    """What one way of decoding did with the texts of a repeat.

    Attributes:
        name: of the way.
        tokens, seconds: written, and how long it took, prompts included.
        rounds: forwards of the target.
        same_texts: how many texts are exactly plain `generate`'s of the same seed.
    """

    name: str
    tokens: int
    seconds: float
    rounds: int
    same_texts: int


def repeat_of(case: Case, kind: str, temperature: float, repeat: int, at_once: int, new_tokens: int) -> list[Turn]:
    """One repeat: plain `generate` and all ways of a drafter take turns on some prompts, each of which has its own seed.

    Args:
        case, kind, temperature: what is measured.
        repeat: its number; the n-th has the n-th `at_once` prompts.
        at_once: prompts of a repeat.
        new_tokens: at most, of each text.
    """
    entries = entries_of(kind, case.drafter(kind), temperature)
    totals = {entry.name: [0, 0.0, 0, 0] for entry in entries}
    with kept_random_state(case.target.device):
        for entry in entries:
            run(case.target, entry, padded_batch(case.prompts[:1]), Condition(temperature=temperature), 8)
        for index in range(repeat * at_once, (repeat + 1) * at_once):
            batch = padded_batch([case.prompts[index % len(case.prompts)]])
            condition = Condition(temperature=temperature, max_new_tokens=new_tokens, seed=index)
            texts = {}
            for entry in entries:
                done = run(case.target, entry, batch, condition)
                texts[entry.name] = done.texts
                counts = (done.num_tokens, done.seconds, len(done.tokens_per_round), done.texts == texts[PLAIN])
                totals[entry.name] = [total + count for total, count in zip(totals[entry.name], counts, strict=True)]
    return [Turn(name, *total) for name, total in totals.items()]


@dataclass(frozen=True)
class Compared:
    """A batch of texts beside those of plain `generate` with the same seed.

    Attributes:
        seed: of torch's generator.
        way: drafter and kind of proposal.
        tokens: compared, from the beginning of each text to its first difference, that counted, or to its end; the rest of a
            text that differs doesn't count.
        first_differences: of each text that differs, how many new tokens stand before the first one.
        same_state: whether the generator ended where plain `generate` leaves it.
    """

    seed: int
    way: str
    tokens: int
    first_differences: list[int]
    same_state: bool


def compared(case: Case, entry: Entry, condition: Condition) -> Compared:
    """One seed: a batch of texts, with a drafter and without."""
    size = condition.batch_size
    prompts = [case.prompts[(condition.seed * size + item) % len(case.prompts)] for item in range(size)]
    texts, states = [], []
    for each in (plain_entry(), entry):
        texts.append(run(case.target, each, padded_batch(prompts), condition).texts)
        states.append(torch.get_rng_state())
    tokens, first_differences = 0, []
    for expected, found in zip(*texts, strict=True):
        same = common_length(expected, found)
        tokens += same + (expected != found)
        if expected != found:
            first_differences.append(same)
    return Compared(condition.seed, entry.name, tokens, first_differences, torch.equal(*states))


def common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two texts have in common from the beginning."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def all_compared(case: Case, kinds: list[str], num_tokens: int, condition: Condition) -> Iterator[dict[str, Any]]:
    """Seed after seed, each with the next drafter and proposal in turn, until `num_tokens` tokens were compared."""
    entries = [
        Entry(f"{kind}, {way}", drafter, WAYS[way])
        for kind, drafter in ((kind, case.drafter(kind)) for kind in kinds)
        for way in GREEDY_WAYS
    ]
    seen, seed = 0, 0
    with kept_random_state(case.target.device):
        while seen < num_tokens:
            result = compared(case, entries[seed % len(entries)], condition.on_batch(seed))
            yield asdict(result)
            seen, seed = seen + result.tokens, seed + 1
