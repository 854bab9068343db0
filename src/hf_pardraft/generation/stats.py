"""What happened in each round of a generate call, for the caller to read from `drafter.last_stats`."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch


@dataclass(frozen=True)
class Proposal:
    """What one round proposed to one item, a chain or a tree.

    Attributes:
        item: of the caller's batch.
        num_before: new tokens that the item had before the round.
        tokens: the proposed ones, `nodes` of them.
        depths: how many tokens after the text each of them stands, 1 or more.
        num_accepted: how many of them were committed.
        num_committed: tokens that the item got, the bonus token counted; as many as were accepted where the text ended in them.
    """

    item: int
    num_before: int
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    num_accepted: int
    num_committed: int


@dataclass
class DecodeStats:
    """One generate call, round by round. A round is one target forward; the first one reads the prompt.

    With a batch, the lists have one entry for each item that took part in a round.

    Attributes:
        rounds: target forwards.
        drafted_per_round: tokens that were proposed.
        depths_per_round: how far the proposal reached: the nodes of a chain, the levels of a tree.
        accepted_per_round: proposed tokens that were committed.
        tokens_per_round: tokens committed, the bonus token counted.
        items_per_round: for each round, the items that took part in it.
        seconds: wall time spent in "draft", "tree", "verify" and "commit", if
            `drafter.generation_config.time_rounds` asked for it. On an accelerator this waits for the device.
        seconds_per_round: the same, by round.
        proposals: what was proposed, if `drafter.generation_config.record_drafts` asked for it. On an accelerator this, too,
            waits for the device.
    """

    rounds: int = 0
    drafted_per_round: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    tokens_per_round: list[int] = field(default_factory=list)
    items_per_round: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_per_round: dict[str, list[float]] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)
    depths_per_round: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean number of tokens that a target forward committed to an item, the bonus token counted."""
        return sum(self.tokens_per_round) / len(self.tokens_per_round) if self.tokens_per_round else 0.0

    @property
    def per_position_acceptance(self) -> list[float]:
        """For each draft position, the share of rounds that accepted it among those whose chain or tree reached it."""
        rounds = list(zip(self.accepted_per_round, self.depths_per_round, strict=True))
        rates = []
        for position in range(1, max(self.depths_per_round, default=0) + 1):
            proposed = [accepted for accepted, depth in rounds if depth >= position]
            rates.append(sum(accepted >= position for accepted in proposed) / len(proposed))
        return rates

    def add_round(self, drafted: list[int], accepted: list[int], committed: list[int]) -> None:
        """Note a round: how many tokens each item was proposed (for a chain this is its depth), accepted and committed."""
        self.rounds += 1
        self.drafted_per_round += drafted
        self.depths_per_round += drafted
        self.accepted_per_round += accepted
        self.tokens_per_round += committed
        self.items_per_round.append(len(committed))

    def take_back(self, counts: list[int]) -> None:
        """Forget the last tokens of each item, so many, which others are going to write again. All items are still there."""
        left = list(counts)
        for start in range(len(self.tokens_per_round) - len(left), -1, -len(left)):
            for item, count in enumerate(left):
                at = start + item
                taken = min(count, self.tokens_per_round[at])
                self.tokens_per_round[at] -= taken
                self.accepted_per_round[at] = min(self.accepted_per_round[at], self.tokens_per_round[at])
                left[item] -= taken


NOT_TIMED = nullcontext()


class Stopwatch:
    """Adds the time spent in named parts of a round to `stats`; does nothing, and reads no clock, unless `enabled`."""

    def __init__(self, stats: DecodeStats, enabled: bool, synchronize) -> None:
        self.stats = stats
        self.enabled = enabled
        self.synchronize = synchronize

    def part(self, name: str) -> AbstractContextManager[None]:
        return self._timed(name) if self.enabled else NOT_TIMED

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.synchronize()
        started = time.perf_counter()
        yield
        self.synchronize()
        seconds = time.perf_counter() - started
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + seconds
        self.stats.seconds_per_round.setdefault(name, []).append(seconds)


def synchronizer(device: torch.device):
    """A function that waits for `device`, for timing."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    is_one = accelerator is not None and accelerator.type == device.type
    return partial(torch.accelerator.synchronize, device) if is_one else lambda: None
