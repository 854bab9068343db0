"""What an answer took, and what plain `generate` would have taken for it. Pure."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

# Of lengths that differ by more, a step's time is another.
LIKE = 1.5
# Fewer steps are not believed.
FEWEST_STEPS = 3


@dataclass(frozen=True)
class PlainPace:
    """What plain `generate` takes for a token here: steps that were timed in this chat.

    Attributes:
        seconds: of a step, the median.
        num_steps: how many were timed.
        length: tokens of the text after which it was.
    """

    seconds: float
    num_steps: int
    length: int

    @classmethod
    def of_steps(cls, times: list[float], length: int) -> "PlainPace | None":
        """From the times at which plain `generate` had each token, the first one included; `None` if there are too few."""
        steps = [after - before for before, after in pairwise(times)]
        return cls(median(steps), len(steps), length) if len(steps) >= FEWEST_STEPS else None

    def holds_for(self, length: int) -> bool:
        """Whether a text of so many tokens is about as long."""
        return self.length / LIKE <= length <= self.length * LIKE


@dataclass
class Timing:
    """When the runs of an answer arrived.

    Attributes:
        sizes: tokens of each run.
        times: seconds from the question to each of them.
        num_plain_runs: how many of the first runs plain `generate` wrote.
        tau: of the drafted runs; `None` without a drafter.
    """

    sizes: list[int]
    times: list[float]
    num_plain_runs: int = 0
    tau: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)

    @property
    def timed(self) -> tuple[int, float]:
        """Tokens, and the seconds they took: those after the first run that is not plain `generate`'s, in which the text is read
        (at least by the drafter)."""
        first = self.num_plain_runs + 1
        if len(self.sizes) <= first:
            return 0, 0.0
        return sum(self.sizes[first:]), self.times[-1] - self.times[first - 1]


def summary(timing: Timing, pace: PlainPace | None) -> str:
    """One line on an answer.

    Args:
        timing: its.
        pace: of plain `generate` after a text of this length, if it was measured.
    """
    num_tokens, seconds = timing.timed
    total = timing.times[-1] if timing.times else 0.0
    line = f"{timing.num_tokens} tokens in {total:.1f} s"
    if not num_tokens or not seconds:
        return line
    line += f": {num_tokens / seconds:.1f} tokens/s"
    if timing.tau is None:
        return line
    line += f", tau {timing.tau:.2f}"
    if pace is None:
        return line
    plain = num_tokens * pace.seconds
    how = f"{pace.num_steps} steps timed {'in this answer' if timing.num_plain_runs else 'earlier'}"
    return (
        f"{line}; plain generate {1 / pace.seconds:.1f} tokens/s ({how}): {plain:.1f} s for what took {seconds:.1f} s"
    )
