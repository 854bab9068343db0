"""What calls with one drafter and target have taught about their rounds. Pure."""

from collections.abc import Callable, Iterable, Sequence

from .acceptance import AcceptanceRates, TextGain, TreeGain
from .confidence import Calibration
from .costs import Costs
from .spread import Spread


class Knowledge:
    """What is known of rounds of one kind, from call to call.

    Attributes:
        earlier, chain: what was accepted of chains in all texts, and in this one; of trees where there are no chains.
        earlier_gains, gains: what trees had over chains in all texts, and have in this one, by their budget.
        text_gain: what rounds without a draft gain by what the text itself suggests.
        num_left: calls that plain `generate` was left with, or their rest.
        spreads: how unevenly drafts serve the items of a batch, by batch size (powers of two) and depth.
        costs: what rounds cost, by batch size.
        calibration: what a drafter's own probabilities are worth.
        purse: what may be lost by trying plans that don't seem the best, in rounds of the best one. Each round puts a little in.

    Args:
        is_of_compiled: whether rounds are compiled, beside which any number of tries costs little.
    """

    # Rounds of the best plan that the purse begins with; that of compiled rounds begins full.
    BEGINNING = 3.0
    # Share of all time that trying may cost: of each round so much is put in.
    SHARE = 0.005
    # The same of compiled rounds, whose tries take longer.
    SHARE_COMPILED = 0.015
    # Rounds of the best plan that are saved up at most.
    MOST_SAVED = 32.0
    # The same where compiled rounds are long.
    MOST_SAVED_LONG = 8.0
    # Share of the weight of what earlier texts taught that is left once a text is found to be another.
    AFTER_CHANGE = 0.1

    def __init__(self, is_of_compiled: bool = False) -> None:
        self.earlier = AcceptanceRates()
        self.earlier_gains: dict[int, TreeGain] = {}
        self.text_gain, self.num_left = TextGain(), 0
        self.spreads: dict[tuple[int, int], Spread] = {}
        self.costs: dict[int, Costs] = {}
        self.begin_text()
        self.calibration = Calibration()
        self.is_of_compiled, self.most_saved = is_of_compiled, self.MOST_SAVED
        self.purse, self.share = (
            (self.MOST_SAVED, self.SHARE_COMPILED) if is_of_compiled else (self.BEGINNING, self.SHARE)
        )

    def begin_text(self) -> None:
        """Judge what comes by earlier texts, until it speaks for itself."""
        self.chain, self.most_items = AcceptanceRates(self.earlier), 0
        self.gains: dict[int, TreeGain] = {}
        for spread in [*self.spreads.values()]:
            spread.begin()
        for costs in [*self.costs.values()]:
            costs.growth.begin_text()

    def forget_costs(self, are_young: Callable[[Costs], bool]) -> None:
        """Let costs be measured again of which that is said."""
        self.costs |= {size: costs.renewed() for size, costs in [*self.costs.items()] if are_young(costs)}

    def expected_tokens(self, depth: int) -> list[float]:
        """Of chains, see [`AcceptanceRates.expected_tokens`]."""
        return self.chain.expected_tokens(depth)

    def tree_gains(self, depth: int, budgets: Iterable[int]) -> dict[int, float]:
        """How many times as many tokens rounds commit with trees as with chains of the same depth, by the trees' budget."""
        of_chain, of_tree = (self.chain.expected_tokens(depth, caught)[depth] for caught in (0.0, TreeGain.CAUGHT))
        return {budget: self.gain_of(budget).factor(of_tree, of_chain) for budget in budgets}

    def gain_of(self, budget: int) -> TreeGain:
        """What trees of this budget have over chains, in this text."""
        # Calls in other threads may begin a text meanwhile.
        return self.gains.setdefault(budget, TreeGain(self.earlier_gains.setdefault(budget, TreeGain())))

    def spread_of(self, batch: int, depth: int) -> Spread:
        """How unevenly drafts of so many tokens serve a batch; of such as were never made, like the nearest shorter ones."""
        size = size_class(batch)
        spread = self.spreads.setdefault((size, depth), Spread(size))
        shorter = [key for key, other in self.spreads.items() if key[0] == size and key[1] < depth and other.is_known]
        return self.spreads[max(shorter)] if shorter and not spread.is_known else spread

    def costs_for(self, batch: int) -> Costs:
        """The costs at a batch size; where they are new, those of the nearest one are believed at first."""
        size = size_class(batch)
        if size not in self.costs:
            near = min([*self.costs], key=lambda known: max(known, size) / min(known, size), default=None)
            # Of fewer items a draft may take less. That it doesn't is found out at once, that it does only by tries.
            self.costs[size] = Costs(self.costs.get(near), min(size / near, 1.0)) if near else Costs()
        return self.costs[size]

    def note(
        self,
        budget: int,
        outcomes: Sequence[tuple[int, int]],
        of_chains: Sequence[tuple[int, int]] | None = None,
        is_whole: bool = True,
        items: Sequence[int] | None = None,
    ) -> None:
        """Learn what was accepted in a round.

        Args:
            budget: of the tree; 0 for a chain.
            outcomes: see [`AcceptanceRates.note`].
            of_chains: of a tree, what would have become of the chain of likeliest tokens; `None` if nobody asked.
            is_whole: whether the target read all of the draft. A part of a tree may accept less than the chain would have, which
                says nothing of trees.
            items: of the call, that the outcomes are about; by default the first ones.
        """
        if of_chains is not None and is_whole:
            committed = (sum(count + 1 for count, _ in each) for each in (outcomes, of_chains))
            self.gain_of(budget).note(*committed)
        outcomes = outcomes if of_chains is None else of_chains
        self.most_items = max(self.most_items, len(outcomes))
        if self.most_items > 1:
            self._note_spread(outcomes, range(len(outcomes)) if items is None else items)
        # The last items of a batch are the ones with which drafts fare worst. They say nothing of the next.
        speaks_for_all = 2 * len(outcomes) >= self.most_items
        if speaks_for_all:
            self.earlier.note(outcomes)
        if self.chain.note(outcomes) and speaks_for_all:
            # The next text may be like this one.
            self.earlier.weaken(self.AFTER_CHANGE)

    def _note_spread(self, outcomes: Sequence[tuple[int, int]], items: Sequence[int]) -> None:
        """Learn of all depths how many tokens each item would have accepted, as far as these drafts tell."""
        size = size_class(self.most_items)
        all_go_on = len(outcomes) >= self.most_items
        for (of_size, depth), spread in [*self.spreads.items()]:
            tells = of_size == size and all(count >= depth or tried > count for count, tried in outcomes)
            # Of the items that are left in the end the mean is another.
            if tells and (spread.found or all_go_on):
                counts = (min(count, depth) for count, _ in outcomes)
                spread.note(dict(zip(items, counts, strict=True)))

    def put_in(self, rounds: float) -> None:
        """Save for tries: so many rounds of the best plan have passed."""
        self.purse = min(self.purse + self.share * rounds, self.most_saved)

    def note_length(self, is_long: bool) -> None:
        """Learn whether rounds are long: tries of compiled ones then take as few as those of others do, and a call has fewer."""
        if is_long and self.is_of_compiled:
            self.share, self.most_saved = self.SHARE, self.MOST_SAVED_LONG
            self.purse = min(self.purse, self.most_saved)


def size_class(batch: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(batch - 1, 0).bit_length()
