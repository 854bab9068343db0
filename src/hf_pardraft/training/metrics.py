"""Per-position accuracy of a drafter while it trains, gathered on the device and read when something is logged."""

from collections.abc import Callable

import torch

# Processes that have seen fewer positions than others exchange as many counts.
MOST_POSITIONS = 256


class DraftMetrics:
    """Counts right drafts per position, without waiting for the device."""

    def __init__(self) -> None:
        self._right: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, is_right: torch.BoolTensor, valid: torch.BoolTensor) -> None:
        """Count drafts: which are right and which count, `(blocks, positions)` each."""
        counts = torch.stack([(is_right & valid).sum(dim=0), valid.sum(dim=0)]).double()
        counted, seen = torch.nn.functional.pad(counts, (0, MOST_POSITIONS - counts.shape[1]))
        self._right = counted if self._right is None else self._right + counted
        self._seen = seen if self._seen is None else self._seen + seen

    def pop(self, total: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts) -> dict[str, float]:
        """`accuracy_k` for each position seen, and `expected_tau`; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates.

        Args:
            total: sums counts over processes, each of which has to call this then.
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
