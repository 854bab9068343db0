"""How well a drafter guesses while it trains: objectives and accuracies, counted on the device."""

from collections.abc import Callable

import torch

from .losses.objectives import OBJECTIVES, BlockScores
from .losses.sums import Sums, added, mean_of

# Processes that have seen fewer positions than others exchange as many counts.
MOST_POSITIONS = 256


class DraftMetrics:
    """What batches were worth since this was last asked: objectives, and right drafts per position. Waits for no device."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}
        self._right: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, sums: dict[str, Sums], scores: BlockScores) -> None:
        """Count a batch: the sums of its objectives, and which drafts are right of those that count."""
        self._sums = added(self._sums, sums)
        is_right, valid = scores.is_right, scores.valid
        counts = torch.stack([(is_right & valid).sum(dim=0), valid.sum(dim=0)]).double()
        counted, seen = torch.nn.functional.pad(counts, (0, MOST_POSITIONS - counts.shape[1]))
        self._right = counted if self._right is None else self._right + counted
        self._seen = seen if self._seen is None else self._seen + seen

    def pop_objectives(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """What each objective was, over all batches and processes as one; starts anew.

        Args:
            total: sums over processes, each of which has to call this then.
        """
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        # Numerators first, then denominators, in one exchange.
        sizes = [len(part.denominators) for part in sums.values()]
        both = [torch.cat([part[field] for part in sums.values()]) for field in range(2)]
        numerators, denominators = total(torch.stack(both))
        quotients = zip(sums, numerators.split(sizes), denominators.split(sizes), strict=True)
        return {name: mean_of(*parts, OBJECTIVES[name].epsilon).item() for name, *parts in quotients}

    def pop_accuracies(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`accuracy_k` for each position seen, and `expected_tau`; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates.

        Args:
            total: see [`pop_objectives`].
        """
        counts = (
            torch.zeros(2, MOST_POSITIONS, dtype=torch.float64)
            if self._seen is None
            else torch.stack([self._right, self._seen])
        )
        right, seen = total(counts).tolist()
        if not any(seen):
            return {}
        rates = [right / count for right, count in zip(right, seen, strict=True) if count]
        self._right = self._seen = None
        expected_tau, all_right = 1.0, 1.0
        for rate in rates:
            all_right *= rate
            expected_tau += all_right
        result = {f"accuracy_{k}": round(rate, 4) for k, rate in enumerate(rates, start=1)}
        return {**result, "expected_tau": round(expected_tau, 3)}
