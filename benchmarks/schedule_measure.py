"""One case at one temperature and batch size: a sweep of fixed settings, and then the best of them beside the schedule."""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import truediv
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from hf_pardraft.evaluation.calls import Batch, Condition, TimedRun, run
from hf_pardraft.evaluation.entries import COMPILED, PLAIN, Entry, plain_entry
from hf_pardraft.evaluation.measurement import in_batches, kept_random_state, warm_up
from hf_pardraft.models.base import ParallelDrafter
from schedule_cases import Case
from time_slices import Worker, ask_all, workers

AUTO, FIRST, DEFAULT = "auto", "auto, first call", "default"
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
TREE_BUDGETS = (4, 8, 16, 32, 64)
# A shape is compiled in seconds.
COMPILED_BUDGETS = (16,)

# A run, and how often a text was drafted so many tokens in a round of it.
Decoded = tuple[TimedRun, Counter[int]]


@dataclass
class Way:
    """One way to decode, and what was seen of it.

    Attributes:
        entry: how.
        turns: the runs of each turn, one for each batch.
        drafted: how often a text was drafted so many tokens in a round, in the last turn.
        renewed: how each turn decodes, if that is another entry than in the last one.
    """

    entry: Entry
    turns: list[list[TimedRun]] = field(default_factory=list)
    drafted: Counter[int] = field(default_factory=Counter)
    renewed: Callable[[], Entry] | None = None

    def decode(self, target: PreTrainedModel, batch: Batch, condition: Condition) -> Decoded:
        """Decode a batch; the run, and how often a text was drafted so many tokens in a round of it."""
        done = run(target, self.entry, batch, condition)
        return done, Counter(self.entry.assistant.last_stats.drafted_per_round if self.entry.is_parallel else ())

    def note(self, done: TimedRun, drafted: Counter[int]) -> None:
        """Keep what was decoded in the turn that was begun last."""
        self.turns[-1].append(done)
        self.drafted.update(drafted)

    def begin_turn(self) -> None:
        self.turns.append([])
        self.drafted = Counter()

    def seconds(self) -> list[float]:
        """Of each batch, the median of its turns."""
        return [median(each.seconds for each in turns) for turns in zip(*self.turns, strict=True)]

    def speedups(self, plain: "Way") -> list[float]:
        """Over plain `generate`, for each batch: the median of the turns' ratios.

        A machine that is slower for some seconds is so for both, which come right after each other.
        """
        pairs = zip(zip(*plain.turns, strict=True), zip(*self.turns, strict=True), strict=True)
        return [median(p.seconds / own.seconds for p, own in zip(*pair, strict=True)) for pair in pairs]

    def turn_speedups(self, plain: "Way") -> list[float]:
        """Over plain `generate` in each turn, all batches together."""
        pairs = zip(plain.turns, self.turns, strict=True)
        return [truediv(*(sum(each.seconds for each in turn) for turn in pair)) for pair in pairs]

    def row(self, plain: "Way") -> dict[str, Any]:
        """Its figures beside those of plain `generate`, which took the same turns."""
        runs = self.turns[-1]
        counts = [count for each in runs for count in each.tokens_per_round]
        speedups, plain_seconds = self.speedups(plain), plain.seconds()
        return {
            "name": self.entry.name,
            "tokens_per_second": sum(each.num_tokens for each in runs) / sum(self.seconds()),
            # Of all batches: each counts as long as plain `generate` takes for it.
            "speedup": sum(plain_seconds) / sum(map(truediv, plain_seconds, speedups)),
            # The first batch alone, which a new drafter begins with.
            "first_speedup": speedups[0],
            "turn_speedups": self.turn_speedups(plain),
            "tau": sum(counts) / len(counts),
            "same_text": all(
                mine.texts == theirs.texts
                for turn, reference in zip(self.turns, plain.turns, strict=True)
                for mine, theirs in zip(turn, reference, strict=True)
            ),
            "drafted": {str(number): count for number, count in sorted(self.drafted.items())},
            "turns": len(self.turns),
        }


def fixed(depth: int, tree_budget: int = 0) -> dict[str, Any]:
    """The settings of a call that drafts the same in every round."""
    return {"draft_schedule": "fixed", "num_assistant_tokens": depth, "tree_budget": tree_budget}


def grid(drafter: ParallelDrafter, batch_size: int, arguments: Namespace) -> list[dict[str, Any]]:
    """The fixed settings of the sweep: chains, and trees that have more nodes than levels.

    A forward of more than `most_slots` tokens, all items together, is left out: it could not pay for any draft.
    """
    most = drafter.max_draft_depth or drafter.draft_depth
    depths = sorted({depth for depth in arguments.depths if depth <= most} | {most})
    chains = [(depth, 0) for depth in depths]
    trees = [(depth, budget) for depth in depths for budget in arguments.tree_budgets if budget > depth]
    settings = chains + trees
    if arguments.compiled:
        settings = chains + [(depth, budget) for depth, budget in trees if depth == most and budget in COMPILED_BUDGETS]
    return [
        fixed(depth, budget)
        for depth, budget in settings
        if batch_size * (1 + (budget or depth)) <= arguments.most_slots
    ]


