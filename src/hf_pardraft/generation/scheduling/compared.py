"""What takes how long, known from what was measured close together. Pure: seconds are told, and no clock is read."""

from collections import deque
from collections.abc import Hashable, Sequence

from .beside_plain import Mean
from .estimates import lower_median, weighted_median

# Of each key's values, the median and how many there are.
Medians = dict[Hashable, tuple[float, int]]


def medians_of(block: Sequence[tuple[Hashable, float]]) -> Medians:
    """Of each key's values, the median and how many there are."""
    by_key: dict[Hashable, list[float]] = {}
    for key, value in block:
        by_key.setdefault(key, []).append(value)
    return {key: (lower_median(values), len(values)) for key, values in by_key.items()}


def level_of(block: Medians, logs: dict[Hashable, float]) -> float:
    """By how much a block's medians are above what is known of their keys, on average."""
    total = sum(count for _, count in block.values())
    return sum(count * (median - logs[key]) for key, (median, count) in block.items()) / total


def compared_in(block: Medians, key: Hashable, logs: dict[Hashable, float]) -> tuple[float, float] | None:
    """What a block says of one of its keys, by what is known of the others, and its weight; `None` if there are none."""
    others = {other: found for other, found in block.items() if other != key and other in logs}
    if not others:
        return None
    (median, count), num_others = block[key], sum(count for _, count in others.values())
    return median - level_of(others, logs), count * num_others / (count + num_others)


class Compared:
    """Logarithms of seconds by key.

    A machine that slows down slows everything down. So keys are compared with each other within a few measurements alone, a
    *block*: otherwise each in turn would look better for having last been measured in a faster hour. The model is that what is
    measured is the key's logarithm plus its block's level plus noise.

    Attributes:
        logs: what is known, and by how many comparisons with others, `evidence`.
        level: of the last block.
        noise: by which a measurement is off those of its key in a block, in the mean.
        num_notes: how many there were.
    """

    # Measurements of a block.
    BLOCK = 16
    # Blocks with several keys that are remembered.
    REMEMBERED = 24

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        # The block that has begun, and the medians of earlier ones. Calls in other threads may add to it: what is worked on is a
        # copy, and replaced as a whole.
        self.block: list[tuple[Hashable, float]] = []
        self.blocks: deque[Medians] = deque(maxlen=self.REMEMBERED)
        self.logs: dict[Hashable, float] = {}
        self.evidence: dict[Hashable, float] = {}
        self.level, self.noise, self.num_notes = 0.0, Mean(), 0

    def note(self, key: Hashable, value: float, is_news: bool) -> bool:
        """Learn a logarithm; returns whether what is known was found anew: of one that is news at once."""
        self.block.append((key, value))
        self.counts[key] = self.counts.get(key, 0) + 1
        self.num_notes += 1
        is_full = self.num_notes % self.BLOCK == 0
        if not (is_news or is_full):
            return False
        block = tuple(self.block)
        medians = medians_of(block)
        self._compare({key} if is_news else {*medians}, medians)
        # A call in another thread may have begun the next block meanwhile.
        if is_full and block:
            self.noise.note(sum(abs(log - medians[of_it][0]) for of_it, log in block) / len(block), len(block))
            if len(medians) > 1:
                self.blocks.append(medians)
            self.block = []
        return True

    def _compare(self, keys: set[Hashable], last: Medians) -> None:
        """Find what is known of some keys of the last block, and its level, from its medians."""
        logs, evidence, blocks = dict(self.logs), dict(self.evidence), (*self.blocks, last)
        # The one that is known best is what others are compared with.
        known_best = max(logs, key=lambda key: self.counts.get(key, 0), default=None)
        for key in last:
            if key not in logs or key in keys:
                found = [compared_in(block, key, logs) for block in blocks if key in block]
                found = [each for each in found if each is not None]
                evidence[key] = sum(weight for _, weight in found)
                if key != known_best:
                    logs[key] = weighted_median(found) if found else logs.get(key, last[key][0] - self.level)
        self.logs, self.evidence = logs, evidence
        if last:
            self.level = level_of(last, logs)
