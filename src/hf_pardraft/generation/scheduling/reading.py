"""Seconds that the target takes to read, and what of a draft is worth them. Pure but for the clock, which is passed in."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from .estimates import interpolated, lower_median, rising


class ReadingCosts:
    """Seconds that the target takes to read so many slots, and no fewer for more of them.

    A machine that slows down slows forwards of all sizes down, so each is compared with those just before it: otherwise a size
    that was measured in a faster hour would seem the best one to read. Not in blocks, as rounds are, see [`Compared`]: there are
    more sizes than plans, of most of which a block would have one forward or two.
    """

    # Measurements of a size that are remembered.
    REMEMBERED = 50
    # Part of the weight that the last forward has in the machine's pace.
    PACE = 0.5
    # Factor by which a forward is off what was thought, at most, as far as the pace goes.
    OUTLIER = 2.0
    # Measurements after which medians are worked out again.
    RENEWED = 24
    # How many times as long as for one slot a forward takes at least that makes it worth the while to look at drafts.
    NOTICEABLE = 1.25
    # Seconds that it takes longer at least: a look itself takes some tenths of a millisecond.
    LEAST_EXTRA = 3e-3
    # How many times as long a forward may take to learn more.
    MORE = 2.0
    # Looks at drafts that are remembered.
    REMEMBERED_LOOKS = 16

    def __init__(self) -> None:
        # By size, logarithms of seconds less the machine's pace when they were measured; and their medians.
        self.measured: dict[int, deque[float]] = {}
        self.logs: dict[int, float] = {}
        # By how much the logarithms of the last forwards, of any size, are above these; and the same of each that is remembered.
        self.pace = 0.0
        self.paces: deque[float] = deque(maxlen=self.REMEMBERED)
        # Seconds that looks at drafts have taken, and saved.
        self.looking: deque[float] = deque(maxlen=self.REMEMBERED_LOOKS)
        self.saved: deque[float] = deque(maxlen=self.REMEMBERED_LOOKS)
        self.num_notes = 0
        # Seconds by size, and what they tell of any size. Calls in other threads may learn: both are replaced together.
        self._known: tuple[list[tuple[int, float]], dict[int, float | None]] = [], {}

    def note(self, slots: int, seconds: float) -> None:
        """Learn from a forward."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        log, thought, most = math.log(seconds), self.logs.get(slots), math.log(self.OUTLIER)
        self.measured.setdefault(slots, deque(maxlen=self.REMEMBERED)).append(log - self.pace)
        if thought is not None:
            self.pace += self.PACE * min(max(log - thought - self.pace, -most), most)
        self.paces.append(self.pace)
        self.num_notes += 1
        if thought is None or self.num_notes % self.RENEWED == 0:
            self._know()

    def _know(self) -> None:
        """Work out what is known; calls in other threads may learn meanwhile."""
        measured = [(size, [*found]) for size, found in sorted([*self.measured.items()]) if found]
        logs = {size: lower_median(found) for size, found in measured}
        points = rising([(size, logs[size], len(found)) for size, found in measured])
        pace = lower_median([*self.paces])
        self.logs, self._known = logs, ([(size, math.exp(log + pace)) for size, log in points], {})

    def of(self, slots: int) -> float | None:
        """The cost of a forward; `None` of fewer than two sizes."""
        points, known = self._known
        if slots not in known:
            # Of two sizes all that is known of more slots is what the first draft took more.
            known[slots] = interpolated(points, slots, since=min(1, len(points) - 2))
        return known[slots]

    def whole(self, seconds: float, read: int, drafted: int) -> float:
        """What a round that took so many seconds would have taken if all slots of the draft had been read."""
        if read >= drafted:
            return seconds
        of_read, of_all = self.of(read), self.of(drafted)
        return seconds if None in (of_read, of_all) else seconds + max(of_all - of_read, 0.0)

    def more(self, slots: int, most: int) -> int:
        """How many slots to read, of `most`, to learn more than so many teach."""
        enough = self.MORE * self.of(slots)
        return max(each for each in range(slots, most + 1) if self.of(each) <= enough)

    def note_look(self, seconds: float, saved: float) -> None:
        """Learn what a look at a draft has taken, and what it saved: see [`ReadingChoice.saved`]."""
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
        return None not in (one, all_of_them) and all_of_them > max(self.NOTICEABLE * one, one + self.LEAST_EXTRA)


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


