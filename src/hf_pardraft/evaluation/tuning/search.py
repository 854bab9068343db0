"""Find the draft that is best at each batch size by the cost model, and see by the clock whether it is."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.base import ParallelDrafter
from ..entries import PLAIN, plain_entry
from ..measurement import Condition
from ..report import Report
from ..rows import Difference, EvaluationRow
from ..runner import evaluate_conditions
from .cost_model import Draft, Measurements, best, predict, predict_plain
from .probing import Note, describe, entry_for, measure_acceptance, measure_costs

DEFAULT, TUNED = "default", "tuned"
# Of equally fast ones the first is written.
NAMES = (TUNED, DEFAULT, PLAIN)
TREE_BUDGETS = (8, 16, 32, 64)
NO_DRAFT = Draft(0)
EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Search:
    """What there is to choose from.

    Attributes:
        default: what the drafter does by itself.
        chains, trees: the candidates.
        probes: the drafts whose rounds are timed; between their depths is interpolated.
    """

    default: Draft
    chains: list[Draft]
    trees: list[Draft]
    probes: list[Draft]

    @property
    def candidates(self) -> list[Draft]:
        return [*self.chains, *self.trees]

    @property
    def deepest_chain(self) -> Draft:
        return Draft(max(draft.depth for draft in [*self.candidates, self.default]))


@dataclass(frozen=True)
class BatchChoice:
    """The outcome at one batch size.

    Attributes:
        batch_size: prompts at once.
        default: what the drafter does by itself.
        best: the draft that the cost model prefers.
        predicted, measured: new tokens a second of "plain", "default" and "tuned" (the best draft).
        tau: measured, likewise.
        written: which of the three was the fastest when measured.
    """

    batch_size: int
    default: Draft
    best: Draft
    predicted: dict[str, float]
    measured: dict[str, float]
    tau: dict[str, float]
    written: str

    @property
    def draft(self) -> Draft:
        """What is written down; of depth 0 if plain `generate` was the fastest."""
        return {PLAIN: NO_DRAFT, DEFAULT: self.default, TUNED: self.best}[self.written]


@dataclass(frozen=True)
class Tuning:
    """All that tuning found out; `problems` say why nothing should be written."""

    search: Search
    measurements: Measurements
    choices: list[BatchChoice]
    problems: list[str]


def own_default(drafter: ParallelDrafter) -> Draft:
    """What a drafter does by itself, a table of an earlier tuning left out."""
    return Draft(drafter.draft_depth, vars(drafter.generation_config).get("tree_budget") or 0)


def plan_search(
    drafter: ParallelDrafter, depths: list[int], tree_budgets: list[int], takes_trees: bool = True
) -> Search:
    """The drafts to choose from.

    Args:
        drafter: knows its default, and how deep it can draft.
        depths: to try; by default all chains up to the deepest that the drafter can do (or was trained for, if it has no
            limit), and trees of that depth.
        tree_budgets: to try, 0 for chains; by default chains and trees of `TREE_BUDGETS` nodes.
        takes_trees: whether the target can read trees.
    """
    default = own_default(drafter)
    deepest = drafter.max_draft_depth or drafter.draft_depth
    budgets = sorted(set(tree_budgets or (0, *TREE_BUDGETS)))
    if not takes_trees:
        budgets, default = [0], Draft(default.depth)
    chains = [Draft(depth) for depth in sorted(set(depths)) or range(1, deepest + 1)] if 0 in budgets else []
    trees = [Draft(depth, budget) for depth in sorted(set(depths)) or [deepest] for budget in budgets if budget]
    probed = {*depths, default.depth} if depths else {1, deepest, default.depth, *powers_of_two(deepest)}
    probes = {*(Draft(depth) for depth in probed), *trees, default}
    return Search(default, chains, trees, sorted(probes))


def powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def tune(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    prompts: list[torch.LongTensor],
    conditions: list[Condition],
    search: Search,
    report: Report,
    note: Note = lambda line: None,
    save: Callable[[], None] = lambda: None,
    items_leave: bool = True,
) -> Tuning:
    """Measure costs and acceptance, choose for each condition, and measure the choice beside the default and plain `generate`.

    Args:
        target, drafter, prompts: to decode with.
        conditions: one for each batch size.
        search: what to choose from.
        report: gets the result rows of the final measurements, under the names "plain", "default" and "tuned".
        note: told what goes on.
        save: called whenever the report has grown.
        items_leave: see [`Measurements`].

    Raises:
        ValueError: if something can't be measured: texts are too short, or there is no memory for a batch.
    """
    largest = max(conditions, key=lambda condition: condition.batch_size)
    needed = sorted({search.deepest_chain, *search.trees, *([search.default] if search.default.tree_budget else [])})
    costs = {}
    with naming_memory("the drafts' acceptance", largest.batch_size):
        accepted = measure_acceptance(target, drafter, needed, prompts, largest, note)
    for condition in conditions:
        size = condition.batch_size
        note(f"Timing rounds of {len(search.probes)} drafts and plain generate, {size} at once ...")
        with naming_memory("rounds", size):
            costs[size] = measure_costs(target, drafter, search.probes, prompts[:size], condition)
    trees = {draft: texts for draft, texts in accepted.items() if draft.tree_budget}
    measurements = Measurements(costs, accepted[search.deepest_chain], trees, items_leave)
    choices = []
    for condition in conditions:
        chosen = best(measurements, search.candidates, condition.batch_size)
        rows = measure_choice(target, drafter, prompts, condition, search.default, chosen, report, note)
        save()
        if rows is not None:
            choices.append(choice_of(measurements, condition.batch_size, search.default, chosen, rows))
    return Tuning(search, measurements, choices, problems_in(report, target.dtype in EXACT))


@contextmanager
def naming_memory(what: str, batch_size: int) -> Iterator[None]:
    """Turn an out-of-memory error into one that says what to leave out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of memory when measuring {what} in batches of {batch_size}: leave that batch size out of --batch-size, or take "
            "smaller tree budgets"
        ) from error


