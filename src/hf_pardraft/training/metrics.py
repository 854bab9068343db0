"""How well a drafter guesses while it trains: objectives, accuracies and hits, counted on the device."""

from collections.abc import Callable

import torch

from .losses.objectives import OBJECTIVES, BlockScores
from .losses.scoring import HIT
from .losses.sums import Sums, added, mean_of

# Processes that have seen fewer positions than others exchange as many counts.
MOST_POSITIONS = 256


class DraftMetrics:
    """What batches were worth since this was last asked: objectives, and right drafts per position. Waits for no device."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}
        # By position: right drafts, hits, and all.
        self._counts = torch.zeros(3, MOST_POSITIONS, dtype=torch.long)

    @torch.no_grad()
    def add(self, sums: dict[str, Sums], scores: BlockScores) -> None:
        """Count a batch: the sums of its objectives, and which drafts are right, or hits, of those that count."""
        self._sums = added(self._sums, sums)
        valid = scores.valid
        is_hit = torch.zeros_like(valid) if scores.is_hit is None else scores.is_hit
        counts = torch.stack([(each & valid).sum(dim=0) for each in (scores.is_right, is_hit, valid)])
        self._counts = self._counts.to(counts.device) + torch.nn.functional.pad(
            counts, (0, MOST_POSITIONS - counts.shape[1])
        )

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
        """`accuracy_k` for each position seen, `expected_tau`, and `hit10_k` if there are any hits; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates. A hit is a
        label among the ten likeliest tokens (hit@10 of arXiv 2601.19278, table 3), which a tree may hold.

        Args:
            total: see [`pop_objectives`].
        """
        *counts, seen = total(self._counts).tolist()
        self._counts = torch.zeros_like(self._counts)
        rates, hits = ([found / count for found, count in zip(each, seen, strict=True) if count] for each in counts)
        if not rates:
            return {}
        expected_tau, all_right = 1.0, 1.0
        for rate in rates:
            all_right *= rate
            expected_tau += all_right
        result = {f"accuracy_{k}": round(rate, 4) for k, rate in enumerate(rates, start=1)}
        of_hits = {f"hit{HIT}_{k}": round(rate, 4) for k, rate in enumerate(hits, start=1)} if any(hits) else {}
        return {**result, **of_hits, "expected_tau": round(expected_tau, 3)}
