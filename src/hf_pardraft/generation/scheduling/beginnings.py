"""What a call takes that begins in our loop, beside what its drafts save: short calls end before that is made up for. Pure."""

import math
from collections import deque

from .beside_plain import Mean
from .estimates import lower_median


class Beginnings:
    """Seconds of the beginnings of calls, and how many tokens calls write.

    A call in our loop is set up, and the drafter reads the prompt before it drafts for the first time. Plain `generate` does
    without both.
    """

    # Calls of which these are remembered.
    REMEMBERED = 8
    # Beginnings from which is known what they take: the first one of all makes much that lasts.
    ENOUGH = 3
    # Share of the time of a call's steps below which its beginning doesn't matter.
    MATTERS = 0.1

    def __init__(self) -> None:
        # Replaced as a whole, or added to: calls in other threads may ask meanwhile.
        self.set_ups: deque[float] = deque(maxlen=self.REMEMBERED)
        self.lengths: deque[float] = deque(maxlen=self.REMEMBERED)
        # Of each token of a prompt, what the drafter takes to read it.
        self.reading = Mean()

    def note_set_up(self, seconds: float) -> None:
        """Learn how long a call took until its first round."""
        if math.isfinite(seconds):
            self.set_ups.append(seconds)

    def note_reading(self, seconds: float, num_tokens: int) -> None:
        """Learn how much longer than others the first round with a draft took, before which the drafter read so many tokens."""
        if num_tokens and math.isfinite(seconds):
            self.reading.note(max(seconds, 0.0) / num_tokens, num_tokens)

    def note_call(self, num_tokens: int, most: int) -> None:
        """Learn how many tokens a call wrote, which might write so many. One that wrote all of them might have gone on."""
        self.lengths.append(num_tokens if num_tokens < most else math.inf)

    def seconds(self, length: int) -> float | None:
        """Of a beginning with a prompt of this length; `None` where nobody knows."""
        set_ups = [*self.set_ups]
        return lower_median(set_ups) + length * self.reading.value if len(set_ups) >= self.ENOUGH else None

    def expected_tokens(self, most: int) -> float:
        """How many tokens a call is going to write that may write so many: texts may end long before that."""
        lengths = [min(length, most) for length in [*self.lengths]]
        return sum(lengths) / len(lengths) if len(lengths) >= self.ENOUGH else most
