"""What a draft depth and a tree budget are worth at a batch size, from measured times and measured acceptance. Pure.

A round drafts, builds a tree, verifies and commits. What these cost depends on how many tokens are drafted and read for each
text, and on how many texts there are; how many rounds a text needs depends on what is accepted, and not on the others. So a
few measured settings tell about all, and no setting has to be run at every batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Draft:
    """What a round drafts: `depth` tokens as a chain, or a tree of `tree_budget` nodes that is `depth` tokens deep."""

    depth: int
    tree_budget: int = 0

    @property
    def slots(self) -> int:
        """Tokens that the target reads for each text: the nodes, and the anchor."""
        return 1 + (self.tree_budget or self.depth)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round, at one batch size.

    Attributes:
        draft: by depth.
        tree: by tree budget (0 for chains) and depth.
        verify_chain, verify_tree: the target's forward and what is done with its logits, by tokens read for each text.
        fixed: all else that a round takes, whatever it drafts.
        prompt: the first round, which reads the prompts.
        plain_step: of plain `generate`, for one token in each text.
        plain_prompt: of plain `generate`, up to its first token.
    """

    draft: dict[int, float]
    tree: dict[int, dict[int, float]]
    verify_chain: dict[int, float]
    verify_tree: dict[int, float]
    fixed: float
    prompt: float
    plain_step: float
    plain_prompt: float


@dataclass(frozen=True)
class TextAcceptance:
    """How a text came about with the deepest draft that was tried.

    Attributes:
        num_tokens: of the text.
        num_rounds: that it took.
        reached: for each draft position, how many of them accepted it, and so all before it.
    """

    num_tokens: int
    num_rounds: int
    reached: tuple[int, ...] = ()

    def tau(self, depth: int) -> float:
        """Mean tokens of a round that drafts a chain of `depth`: the bonus token, and what is accepted."""
        return 1 + sum(self.reached[:depth]) / self.num_rounds

    def rounds(self, depth: int) -> float:
        """Rounds that it would have taken with a chain of `depth`."""
        return self.num_rounds * self.tau(len(self.reached)) / self.tau(depth)


@dataclass(frozen=True)
class Measurements:
    """All that is known about a drafter and a target on one machine.

    Attributes:
        costs: by batch size.
        chains: each prompt's text, drafted by the deepest chain.
        trees: the same, by tree.
        items_leave: whether a batch item that is finished takes no more part in rounds; else it is carried along to the end.
    """

    costs: dict[int, RoundCosts]
    chains: list[TextAcceptance]
    trees: dict[Draft, list[TextAcceptance]] = field(default_factory=dict)
    items_leave: bool = True


def interpolate(curve: dict[int, float], place: float) -> float:
    """A curve between its known points, linearly; beyond them it goes on as it ended, and never below 0.

    Raises:
        ValueError: for a curve without points.
    """
    if not curve:
        raise ValueError("nothing was measured to read this off: measure at least one setting of the kind")
    if len(curve) == 1:
        return next(iter(curve.values()))
    known = sorted(curve)
    left, right = next(((a, b) for a, b in pairwise(known) if place <= b), (known[-2], known[-1]))
    share = (place - left) / (right - left)
    return max(0.0, curve[left] + share * (curve[right] - curve[left]))


def round_seconds(costs: RoundCosts, draft: Draft) -> float:
    """A round that is no prompt's."""
    verify = costs.verify_tree if draft.tree_budget else costs.verify_chain
    tree = {budget: interpolate(by_depth, draft.depth) for budget, by_depth in costs.tree.items() if budget}
    if not draft.tree_budget:
        tree = {0: interpolate(costs.tree[0], draft.depth)}
    return (
        interpolate(costs.draft, draft.depth)
        + interpolate(tree, draft.tree_budget)
        + interpolate(verify, draft.slots)
        + costs.fixed
    )


def at_batch(by_batch: dict[int, float], batch: int) -> float:
    """A time between measured batch sizes; beyond them it is that of the nearest, since nothing says how it goes on."""
    return interpolate(by_batch, min(max(batch, min(by_batch)), max(by_batch)))


def call_seconds(measurements: Measurements, draft: Draft, rounds: Sequence[float]) -> float:
    """How long a `generate` call takes whose items need so many rounds each, the prompt's round counted.

    A round is there for all items, so there are as many as the slowest one needs. The later ones have fewer items, if items
    leave.
    """
    costs, batch = measurements.costs, len(rounds)
    by_batch = {size: round_seconds(known, draft) for size, known in costs.items()}
    seconds = at_batch({size: known.prompt for size, known in costs.items()}, batch)
    done = 1.0
    for finished, until in enumerate(sorted(rounds)):
        live = batch - finished if measurements.items_leave else batch
        seconds += max(0.0, until - done) * at_batch(by_batch, live)
        done = max(done, until)
    return seconds


def plain_call_seconds(costs: dict[int, RoundCosts], lengths: Sequence[int]) -> float:
    """How long plain `generate` takes to write texts of these lengths together: each item stays to the end of the longest."""
    step = at_batch({size: known.plain_step for size, known in costs.items()}, len(lengths))
    prompt = at_batch({size: known.plain_prompt for size, known in costs.items()}, len(lengths))
    return prompt + (max(lengths) - 1) * step


def predict(measurements: Measurements, draft: Draft, batch: int) -> float:
    """New tokens a second when the prompts are decoded `batch` at once.

    Raises:
        KeyError: for a tree whose acceptance was not measured.
    """
    texts = measurements.trees[draft] if draft.tree_budget else measurements.chains
    rounds = [float(text.num_rounds) if draft.tree_budget else text.rounds(draft.depth) for text in texts]
    seconds = sum(call_seconds(measurements, draft, part) for part in in_batches(rounds, batch))
    return sum(text.num_tokens for text in texts) / seconds


def predict_plain(measurements: Measurements, batch: int) -> float:
    """The same of plain `generate`."""
    lengths = [text.num_tokens for text in measurements.chains]
    seconds = sum(plain_call_seconds(measurements.costs, part) for part in in_batches(lengths, batch))
    return sum(lengths) / seconds


def in_batches(values: Sequence, size: int) -> list[Sequence]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def best(measurements: Measurements, candidates: Sequence[Draft], batch: int) -> Draft:
    """The candidate with the most tokens a second; of equal ones, that which drafts less.

    Raises:
        ValueError: without candidates.
    """
    if not candidates:
        raise ValueError("there is no draft to choose from: pass at least one depth and tree budget")
    return max(candidates, key=lambda draft: (predict(measurements, draft, batch), -draft.slots, -draft.depth))
