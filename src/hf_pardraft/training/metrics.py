"""Per-position accuracy of a drafter while it trains, gathered on the device and read when something is logged."""

from collections.abc import Callable

import torch


class DraftMetrics:
    """Counts right drafts per position, without waiting for the device."""

    def __init__(self) -> None:
        self._right: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, logits: torch.Tensor, labels: torch.LongTensor, positions: torch.LongTensor) -> None:
        """Count rows: `logits (rows, vocab)`, `labels (rows,)`, and `positions (rows,)` from 1, at most 256."""
        right = (logits.argmax(dim=-1) == labels).double()
        slots = torch.zeros(256, dtype=torch.float64, device=logits.device)
        counted = slots.index_add(0, positions - 1, right)
        seen = slots.index_add(0, positions - 1, torch.ones_like(right))
        self._right = counted if self._right is None else self._right + counted
        self._seen = seen if self._seen is None else self._seen + seen

    def pop(self, total: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts) -> dict[str, float]:
        """`accuracy_k` for each position seen, and `expected_tau`; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates.

        Args:
            total: sums counts over processes, each of which has to call this then.
        """
        counts = (
            torch.zeros(2, 256, dtype=torch.float64) if self._seen is None else torch.stack([self._right, self._seen])
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