def name_of(setting: dict[str, Any]) -> str:
    depth, budget = setting["num_assistant_tokens"], setting["tree_budget"]
    return f"tree {budget} of depth {depth}" if budget else f"chain {depth}"


@dataclass
class Bench:
    """A case under one condition.

    Args:
        case: what to decode.
        condition: batch size, temperature and length.
        arguments: those of schedule.py.
    """

    case: Case
    condition: Condition
    arguments: Namespace

    def __post_init__(self) -> None:
        prompts = self.case.prompts_for(self.condition.batch_size, self.arguments.prompts)
        self.batches = in_batches(self.case.target, prompts, self.condition.batch_size)
        self.kind = COMPILED if self.arguments.compiled else {}
        plain = Way(self._entry(PLAIN))
        self._warm_up([plain])
        self._turn([plain])
        self.texts = [list(text) for runs in plain.turns for each in runs for text in each.texts]
        self.drafter = self.case.new_drafter(self.texts)

    def _entry(self, name: str, drafter: ParallelDrafter | None = None, setting: dict[str, Any] | None = None) -> Entry:
        if drafter is None:
            return Entry(PLAIN, setting=self.kind) if self.kind else plain_entry()
        return Entry(name, drafter, {**(setting or {}), **self.kind})

    def _warm_up(self, ways: list[Way]) -> None:
        """Do what is slow the first time."""
        for way in ways:
            warm_up(self.case.target, way.entry, self.batches, self.condition)

    def _race(self, ways: list[Way], turns: int) -> None:
        """Let all take turns, at once by workers of theirs if that is asked for."""
        works = [partial(self._decode, way) for way in ways]
        with workers(works) if self.arguments.slices else nullcontext() as at_once:
            for _ in range(turns):
                self._turn(ways, at_once)

    def _turn(self, ways: list[Way], at_once: list[Worker] | None = None) -> None:
        """Let each way decode each batch, all of them one batch before the next; `at_once` by workers of theirs."""
        for way in ways:
            way.begin_turn()
        for index in range(len(self.batches)):
            done = ask_all(at_once, index) if at_once else [self._decode(way, index) for way in ways]
            for way, decoded in zip(ways, done, strict=True):
                way.note(*decoded)

    def _decode(self, way: Way, index: int) -> Decoded:
        """Let a way decode a batch, the first of which a turn begins with."""
        if index == 0 and way.renewed is not None:
            way.entry = way.renewed()
        return way.decode(self.case.target, self.batches[index], self.condition.on_batch(index))

    def _first_entry(self) -> Entry:
        """The schedule with a drafter about which nothing is known."""
        return self._entry(FIRST, self.case.new_drafter(self.texts), {"draft_schedule": "auto"})

    def sweep(self) -> list[dict[str, Any]]:
        """The rows of all fixed settings, fastest first."""
        settings = grid(self.drafter, self.condition.batch_size, self.arguments)
        plain = Way(self._entry(PLAIN))
        ways = [Way(self._entry(name_of(setting), self.drafter, setting)) for setting in settings]
        with kept_random_state(self.case.target.device):
            self._warm_up([plain, *ways])
            self._race([plain, *ways], self.arguments.sweep_turns)
        rows = [{**way.row(plain), "setting": setting} for way, setting in zip(ways, settings, strict=True)]
        return sorted(rows, key=lambda row: -row["speedup"])

    def finals(self, finalists: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of plain `generate`, of some fixed settings, of the drafter's own, and of the schedule.

        Each turn has one more way: the schedule with a new drafter, about which nothing is known.
        """
        default = fixed(self.drafter.draft_depth)
        plain = Way(self._entry(PLAIN))
        ways = [plain, Way(self._entry(DEFAULT, self.drafter, default))]
        ways += [Way(self._entry(name_of(setting), self.drafter, setting)) for setting in finalists]
        auto = Way(self._entry(AUTO, self.drafter, {"draft_schedule": "auto"}))
        ways.append(auto)
        with kept_random_state(self.case.target.device):
            self._warm_up(ways)
            # So that all turns of it are later calls, as many as it is said to learn by at least: so many texts, one by one, or
            # batches.
            for _ in range(math.ceil(self.arguments.learning_calls / len(self.batches))):
                self._turn([auto])
            auto.turns.clear()
            ways += [] if self.kind else [Way(self._entry(FIRST, self.drafter), renewed=self._first_entry)]
            self._race(ways, self.arguments.turns)
        rows = [way.row(plain) for way in ways]
        return [{**row, "is_fixed": row["name"] not in (PLAIN, AUTO, FIRST)} for row in rows]