def measure_choice(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    prompts: list[torch.LongTensor],
    condition: Condition,
    default: Draft,
    chosen: Draft,
    report: Report,
    note: Note,
) -> dict[str, EvaluationRow] | None:
    """The three rows of a condition, by name; `None` if they could not be measured, and then the report says why."""
    entries = [plain_entry(), entry_for(drafter, default, DEFAULT)]
    if chosen != default:
        entries.append(entry_for(drafter, chosen, TUNED))
    note(f"Measuring the drafter as it is, with {describe(chosen)}, and plain, {condition.batch_size} at once ...")
    first = len(report.rows)
    # What it tells meanwhile is for a whole evaluation.
    deque(evaluate_conditions(target, entries, prompts, [condition], report), maxlen=0)
    rows = {row.name: row for row in report.rows[first:]}
    if not rows:
        return None
    if chosen == default:
        rows[TUNED] = replace(rows[DEFAULT], name=TUNED)
        report.rows.append(rows[TUNED])
    return rows


def choice_of(
    measurements: Measurements, batch_size: int, default: Draft, chosen: Draft, rows: dict[str, EvaluationRow]
) -> BatchChoice:
    """Compare what was predicted with what was measured; the measured fastest is written."""
    predicted = {
        PLAIN: predict_plain(measurements, batch_size),
        DEFAULT: predict(measurements, default, batch_size),
        TUNED: predict(measurements, chosen, batch_size),
    }
    measured = {name: rows[name].tokens_per_second for name in predicted}
    fastest = max(NAMES, key=lambda name: measured[name])
    taus = {name: rows[name].tau for name in predicted}
    return BatchChoice(batch_size, default, chosen, predicted, measured, taus, fastest)


def problems_in(report: Report, is_exact: bool) -> list[str]:
    """Why what was measured should not be relied on: rows that are missing, and texts that are not the target's.

    Args:
        report: all rows.
        is_exact: whether the target computes precisely enough that only near ties may be decided otherwise.
    """
    problems = [
        f"{entry['name']} could not be measured in batches of {entry['batch_size']} ({entry['reason']}): leave that size out "
        "of --batch-size"
        for entry in report.skipped
    ]
    wrong = [row for row in report.rows if is_exact and any(map(is_no_tie, row.differences))]
    return problems + [
        f"{row.name} wrote other texts than plain generate in batches of {row.batch_size}" for row in wrong
    ]


def is_no_tie(difference: Difference) -> bool:
    """Whether the target itself knew better; of many differences only the first ones were judged."""
    return difference.near_tie is False or None in (difference.token, difference.plain_token)


def table_of(tuning: Tuning) -> dict[str, dict[str, int]]:
    """The choices as the drafter's generation config keeps them: `{"8": {"num_assistant_tokens": 4, "tree_budget": 16}}`."""
    return {
        str(choice.batch_size): {
            "num_assistant_tokens": choice.draft.depth,
            "tree_budget": choice.draft.tree_budget,
        }
        for choice in tuning.choices
    }


def tuning_facts(tuning: Tuning) -> dict[str, Any]:
    """Everything, for JSON."""
    measured = tuning.measurements
    return {
        "candidates": [asdict(draft) for draft in tuning.search.candidates],
        "costs": [{"batch_size": size, **asdict(costs)} for size, costs in measured.costs.items()],
        "acceptance": {
            "deepest_chain": tuning.search.deepest_chain.depth,
            "chains": [asdict(text) for text in measured.chains],
            "trees": [
                {**asdict(draft), "texts": [asdict(text) for text in texts]} for draft, texts in measured.trees.items()
            ],
        },
        "choices": [{**asdict(choice), "draft": asdict(choice.draft)} for choice in tuning.choices],
        "problems": tuning.problems,
    }
