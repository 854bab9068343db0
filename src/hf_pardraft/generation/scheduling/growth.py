"""What each token more of a text costs every round, since the target attends to it. Pure."""

import math
from typing import NamedTuple

from .plans import Plan


class Rounds(NamedTuple):
    """Rounds of one plan in one call: how many, and the means of the text's length and of their seconds."""

    count: int = 0
    length: float = 0.0
    seconds: float = 0.0


class Growth:
    """Seconds that a round takes more for each token more of text before it, whatever it drafts.

    By least squares, from rounds of the same plan in the same call: what other plans took, and other hours, says nothing of it.
    Without this a plan that was only tried early in a text, when rounds are short, seems faster than it is.
    """

    # Rounds after which half is forgotten.
    MEMORY = 1024
    # Standard errors that are taken off what is found: a clock is uneven, and most rounds don't grow.
    STANDARD_ERRORS = 2.0
    # Share by which a round takes more or less time than another, before that is known.
    NOISE = 0.15
    # Rounds whose weight that has.
    PRIOR_WEIGHT = 8.0
    # A round counts as at most so many times as long as those before, and as no less than that part of them.
    OUTLIER = 1.25

    def __init__(self) -> None:
        # Sums over rounds, of deviations from the means of their group: of lengths, of both, and of seconds.
        self.count = self.lengths = self.both = self.seconds = 0.0
        self.rounds: dict[Plan, Rounds] = {}

    @property
    def per_token(self) -> float:
        """Seconds."""
        if self.count < 3 or not self.lengths:
            return 0.0
        slope = self.both / self.lengths
        unexplained = max(self.seconds - slope * self.both, 0.0) + self.PRIOR_WEIGHT * self.NOISE**2
        variance = unexplained / (self.count - 2 + self.PRIOR_WEIGHT)
        return max(slope - self.STANDARD_ERRORS * math.sqrt(variance / self.lengths), 0.0)

    def begin_text(self) -> None:
        """What comes is another text, and another hour."""
        self.rounds = {}

    def note(self, plan: Plan, length: int, seconds: float) -> None:
        """Learn from a round, before which there were so many tokens."""
        before = self.rounds.get(plan, Rounds())
        if before.count:
            seconds = min(max(seconds, before.seconds / self.OUTLIER), before.seconds * self.OUTLIER)
        count = before.count + 1
        is_longer, took_longer = length - before.length, seconds - before.seconds
        if before.count:
            # As it is found from one round after another (Welford 1962). A clock is as uneven as rounds are long.
            weight = before.count / count / before.seconds**2
            self.count += 1
            self.lengths += weight * is_longer**2
            self.both += weight * is_longer * took_longer
            self.seconds += weight * took_longer**2
        if self.count > self.MEMORY:
            self.count, self.lengths, self.both, self.seconds = (
                found / 2 for found in (self.count, self.lengths, self.both, self.seconds)
            )
        self.rounds[plan] = Rounds(count, before.length + is_longer / count, before.seconds + took_longer / count)
