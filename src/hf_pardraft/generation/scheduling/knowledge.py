"""What calls with one drafter and target have taught about their rounds. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from .acceptance import AcceptanceRates, TextGain, TreeGain
from .beginnings import Beginnings
from .confidence import Calibration
from .costs import Costs
from .savings import TextSavings
from .spread import Spread


class RoundOutcome(NamedTuple):
    """What was accepted of a round's drafts.

    Attributes:
        of_drafts: see [`AcceptanceRates.note`].
        of_chains: of trees, what would have become of the chains of likeliest tokens; `None` if nobody asked.
        is_whole: whether the target read all of the drafts. A part of a tree may accept less than the chain would have, which
            says nothing of trees.
        items: of the call, that the outcomes are about; `None` for the first ones.
    """

    of_drafts: Sequence[tuple[int, int]]
    of_chains: Sequence[tuple[int, int]] | None = None
    is_whole: bool = True
    items: Sequence[int] | None = None

    def kind(self) -> tuple[bool, int]:
        """Whether it has outcomes of chains; and of how many items."""
        return self.of_chains is not None, len(self.of_drafts)


class Knowledge:
    """What is known of rounds of one kind, from call to call.

    Attributes:
        earlier, chain: what was accepted of chains in all texts, and in this one; of trees where there are no chains.
        earlier_gains, gains: what trees had over chains in all texts, and have in this one, by their budget.
        text_gain: what rounds without a draft gain by what the text itself suggests.
        num_left: calls that plain `generate` was left with, or their rest.
        spreads: how unevenly drafts serve the items of a batch, by batch size (powers of two).
        costs: what rounds cost, by batch size.
        beginnings: what a call with drafts takes before they save time.
        savings: what drafts have saved of the last texts, each for itself.
        calibration: what a drafter's own probabilities are worth.
        purse: what may be lost by trying plans that don't seem the best, in rounds of the best one. Each round puts a little in.

    Args:
        is_of_compiled: whether rounds are compiled, beside which any number of tries costs little.
    """

    # Rounds of the best plan that the purse begins with; that of compiled rounds begins full.
    BEGINNING = 3.0
    # Share of all time that trying may cost: of each round so much is put in.
    SHARE = 0.005
    # Part of that where drafts clearly pay, and what they cost is sure: the rounds that are followed tell the rest.
    WHERE_SURE = 0.2
    # The same in a batch: each try is one of all its items, and they tell more of drafts than those of one text.
    OF_BATCH = 0.5
    # Share of all time of compiled rounds, whose tries take longer.
    SHARE_COMPILED = 0.015
    # Rounds of the best plan that are saved up at most.
    MOST_SAVED = 32.0
    # The same where compiled rounds are long.
    MOST_SAVED_LONG = 8.0
    # Share of a batch's items that are left when the rates become those of these alone.
    LEFT = 0.8
    # Share of the weight of what earlier texts taught that is left once a text is found to be another.
    AFTER_CHANGE = 0.1

    def __init__(self, is_of_compiled: bool = False) -> None:
        self.earlier = AcceptanceRates()
        self.earlier_gains: dict[int, TreeGain] = {}
        self.text_gain, self.num_left = TextGain(), 0
        self.spreads: dict[int, Spread] = {}
        self.costs: dict[int, Costs] = {}
        self.beginnings, self.savings = Beginnings(), TextSavings()
        self.begin_text()
        self.calibration = Calibration()
        self.is_of_compiled, self.most_saved = is_of_compiled, self.MOST_SAVED
        self.purse, self.share = (
            (self.MOST_SAVED, self.SHARE_COMPILED) if is_of_compiled else (self.BEGINNING, self.SHARE)
        )

    def begin_text(self) -> None:
        """Judge what comes by earlier texts, until it speaks for itself."""
        self.chain, self.most_items = AcceptanceRates(self.earlier), 0
        # What was accepted of each item's last drafts.
        self.of_items: dict[int, deque[tuple[int, int]]] = {}
        self.gains: dict[int, TreeGain] = {}
        for spread in [*self.spreads.values()]:
            spread.begin()
        for costs in [*self.costs.values()]:
            costs.begin_text()

    def forget_costs(self, are_young: Callable[[Costs], bool]) -> None:
        """Let costs be measured again of which that is said."""
        self.costs |= {size: costs.renewed() for size, costs in [*self.costs.items()] if are_young(costs)}

    def expected_tokens(self, depth: int) -> list[float]:
        """Of chains, see [`AcceptanceRates.expected_tokens`]."""
        return self.chain.expected_tokens(depth)

    def tree_gains(self, depth: int, budgets: Iterable[int], are_nested: bool = True) -> dict[int, float]:
        """How many times as many tokens rounds commit with trees as with chains of the same depth, by the trees' budget.

        Args:
            depth, budgets: of the trees.
            are_nested: whether larger ones, until they are tried, are believed to gain what smaller ones do, which they hold.
        """
        of_chain, of_tree = (self.chain.expected_tokens(depth, caught)[depth] for caught in (0.0, TreeGain.CAUGHT))
        gains, of_smaller = {}, 0.0
        for budget in sorted(budgets):
            gain = self.gain_of(budget)
            gains[budget] = gain.factor(of_tree, of_chain, of_smaller)
            of_smaller = gain.earlier.factor(of_tree, of_chain, of_smaller) if are_nested else 0.0
        return gains

    def gain_of(self, budget: int) -> TreeGain:
        """What trees of this budget have over chains, in this text."""
        # Calls in other threads may begin a text meanwhile.
        return self.gains.setdefault(budget, TreeGain(self.earlier_gains.setdefault(budget, TreeGain())))

    def spread_of(self, batch: int) -> Spread:
        """How unevenly drafts serve a batch of so many items."""
        return self.spreads.setdefault(size := size_class(batch), Spread(size))

    def costs_for(self, batch: int) -> Costs:
        """The costs at a batch size; before drafts were measured in it, those of the nearest one where they were are believed."""
        size = size_class(batch)
        costs = self.costs.get(size) or self.costs.setdefault(size, Costs())
        if not costs.know_drafts:
            others = [known for known, each in [*self.costs.items()] if each.know_drafts]
            near = min(others, key=lambda known: max(known, size) / min(known, size), default=None)
            if near:
                # Of fewer items a draft may take less. That it doesn't is found out at once, that it does only by tries.
                costs.guess(self.costs[near], min(size / near, 1.0))
        return costs

    def note(self, budget: int, *rounds: RoundOutcome) -> None:
        """Learn what was accepted in some rounds, one after the other.

        Args:
            budget: of their trees; 0 for chains.
            *rounds: what became of their drafts.
        """
        for (has_chains, num_items), alike in groupby(rounds, key=RoundOutcome.kind):
            self._note(budget, [*alike], has_chains, num_items)

    def _note(self, budget: int, rounds: Sequence[RoundOutcome], has_chains: bool, num_items: int) -> None:
        """Learn from rounds of as many items each."""
        outcomes = [outcome for each in rounds for outcome in (each.of_chains if has_chains else each.of_drafts)]
        # What the text suggests goes on after a draft, and says no more of it.
        outcomes = [(min(num_accepted, num_tried), num_tried) for num_accepted, num_tried in outcomes]
        whole = [each for each in rounds if each.is_whole] if has_chains else []
        if whole:
            of_trees = sum(num_committed(each.of_drafts) for each in whole)
            self.gain_of(budget).note(of_trees, sum(num_committed(each.of_chains) for each in whole))
        self.most_items = max(self.most_items, num_items)
        is_batch = self.most_items > 1
        items = [item for each in rounds for item in each.items or range(num_items)] if is_batch else []
        spread = self.spread_of(self.most_items) if is_batch else None
        # Of the items that are left in the end the mean is another.
        if spread is not None and (spread.found or num_items == self.most_items):
            of_all = self.earlier.rates(max(num_tried for _, num_tried in outcomes))
            spread.note(items, outcomes, of_all)
        # The last items of a batch are the ones with which drafts fare worst. They say nothing of the next.
        speaks_for_all = 2 * num_items >= self.most_items
        if speaks_for_all:
            self.earlier.note(outcomes, len(rounds))
        if self.chain.note(outcomes, len(rounds)) and speaks_for_all:
            # The next text may be like this one.
            self.earlier.weaken(self.AFTER_CHANGE)
        if is_batch:
            self._note_items(items, outcomes, num_items)

    def _note_items(self, items: Sequence[int], outcomes: Sequence[tuple[int, int]], num_items: int) -> None:
        """Learn what became of each item's drafts; whenever a fifth of the items are gone, go on by those of the others.

        They are mostly the ones that drafts serve worst.
        """
        of_items = self.of_items
        for item, outcome in zip(items, outcomes, strict=True):
            of_items.setdefault(item, deque(maxlen=AcceptanceRates.MEMORY)).append(outcome)
        if num_items <= self.LEFT * self.chain.num_items:
            # Calls in other threads may add to them meanwhile.
            known = [outcome for item in items[-num_items:] for outcome in [*of_items[item]]]
            of_these = AcceptanceRates(self.chain)
            of_these.note(known, len(known) // num_items)
            self.chain = of_these

    def put_in(self, rounds: float, is_sure: bool, is_of_batch: bool) -> None:
        """Save for tries: so many rounds of the best plan have passed; where that is sure to be the best, or of a batch, less."""
        share = self.share * (self.WHERE_SURE if is_sure else 1.0) * (self.OF_BATCH if is_of_batch else 1.0)
        self.purse = min(self.purse + share * rounds, self.most_saved)

    @property
    def may_save(self) -> float:
        """The share of its time that drafts may save of a text which isn't drafted, in the mean of the last ones."""
        first_rate, _ = self.earlier.updated(0, 0.0, AcceptanceRates.PRIOR_WEIGHT)
        return self.savings.mean(first_rate)

    def note_length(self, is_long: bool) -> None:
        """Learn whether rounds are long: tries of compiled ones then take as few as those of others do, and a call has fewer."""
        if is_long and self.is_of_compiled:
            self.share, self.most_saved = self.SHARE, self.MOST_SAVED_LONG
            self.purse = min(self.purse, self.most_saved)


def num_committed(outcomes: Sequence[tuple[int, int]]) -> int:
    """Tokens that a round with such drafts commits to its items, the bonus tokens counted."""
    return sum(count + 1 for count, _ in outcomes)


def size_class(batch: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(batch - 1, 0).bit_length()
