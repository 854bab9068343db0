"""Seconds that the target takes to read, and what of a draft is worth them. Pure."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from .costs import interpolated, lower_median


class ReadingCosts:
    """Seconds that the target takes to read so many slots."""

    # Measurements of a size that are remembered, and after how many a median is worked out again.
    REMEMBERED, RENEWED = 25, 8
    # What makes it worth the while to look at drafts, which itself takes some tenths of a millisecond: so many times the seconds
    # for one slot, and so many seconds more.
    NOTICEABLE, LONG = 1.25, 3e-3
    # To learn more a forward may take so many times as long.
    MORE = 2.0
    # Looks at drafts that are remembered.
    LOOKS = 16

    def __init__(self) -> None:
        self.measured: dict[int, deque[float]] = {}
        # Seconds that looks at drafts have taken, and saved.
        self.looking: deque[float] = deque(maxlen=self.LOOKS)
        self.saved: deque[float] = deque(maxlen=self.LOOKS)
        self.num_notes = 0
        self._known: dict[int, float | None] = {}

    def note(self, slots: int, seconds: float) -> None:
        """Learn from a forward."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        is_new = slots not in self.measured
        self.measured.setdefault(slots, deque(maxlen=self.REMEMBERED)).append(seconds)
        self.num_notes += 1
        if is_new or self.num_notes % self.RENEWED == 0:
            self._known.clear()

    def of(self, slots: int) -> float | None:
        """The cost of a forward; `None` of fewer than two sizes."""
        if slots not in self._known:
            points = sorted((size, lower_median(seconds)) for size, seconds in [*self.measured.items()])
            self._known[slots] = interpolated(points, slots)
        return self._known[slots]

    def whole(self, seconds: float, read: int, drafted: int) -> float:
        """What a round that took so many seconds would have taken if all slots of the draft had been read."""
        of_read, of_all = self.of(read), self.of(drafted)
        return seconds if None in (of_read, of_all) else seconds + max(of_all - of_read, 0.0)

    def more(self, slots: int, most: int) -> int:
        """How many slots to read, of `most`, to learn more than so many teach."""
        enough = self.MORE * self.of(slots)
        return max(each for each in range(slots, most + 1) if self.of(each) <= enough)

    def note_look(self, seconds: float, saved: float) -> None:
        """Learn what a look at a draft has taken, and what it saved if nothing was read that is not worth it."""
        if math.isfinite(seconds) and seconds >= 0:
            self.looking.append(seconds)
            self.saved.append(saved)

    @property
    def looks_pay(self) -> bool:
        """Whether looks at drafts have saved more than they took."""
        return not self.looking or sum(self.saved) > len(self.looking) * lower_median(self.looking)

    def are_noticeable(self, slots: int) -> bool:
        """Whether so many slots take clearly longer than one."""
        one, all_of_them = self.of(1), self.of(slots)
        return None not in (one, all_of_them) and all_of_them > max(self.NOTICEABLE * one, one + self.LONG)


def values_of_reading(
    probabilities: Sequence[Sequence[float]], seconds: Callable[[int], float], rate: float
) -> list[float]:
    """What the likeliest nodes of a draft are worth, for each number of them from none to all.

    Each node adds its probability to the tokens of the round, and its slot to the seconds of the forward.

    Args:
        probabilities: for each item those of its nodes, see [`Calibration.probabilities`].
        seconds: that the target takes to read so many slots.
        rate: tokens a second and item that are to be had otherwise.

    Returns:
        Tokens an item, less those that are to be had otherwise while the target reads.
    """
    ranked = [sorted(of_item, reverse=True) for of_item in probabilities]
    tokens = accumulate((sum(gains) / len(gains) for gains in zip(*ranked, strict=True)), initial=0.0)
    return [gained - rate * seconds(count + 1) for count, gained in enumerate(tokens)]


def best_count(values: Sequence[float]) -> int:
    """How many nodes to read by [`values_of_reading`]; of two numbers that are worth the same, the smaller one."""
    return max(range(len(values)), key=values.__getitem__)
