"""What plain `generate` takes, beside our rounds without a draft and beside whole calls with drafts. Pure."""

import math
from collections import deque


class Mean:
    """The mean of values, of which the last so many count, roughly."""

    def __init__(self, memory: int = 512) -> None:
        self.memory, self.value, self.count = memory, 0.0, 0

    def note(self, value: float, count: int = 1) -> None:
        """Learn a value, or the mean of so many."""
        self.count = min(self.count + count, self.memory)
        self.value += min(count / self.count, 1.0) * (value - self.value)


class Calls:
    """What the last whole calls have taken for each of plain `generate`'s steps, and how unevenly.

    Args:
        deviation: the share by which one call may differ from their mean, before that is seen.
        weight: calls whose weight that has.
    """

    REMEMBERED = 16

    def __init__(self, deviation: float, weight: float) -> None:
        self.deviation, self.weight = deviation, weight
        # Seconds and steps. Calls in other threads may add to them.
        self.last: deque[tuple[float, int]] = deque(maxlen=self.REMEMBERED)

    def note(self, seconds: float, num_steps: int) -> None:
        """Learn from a call; from one in which a clock saw no time, nothing."""
        if math.isfinite(seconds) and seconds > 0:
            self.last.append((seconds, num_steps))

    @property
    def count(self) -> int:
        """Their steps."""
        return sum(num_steps for _, num_steps in [*self.last])

    def mean(self) -> tuple[float, float]:
        """Seconds of a step, and the share by which that may well be wrong; of one call at least."""
        last = [*self.last]
        mean = sum(seconds for seconds, _ in last) / sum(num_steps for _, num_steps in last)
        squares = sum((seconds / num_steps / mean - 1) ** 2 for seconds, num_steps in last)
        variance = (self.weight * self.deviation**2 + squares) / (self.weight + len(last) - 1)
        return mean, math.sqrt(variance / len(last))


