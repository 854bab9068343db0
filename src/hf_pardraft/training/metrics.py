"""Per-position accuracy of a drafter while it trains, gathered on the device and read when something is logged."""

import torch


class DraftMetrics:
    """Counts right drafts per position, without waiting for the device."""

    def __init__(self) -> None:
        self._right: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, is_right: torch.BoolTensor, valid: torch.BoolTensor) -> None:
        """Count drafts: which are right and which count, `(blocks, positions)` each."""
        counted, seen = (is_right & valid).sum(dim=0).double(), valid.sum(dim=0).double()
        self._right = counted if self._right is None else self._right + counted
        self._seen = seen if self._seen is None else self._seen + seen

    def pop(self) -> dict[str, float]:
        """`accuracy_k` for each position seen, and `expected_tau`; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates.
        """
        if self._seen is None:
            return {}
        seen = self._seen.tolist()
        rates = [right / count for right, count in zip(self._right.tolist(), seen, strict=True) if count]
        self._right = self._seen = None
        expected_tau, all_right = 1.0, 1.0
        for rate in rates:
            all_right *= rate
            expected_tau += all_right
        result = {f"accuracy_{k}": round(rate, 4) for k, rate in enumerate(rates, start=1)}
        return {**result, "expected_tau": round(expected_tau, 3)}
