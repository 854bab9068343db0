"""What calls with one drafter and target have taught about their rounds. Pure."""

from collections.abc import Callable, Iterable, Sequence

from .acceptance import Acceptance, Slowest, TreeGain
from .confidence import Calibration
from .costs import Costs
from .reading import ReadingCosts


class Knowledge:
    """What is known of rounds of one kind, from call to call.

    Attributes:
        earlier, chain: what was accepted of chains in all texts, and in this one; of trees where there are no chains.
        gains: what trees have over chains, by their budget.
        slowest: how unevenly drafts serve the items of a batch, by batch size.
        costs, reading: what rounds cost, and the target's forwards, by batch size (powers of two).
        calibration: what a drafter's own probabilities are worth.
        purse: what may be lost by trying plans that don't seem the best, in rounds of the best one. Each round puts a little in.

    Args:
        is_of_compiled: whether rounds are compiled, beside which any number of tries costs little.
    """

    # What it begins with. What is put in: the share of all time that trying may cost, of compiled rounds, too, whose tries take
    # longer. And the most that is saved up.
    BEGINNING, SHARE, SHARE_COMPILED, MOST_SAVED = 3.0, 0.005, 0.015, 32.0
    # Of what earlier texts taught, the weight that is left once a text is found to be another.
    AFTER_CHANGE = 0.1

    def __init__(self, is_of_compiled: bool = False) -> None:
        self.earlier = Acceptance()
        self.gains: dict[int, TreeGain] = {}
        self.begin_text()
        self.slowest: dict[int, Slowest] = {}
        self.costs: dict[int, Costs] = {}
        self.reading: dict[int, ReadingCosts] = {}
        self.calibration = Calibration()
        self.purse, self.share = (
            (self.MOST_SAVED, self.SHARE_COMPILED) if is_of_compiled else (self.BEGINNING, self.SHARE)
        )

    def begin_text(self) -> None:
        """Judge what comes by earlier texts, until it speaks for itself."""
        self.chain = Acceptance(self.earlier)

    def forget_costs(self, are_young: Callable[[Costs], bool]) -> None:
        """Let costs be measured again of which that is said."""
        self.costs |= {size: costs.renewed() for size, costs in [*self.costs.items()] if are_young(costs)}

    def expected_tokens(self, depth: int) -> list[float]:
        """Of chains, see [`Acceptance.expected_tokens`]."""
        return self.chain.expected_tokens(depth)

    def tree_gains(self, depth: int, budgets: Iterable[int]) -> dict[int, float]:
        """How many times as many drafted tokens are accepted of trees as of chains of the same depth, by the trees' budget."""
        of_chain, of_tree = (self.chain.expected_tokens(depth, caught)[depth] - 1 for caught in (0.0, TreeGain.CAUGHT))
        return {budget: self.gain_of(budget).factor(of_tree, of_chain) for budget in budgets}

    def gain_of(self, budget: int) -> TreeGain:
        """What trees of this budget have over chains."""
        return self.gains.setdefault(budget, TreeGain())

    def slowest_of(self, batch: int) -> Slowest:
        """How unevenly drafts serve a batch of this size."""
        return self.slowest.setdefault(size_class(batch), Slowest())

    def costs_for(self, batch: int) -> Costs:
        """The costs at a batch size; where they are new, those of the nearest one are believed at first."""
        size = size_class(batch)
        if size not in self.costs:
            near = min([*self.costs], key=lambda known: max(known, size) / min(known, size), default=None)
            self.costs[size] = Costs(like=self.costs.get(near))
        return self.costs[size]

    def note(
        self,
        budget: int,
        outcomes: Sequence[tuple[int, int]],
        of_chains: Sequence[tuple[int, int]] | None = None,
        is_whole: bool = True,
    ) -> None:
        """Learn what was accepted in a round.

        Args:
            budget: of the tree; 0 for a chain.
            outcomes: see [`Acceptance.note`].
            of_chains: of a tree, what would have become of the chain of likeliest tokens; `None` if nobody asked.
            is_whole: whether the target read all of the draft. A part of a tree may accept less than the chain would have, which
                says nothing of trees.
        """
        if len(outcomes) > 1:
            self.slowest_of(len(outcomes)).note([count for count, _ in outcomes])
        if of_chains is not None and is_whole:
            accepted = (sum(count for count, _ in each) for each in (outcomes, of_chains))
            self.gain_of(budget).note(*accepted)
        outcomes = outcomes if of_chains is None else of_chains
        self.earlier.note(outcomes)
        if self.chain.note(outcomes):
            # The next text may be like this one.
            self.earlier.weaken(self.AFTER_CHANGE)

    def reading_for(self, batch: int) -> ReadingCosts:
        """What the target's forwards cost at a batch size."""
        return self.reading.setdefault(size_class(batch), ReadingCosts())

    def put_in(self, rounds: float) -> None:
        """Save for tries: so many rounds of the best plan have passed."""
        self.purse = min(self.purse + self.share * rounds, self.MOST_SAVED)


def size_class(batch: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(batch - 1, 0).bit_length()
