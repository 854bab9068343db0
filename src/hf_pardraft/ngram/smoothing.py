"""From relative counts behind contexts of several lengths to one probability. Pure."""

from collections.abc import Callable
from typing import NamedTuple

import torch

# From the share of the candidates in all text `(..., 1, candidates)` (None if it was not asked for), the counts of the
# contexts `(lengths, ..., contexts, 1)` and the shares behind them `(lengths, ..., contexts, candidates)`, lengths ascending
# from 1, and a weight: `(..., contexts, candidates)`. A context that was never seen has a count below 1, and shares of 0 or,
# behind several tokens, none (nan).
Smooth = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Smoothing(NamedTuple):
    """A way to smooth.

    Attributes:
        smooth: does it.
        default_weight: its parameter, by default that of the paper it is from.
        reads_unigrams: whether the candidates' share in all text matters.
    """

    smooth: Smooth
    default_weight: float
    reads_unigrams: bool


def longest_match(unigrams: None, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """The share behind the longest context that the candidate was ever seen behind, as in DART's code; else 0.

    A context has at least one token: how frequent a token is as such does not count. The weight is unused.
    """
    if not len(shares):
        return shares.new_zeros(shares.shape[1:])
    probability, *longer = shares.unbind()
    for share in longer:
        probability = torch.where(share > 0, share, probability)
    return probability


def stupid_backoff(unigrams: torch.Tensor, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """The same, times `weight` for each token by which the context had to be shortened, down to none (Brants et al., 2007)."""
    probability = _for_every_context(unigrams, shares)
    for share in shares.unbind():
        probability = torch.where(share > 0, share, weight * probability)
    return probability


def interpolated(unigrams: torch.Tensor, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """`weight` times the share behind a context, and the rest from the context without its first token (Jelinek, Mercer)."""
    probability = _for_every_context(unigrams, shares)
    for context_seen, share in zip((seen >= 1).unbind(), shares.unbind(), strict=True):
        probability = torch.where(context_seen, weight * share + (1 - weight) * probability, probability)
    return probability


def _for_every_context(unigrams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return unigrams.expand(torch.broadcast_shapes(unigrams.shape, shares.shape[1:]))


SMOOTHINGS = {
    "longest_match": Smoothing(longest_match, 1.0, reads_unigrams=False),
    "stupid_backoff": Smoothing(stupid_backoff, 0.4, reads_unigrams=True),
    "interpolated": Smoothing(interpolated, 0.7, reads_unigrams=True),
}


def checked_smoothing(name: str) -> str:
    """`name`, or a `ValueError` unless it is one of [`SMOOTHINGS`]."""
    if name not in SMOOTHINGS:
        raise ValueError(f"smoothing must be one of {tuple(SMOOTHINGS)}, got {name!r}")
    return name