class ReadingChoice:
    """What the target reads of a call's drafts.

    Args:
        clock: tells seconds.
        looks: whether a look at the drafter's probabilities is free: on an accelerator the host would have to wait for them.

    Attributes:
        costs: of the target's forwards at this batch size.
        rate: tokens a second and item of the best plan.
        is_noticeable: whether the target takes clearly longer for the largest draft than for one token.
    """

    # In one of so many rounds more is read of a draft than seems worth it.
    READS_MORE = 16
    # In one of so many rounds a draft is looked at although looks don't pay: in those that read more, which say most.
    LOOKS = 16
    # In so many rounds at first the target's forward is timed, and then in one of so many: of rounds like those before some
    # will do. It has no factor in common with the numbers above, so that rounds that read more are no more frequent among them.
    TIMED_AT_FIRST = 4
    TIMED = 3

    def __init__(self, clock: Callable[[], float], looks: bool) -> None:
        self.clock, self.looks, self.costs = clock, looks, ReadingCosts()
        self.rate, self.is_noticeable, self.is_a_try, self.number = 0.0, False, False, 0
        # When the look at this round's draft began, and the forward.
        self.looking_since: float | None = None
        self.reading_since: float | None = None
        # Seconds that this round's look took, if there was one; what it saved, since nothing is read that isn't worth it, and
        # since tokens are accepted that only the text suggested; and whether it put such into the draft.
        self.took: float | None = None
        self.saved, self.adds_text = 0.0, False
        # Slots that the target read in the last ordinary round; and whether this round's draft is read whole.
        self.slots: int | None = None
        self.is_whole = True

    def know(self, rate: float, most: int) -> None:
        """Go by these tokens a second, and drafts of at most so many nodes."""
        self.rate, self.is_noticeable = rate, self.looks and self.costs.are_noticeable(most + 1)

    def begin_round(self, number: int, is_a_try: bool) -> None:
        """A round begins, of a plan that is followed or tried."""
        self.number, self.is_a_try, self.is_whole = number, is_a_try, True

    @property
    def may_look(self) -> bool:
        """Whether this round's draft may be looked at, if there is anything to be gained."""
        return not self.looks or self.number % self.LOOKS == 0 or self.costs.looks_pay

    def looks_at(self, num_nodes: int, has_text: bool = False) -> bool:
        """Whether to ask [`worth_it`] about this round's draft: where that saves more than it takes, or seldom otherwise.

        A try is read whole, which tells what such drafts cost and bring.

        Args:
            num_nodes: of the draft.
            has_text: whether there is something that the texts suggest, to be put into it.
        """
        if not self.looks:
            return has_text
        if not (self.may_look and (has_text or self._may_be_cut(num_nodes))):
            return False
        self.looking_since, self.adds_text, self.saved = self.clock(), has_text, 0.0
        return True

    def worth_it(self, probabilities: Sequence[Sequence[float]], most: int) -> int:
        """How many nodes of each item's draft to read, see [`values_of_reading`]; now and then more, to learn from."""
        if not self._may_be_cut(most):
            return most
        best = [sorted(of_item, reverse=True)[:most] for of_item in probabilities]
        values = values_of_reading(best, self.costs.of, self.rate)
        count = best_count(values)
        self.saved = (values[count] - values[most]) / self.rate
        if self.number % self.READS_MORE == 0:
            count = self.costs.more(count + 1, most + 1) - 1
        self.is_whole = count == most
        return count

    def _may_be_cut(self, num_nodes: int) -> bool:
        """Whether the target takes clearly longer for all of a draft, and it is no try."""
        return self.is_noticeable and not self.is_a_try and self.costs.are_noticeable(num_nodes + 1)

    def begin(self) -> None:
        """The target begins to read."""
        self.took = None
        if self.looking_since is not None:
            self.took, self.looking_since = self.clock() - self.looking_since, None
        is_timed = self.looks and (self.is_a_try or self.number <= self.TIMED_AT_FIRST or self.number % self.TIMED == 0)
        self.reading_since = self.clock() if is_timed else None

    def end(self, slots: int) -> None:
        """It has read so many slots of each item, and no prompt."""
        self.slots = slots
        if self.reading_since is not None:
            self.costs.note(slots, self.clock() - self.reading_since)

    def end_look(self, of_text: float) -> None:
        """Learn what this round's look was worth, if there was one, when so many tokens that the texts suggested are accepted.

        Args:
            of_text: of an item, in the mean, besides those that were drafted.
        """
        if self.took is not None:
            self.costs.note_look(self.took, self.saved + (of_text / self.rate if self.rate else 0.0))

    def of_whole(self, seconds: float, num_nodes: int) -> float:
        """What a round would have taken if all of the draft had been read without a look, by which plans are compared.

        A plan's tokens are those of drafts that are read whole, too. With the seconds of what was read of them a plan would seem
        the faster the less of it is read, and then still less of it would be. Where a look put into the draft what the text
        suggests, these tokens are its own.
        """
        seconds -= self.took if self.took is not None and not self.adds_text else 0.0
        return seconds if self.slots is None else self.costs.whole(seconds, self.slots, num_nodes + 1)
