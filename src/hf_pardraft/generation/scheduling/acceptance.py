"""What is accepted of drafts, position by position. Pure."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul


class Acceptance:
    """Of tokens whose predecessors were all accepted, the share that was accepted too.

    The past is forgotten slowly, since acceptance varies from round to round, and all at once where a run of rounds says that
    the text has become another (a CUSUM test; Page 1954).

    Args:
        like: what to believe of positions that little is known of: that they are somewhat better than these.
    """

    # Rounds with a draft after which about a third of their weight is left; and the weight that a change leaves.
    MEMORY, AFTER_CHANGE = 250, 1.5
    # Deviations per round that are no news, and their sum that is: a run of 10 rounds that are one off.
    TOLERATED, ALARM = 0.5, 7.0
    LEAST_DEVIATION = 0.3
    # Tries of which less is no belief that could be contradicted.
    KNOWN = 16
    # What nothing is known of: as good as a middling drafter, with the weight of so many tokens.
    PRIOR, PRIOR_WEIGHT = 0.5, 1.0
    # Standard errors that are believed in a drafter's favour.
    HOPE = 1.0
    # By how many independent guesses as good as a chain's a level of a small tree is taken for, and one of twice as many nodes.
    OF_A_CHAIN, OF_A_TREE = 1.8, 1.2

    def __init__(self, like: "Acceptance | None" = None) -> None:
        self.like = like
        self.accepted: list[float] = []
        self.tried: list[float] = []
        self.too_many = self.too_few = 0.0

    def note(self, outcomes: Sequence[tuple[int, int]]) -> bool:
        """Learn from a round; returns whether the text has become another.

        Args:
            outcomes: for each batch item the number of accepted tokens, and of positions of which that says something: one more,
                unless all were accepted or the text ended there.
        """
        keep = 1 - 1 / self.MEMORY
        is_another_text = self._is_another_text(outcomes)
        if is_another_text:
            keep = self.AFTER_CHANGE / max(self.tried[0], self.AFTER_CHANGE)
        self.accepted = [keep * value for value in self.accepted]
        self.tried = [keep * value for value in self.tried]
        for num_accepted, num_tried in outcomes:
            new = num_tried - len(self.tried)
            self.tried += [0.0] * new
            self.accepted += [0.0] * new
            for position in range(num_tried):
                self.tried[position] += 1
                self.accepted[position] += position < num_accepted
        return is_another_text

    def forget(self) -> None:
        """Know nothing any more."""
        self.accepted, self.tried, self.too_many, self.too_few = [], [], 0.0, 0.0

    def rates(self, depth: int) -> list[float]:
        """For each of the first `depth` positions, how probably a token is accepted if all before it were."""
        believed = None if self.like is None else self.like.for_more(depth)
        rates, rate = [], self.PRIOR
        for position in range(depth):
            rate = believed[position] if believed else rate
            if position < len(self.tried):
                weight = self.tried[position] + self.PRIOR_WEIGHT
                rate = (self.accepted[position] + self.PRIOR_WEIGHT * rate) / weight
            rates.append(rate)
        return rates

    @property
    def num_judged(self) -> float:
        """Drafts that these rates are judged by, those of other sizes included."""
        return (self.tried[0] if self.tried else 0.0) + (self.like.num_judged if self.like else 0.0)

    def for_more(self, depth: int) -> list[float]:
        """What to expect of these rates where there are more nodes."""
        guesses = self.OF_A_CHAIN if self.like is None else self.OF_A_TREE
        return [1 - (1 - rate) ** guesses for rate in self.rates(depth)]

    def _is_another_text(self, outcomes: Sequence[tuple[int, int]]) -> bool:
        """Whether the last rounds were better, or worse, than what is believed can explain."""
        if not self.tried or self.tried[0] < self.KNOWN:
            return False
        depth = max(num_tried for _, num_tried in outcomes)
        reached = list(accumulate(self.rates(depth), mul))
        mean = sum(reached)
        square = sum((2 * position + 1) * share for position, share in enumerate(reached))
        deviation = max(math.sqrt(max(square - mean**2, 0.0)), self.LEAST_DEVIATION) / math.sqrt(len(outcomes))
        found = (sum(num_accepted for num_accepted, _ in outcomes) / len(outcomes) - mean) / deviation
        self.too_many = max(0.0, self.too_many + found - self.TOLERATED)
        self.too_few = max(0.0, self.too_few - found - self.TOLERATED)
        if max(self.too_many, self.too_few) < self.ALARM:
            return False
        self.too_many = self.too_few = 0.0
        return True

    def expected_tokens(self, depth: int) -> list[float]:
        """Tokens that a round commits to an item, the bonus token counted, for drafts of no token up to `depth` tokens.

        Of what a draft adds the upper end of what is likely: a drafter that had bad luck gets another chance.
        """
        reached = accumulate(self.rates(depth), mul)
        hope = 1 + self.HOPE / math.sqrt(1 + (self.tried[0] if self.tried else 0.0))
        return [1.0 + min(hope * added, most) for most, added in enumerate(accumulate(reached, initial=0.0))]