class BesidePlain:
    """Seconds of all these at one batch size, which say whether a call is better left to plain `generate`.

    Attributes:
        undrafted, plain: of rounds without a draft, and of plain `generate`'s steps, for texts of one length.
        upkeep: what a drafter's reading now and then takes of each round without a draft.
        was_drafted: whether there was a whole call with drafts.
        drafted_calls, plain_calls: of whole calls, their prompts included, for each of plain `generate`'s steps: with drafts, and
            left to it.
    """

    # Rounds without a draft from which is known what they cost in the mean of a text.
    ENOUGH = 32
    # The last of a batch's that count, about as many as a call has: once they are slower, plain `generate` is timed again.
    LAST = 128
    # Steps of plain `generate` that are more than those of one call, mostly; and how many times as long as rounds without a draft
    # fewer of them take that no slow hour explains.
    MANY, MUCH_SLOWER = 256, 1.6
    # Rounds of a batch without a draft after which it is seen if plain `generate` is still slower; twice as many each time it is.
    LOOKED_AGAIN = 600
    # Plain `generate` is believed to be at most so many times as fast as rounds without a draft: forwards are the same.
    MOST_LEAD = 1.25
    # And thought to be so for one text before that was measured, so that it is: drafts that are better than rounds without one by
    # less may be no better than its steps. For a batch, which may lose more by that, this is what is thought.
    LIKELY_LEAD_OF_BATCH = 1.2
    # How many times as long its steps have to take at least, to be known to be slower than a batch's rounds without a draft.
    SLOWER = 1.1
    # Share by which a whole call with drafts differs from others, since its texts do, before that is seen, and calls whose weight
    # this has: a verdict by few would last, as no call that is left to plain `generate` tells what drafts bring.
    DOUBT_OF_CALL, DOUBTED_FOR = 0.1, 3.0
    # The same of calls that are left to it, of which there will be more: they differ as the machine's hours do.
    DOUBT_OF_PLAIN_CALL, PLAIN_DOUBTED_FOR = 0.03, 1.0

    def __init__(self) -> None:
        self.undrafted, self.plain, self.upkeep, self.was_drafted = Mean(), Mean(), 0.0, False
        self.last_undrafted = Mean(self.LAST)
        self.drafted_calls = Calls(self.DOUBT_OF_CALL, self.DOUBTED_FOR)
        self.plain_calls = Calls(self.DOUBT_OF_PLAIN_CALL, self.PLAIN_DOUBTED_FOR)
        # Rounds without a draft since plain `generate`'s steps were timed last, and for how many the comparison is trusted.
        self.num_undrafted_since, self.trusted_for = 0, self.LOOKED_AGAIN

    def note_undrafted(self, seconds: float) -> None:
        """Learn from a round without a draft."""
        self.undrafted.note(seconds)
        self.last_undrafted.note(seconds)
        self.num_undrafted_since += 1

    def note_steps(self, seconds: float, num_steps: int) -> None:
        """Learn what each of so many steps of plain `generate` has taken."""
        if not self.plain.count or self.num_undrafted_since <= self.trusted_for:
            self.plain.note(seconds, num_steps)
        else:
            # What it took in another hour says nothing beside the rounds since.
            self.plain.value = seconds
            self.trusted_for = 2 * self.trusted_for if self._plain_seems_slower(self.SLOWER) else self.LOOKED_AGAIN
        self.num_undrafted_since = 0

    def note_call(self, seconds: float, num_steps: int, is_plain: bool) -> None:
        """Learn what a whole call has taken, left to plain `generate` or not, which makes so many steps in it."""
        (self.plain_calls if is_plain else self.drafted_calls).note(seconds, num_steps)

    def note_left(self) -> None:
        """A call that began with drafts had to be left.

        If whole calls say otherwise, that may have been in another hour: those of plain `generate` are timed again.
        """
        self.plain_calls = Calls(self.DOUBT_OF_PLAIN_CALL, self.PLAIN_DOUBTED_FOR)

    def drafted_calls_are_slower(self, undrafted: float | None) -> bool | None:
        """Whether whole calls with drafts have clearly taken longer than plain `generate`'s; `None` if there were none.

        Before one was left to it, it is thought to be a good deal faster than rounds without a draft, so that one is.

        Args:
            undrafted: seconds of these, if they are known.
        """
        drafted, plain = self.drafted_calls, self.plain_calls
        if not drafted.count or undrafted is None:
            return None
        seconds, doubt = drafted.mean()
        if not plain.count:
            return seconds > undrafted / self.LIKELY_LEAD_OF_BATCH
        of_plain, doubt_of_plain = plain.mean()
        return seconds > (1 + math.hypot(doubt, doubt_of_plain)) * of_plain

    def plain_is_slower(self, is_of_batch: bool) -> bool:
        """Whether plain `generate`'s steps are known to take longer than rounds without a draft; of few of these nobody knows.

        As long as they do, no call is left to it, and none tells otherwise. A batch may lose much by that: of one, a single call
        in an hour that was slow says nothing, and it is seen again now and then.
        """
        if self.undrafted.count < self.ENOUGH:
            return self.plain.count > 0
        if not is_of_batch:
            return self._seconds_of_undrafted(is_of_batch) < self.plain.value
        least = self.SLOWER if self.plain.count >= self.MANY else self.MUCH_SLOWER
        is_known = self.plain.count >= self.ENOUGH and self.num_undrafted_since <= self.trusted_for
        return is_known and self._plain_seems_slower(least)

    def _plain_seems_slower(self, least: float) -> bool:
        """Whether plain `generate`'s steps take so many times as long as rounds without a draft, at least."""
        return least * self._seconds_of_undrafted(is_of_batch=True) < self.plain.value

    def _seconds_of_undrafted(self, is_of_batch: bool) -> float:
        """Of a round without a draft: of one text in the mean, of a batch, whose calls differ more, of late."""
        return (self.last_undrafted if is_of_batch else self.undrafted).value + self.upkeep

    def lead_of_plain(self, is_of_batch: bool) -> float:
        """How many times as fast plain `generate`'s steps are as rounds without a draft; 1 where nobody knows.

        Where there are few of its steps, it is thought to be faster, so that it is found out: of one text once its own rounds
        without a draft are known. Whether a batch's are slower is another question, see [`plain_is_slower`].
        """
        is_known = self.undrafted.count >= self.ENOUGH
        if self.plain.count < self.ENOUGH:
            return self.LIKELY_LEAD_OF_BATCH if is_of_batch else self.MOST_LEAD if is_known else 1.0
        lead = self._seconds_of_undrafted(is_of_batch) / self.plain.value if is_known else 1.0
        return min(max(lead, 1.0) if is_of_batch else lead, self.MOST_LEAD)
