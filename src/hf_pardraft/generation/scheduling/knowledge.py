"""What calls with one drafter and target have taught about their rounds. Pure."""

from collections.abc import Sequence

from .acceptance import Acceptance
from .confidence import Calibration, ReadingCosts
from .costs import Costs


class Knowledge:
    """What is known of rounds of one kind, from call to call.

    Attributes:
        chain: what is accepted of chains.
        trees: what is accepted of trees, by their budget.
        costs, reading: what rounds cost, and the target's forwards, by batch size (powers of two).
        calibration: what a drafter's own probabilities are worth.
        purse: what may be lost by trying plans that don't seem the best, in rounds of the best one. Each round puts a little in.
    """

    # What is put in: the share of all time that trying may cost. And the most that is saved up.
    SHARE = 0.01
    MOST_SAVED = 32.0

    def __init__(self) -> None:
        self.chain = Acceptance()
        self.trees: dict[int, Acceptance] = {}
        self.costs: dict[int, Costs] = {}
        self.reading: dict[int, ReadingCosts] = {}
        self.calibration = Calibration()
        self.purse = 0.0

    def accepted_of(self, budget: int) -> Acceptance:
        """What is accepted of trees of this budget, or of chains if it is 0."""
        if not budget:
            return self.chain
        if budget not in self.trees:
            smaller = max((known for known in self.trees if known < budget), default=0)
            self.trees[budget] = Acceptance(like=self.accepted_of(smaller))
        return self.trees[budget]

    def costs_for(self, batch: int) -> Costs:
        """The costs at a batch size; where they are new, those of the nearest one are believed at first."""
        size = size_class(batch)
        if size not in self.costs:
            near = min(self.costs, key=lambda known: max(known, size) / min(known, size), default=None)
            self.costs[size] = Costs(like=self.costs.get(near))
        return self.costs[size]

    def note(self, budget: int, outcomes: Sequence[tuple[int, int]]) -> None:
        """Learn what was accepted in a round; see [`Acceptance.note`]. What one kind of drafts says of the text goes for all."""
        known = self.accepted_of(budget)
        if known.note(outcomes):
            for other in {self.chain, *self.trees.values()} - {known}:
                other.forget()

    def reading_for(self, batch: int) -> ReadingCosts:
        """What the target's forwards cost at a batch size."""
        return self.reading.setdefault(size_class(batch), ReadingCosts())

    @property
    def num_judged(self) -> float:
        """Drafts that acceptance is judged by."""
        return max(known.num_judged for known in (self.chain, *self.trees.values()))

    def put_in(self, rounds: float) -> None:
        """Save for tries: so many rounds of the best plan have passed."""
        self.purse = min(self.purse + self.SHARE * rounds, self.MOST_SAVED)


def size_class(batch: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(batch - 1, 0).bit_length()
