"""What the cost model needs, measured: the parts of a round by what it drafts, and what becomes of the drafts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from transformers import PreTrainedModel

from ...models.base import ParallelDrafter
from ..entries import Entry, plain_entry
from ..measurement import (
    Batch,
    Condition,
    Run,
    Watched,
    call,
    generation_config,
    in_batches,
    run,
    warm_up_to_watch,
    watch,
)
from ..rows import PARTS
from .cost_model import Draft, RoundCosts, TextAcceptance

# Of a probe: enough rounds for a median, even where most of what is drafted is accepted.
PROBE_TOKENS = 64
Note = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """What one setting costs at one batch size, in seconds: medians of whole-batch rounds, the prompt's and the last left out.

    Attributes:
        parts: of such a round, by part.
        prompt: the first round.
        outside: what a round of a call that is not watched takes beside its parts; below 0 where it takes less, since
            watching waits for the device between the parts.
    """

    parts: dict[str, float]
    prompt: float
    outside: float


def entry_for(drafter: ParallelDrafter, draft: Draft, name: str = "probe") -> Entry:
    """A drafter with a fixed draft, whatever its own generation config says."""
    setting = {"num_assistant_tokens": draft.depth, "tree_budget": draft.tree_budget}
    return Entry(name, drafter, setting)


def measure_costs(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    drafts: list[Draft],
    prompts: list[torch.LongTensor],
    condition: Condition,
) -> RoundCosts:
    """Time rounds of several drafts, and plain `generate`, in turns.

    Args:
        target, drafter: to decode with.
        drafts: at least one chain, and all trees that are to be judged.
        prompts: as many as the condition has at once, each `(1, length)`.
        condition: what to measure under; each setting is run `repeats` times, and written texts are short.

    Raises:
        ValueError: if texts are over before a round could be timed.
    """
    (batch,) = in_batches(target, prompts, len(prompts))
    condition = replace(condition, max_new_tokens=min(PROBE_TOKENS, condition.max_new_tokens))
    entries, plain = {draft: fixed_depth(entry_for(drafter, draft)) for draft in drafts}, plain_entry()
    for entry in [plain, *entries.values()]:
        warm_up_to_watch(target, entry, [batch], condition)
    timed: dict[Draft, list[tuple[float, object]]] = {draft: [] for draft in drafts}
    plain_runs: list[tuple[Run, Run]] = []
    for _ in range(condition.repeats):
        plain_runs.append((run(target, plain, batch, condition, 1), run(target, plain, batch, condition)))
        for draft, entry in entries.items():
            seconds = run(target, entry, batch, condition).seconds
            timed[draft].append((seconds, timed_stats(target, entry, batch, condition)))
    probes = {draft: summarise_probe(draft, len(prompts), runs) for draft, runs in timed.items()}
    return round_costs(probes, *plain_costs(plain_runs))


def fixed_depth(entry: Entry) -> Entry:
    """The same without a depth that adapts itself, which would mix drafts of all depths."""
    return replace(entry, setting={**entry.setting, "draft_schedule": "fixed"})


def timed_stats(target: PreTrainedModel, entry: Entry, batch: Batch, condition: Condition):
    """The statistics of a call whose rounds are timed."""
    torch.manual_seed(condition.seed)
    call(target, entry, batch, generation_config(entry, condition, time_rounds=True))
    return entry.assistant.last_stats


def summarise_probe(draft: Draft, batch_size: int, runs: list[tuple[float, object]]) -> Probe:
    """One setting's calls, each timed as a whole and once more round by round."""
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for _, stats in runs:
        first = 0
        for index, items in enumerate(stats.rows_per_round):
            is_whole = items == batch_size and stats.drafted_per_round[first] == (draft.tree_budget or draft.depth)
            if index and is_whole:
                for part in PARTS:
                    parts[part].append(stats.seconds_per_round[part][index])
            first += items
    if not parts[PARTS[0]]:
        raise ValueError(
            f"no round that drafts {draft.depth} tokens for {batch_size} texts could be timed: they are over too soon. Raise "
            "--max-new-tokens, leave out that depth or batch size, or take other prompts"
        )
    prompt = median(sum(stats.seconds_per_round[part][0] for part in PARTS) for _, stats in runs)
    outside = median((seconds - sum(stats.seconds.values())) / stats.rounds for seconds, stats in runs)
    return Probe({part: median(values) for part, values in parts.items()}, prompt, outside)


def plain_costs(runs: list[tuple[Run, Run]]) -> tuple[float, float]:
    """Seconds of a step and of the first token, from calls that write one token and calls that write many."""
    first = median(one.seconds for one, _ in runs)
    steps = max(map(len, runs[0][1].texts)) - 1
    if not steps:
        raise ValueError(
            "plain generate ends every text after one token, so no step could be timed: take other prompts"
        )
    return max(0.0, median(many.seconds for _, many in runs) - first) / steps, first


def round_costs(probes: dict[Draft, Probe], plain_step: float, plain_prompt: float) -> RoundCosts:
    """Costs by what they depend on; where several settings tell the same, their median."""
    draft: dict[int, list[float]] = {}
    verify: tuple[dict[int, float], dict[int, list[float]]] = ({}, {})
    tree: dict[int, dict[int, float]] = {}
    for setting, probe in probes.items():
        draft.setdefault(setting.depth, []).append(probe.parts["draft"])
        tree.setdefault(setting.tree_budget, {})[setting.depth] = probe.parts["tree"]
        verify[bool(setting.tree_budget)].setdefault(setting.slots, []).append(probe.parts["verify"])
    chains, trees = ({slots: median(values) for slots, values in by_slots.items()} for by_slots in verify)
    return RoundCosts(
        draft={depth: median(values) for depth, values in draft.items()},
        tree=tree,
        verify_chain=chains,
        verify_tree=trees,
        fixed=median(probe.parts["commit"] + probe.outside for probe in probes.values()),
        prompt=median(probe.prompt for probe in probes.values()),
        plain_step=plain_step,
        plain_prompt=plain_prompt,
    )


def measure_acceptance(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    drafts: list[Draft],
    prompts: list[torch.LongTensor],
    condition: Condition,
    note: Note = lambda line: None,
) -> dict[Draft, list[TextAcceptance]]:
    """Decode all prompts with each draft, not timed, and see what is accepted of it."""
    batches = in_batches(target, prompts, condition.batch_size)
    found = {}
    for draft in drafts:
        note(f"What is accepted of {describe(draft)} ...")
        entry = fixed_depth(entry_for(drafter, draft))
        watched = [watch(target, entry, batch, condition) for batch in batches]
        found[draft] = [text for each in watched for text in texts_accepted(each, draft.depth)]
    return found


def texts_accepted(watched: Watched, depth: int) -> list[TextAcceptance]:
    """What a call accepted of each text."""
    texts = []
    for item, text in enumerate(watched.texts):
        proposals = [proposal for proposal in watched.proposals if proposal.row == item]
        # A round without a draft, such as a prompt's, commits one token.
        undrafted = len(text) - sum(proposal.num_committed for proposal in proposals)
        reached = tuple(sum(p.num_accepted >= place for p in proposals) for place in range(1, depth + 1))
        texts.append(TextAcceptance(len(text), len(proposals) + max(0, undrafted), reached))
    return texts


def describe(draft: Draft) -> str:
    """A draft, for people."""
    return f"depth {draft.depth}, {f'tree {draft.tree_budget}' if draft.tree_budget else 'chain'}"
