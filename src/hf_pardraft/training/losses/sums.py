"""Objectives as sums over drafted blocks, from what the rows scored: numerators and denominators apart. Pure.

Both are sums over blocks, so batches and processes add theirs before anything is divided, and the quotient is that of one big
batch. `log_probs` and the like are `(blocks, positions)`, positions counted from the first drafted token; what stands at an
invalid position doesn't matter.
"""

from typing import NamedTuple

import torch

from .weights import acceptance_weights

REDUCTIONS = ("weight_sum", "paper")


class Sums(NamedTuple):
    """A mean before it is divided; several, where an objective averages several means.

    Attributes:
        numerators, denominators: `(means,)`.
    """

    numerators: torch.Tensor
    denominators: torch.Tensor


def mean_of(numerators: torch.Tensor, denominators: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """The average quotient of those whose denominator is not 0; 0 if there is none. A scalar, from `(means,)` each."""
    found = denominators != 0
    quotients = numerators / (denominators + epsilon).masked_fill(~found, 1)
    return torch.where(found, quotients, 0).sum() / found.sum().clamp(min=1)


def check_reduction(reduction: str) -> None:
    """Raise a `ValueError` for a reduction that there isn't."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")


def active_blocks(valid: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """How many blocks have a valid position: what the papers' expectations over blocks are averages over."""
    return valid.any(dim=1).sum().to(dtype)


def weighted_sums(
    values: torch.Tensor, weights: torch.Tensor, valid: torch.BoolTensor, reduction: str = "weight_sum"
) -> Sums:
    """Sum of weight times value, over the sum of the weights, or ("paper") over the blocks that have a valid position.

    Args:
        values: `(blocks, positions)`.
        weights: constants that broadcast against them.
        valid: `(blocks, positions)`.
    """
    check_reduction(reduction)
    weights = weights.to(values.dtype) * valid
    total = (torch.where(valid, values, 0) * weights).sum()
    divisor = weights.sum() if reduction == "weight_sum" else active_blocks(valid, values.dtype)
    return Sums(total[None], divisor[None])


def subtask_sums(log_probs: torch.Tensor, weights: torch.Tensor, valid: torch.BoolTensor) -> Sums:
    """Cross-entropy of each position by itself, over the rows that it has (arXiv 2504.18583, eq. 8).

    Args:
        log_probs, valid: `(blocks, positions)`.
        weights: `(positions,)`, of the means. They are scaled to an average of 1, so that they leave the loss's scale alone.

    Returns:
        `(positions,)` each.
    """
    weights = (weights / weights.mean()).to(log_probs.dtype)
    return Sums(-weights * torch.where(valid, log_probs, 0).sum(dim=0), valid.sum(dim=0).to(log_probs.dtype))


def first_error_sums(
    log_probs: torch.Tensor, is_right: torch.BoolTensor, weights: torch.Tensor, valid: torch.BoolTensor
) -> Sums:
    """Cross-entropy of each block's first wrong position alone, weighted (arXiv 2606.11552, eq. 10).

    Args:
        is_right: `(blocks, positions)`, whether the drafter's likeliest token is the label. Which position is the first wrong
            one is a constant.
    """
    wrong = valid & ~is_right
    return weighted_sums(-log_probs, weights, wrong & (wrong.cumsum(dim=1) == 1))


def prefix_probabilities(log_probs: torch.Tensor, valid: torch.BoolTensor) -> torch.Tensor:
    """rho_k = prod over valid j <= k of p_j; 0 at invalid positions. `(blocks, positions)`."""
    return torch.where(valid, log_probs, 0).cumsum(dim=1).exp() * valid


def chain_sums(log_probs: torch.Tensor, valid: torch.BoolTensor, reduction: str = "weight_sum") -> Sums:
    """Sum of the prefix probabilities (arXiv 2606.11552, eq. 12), over the valid positions, or ("paper") over all positions of
    the blocks that have a valid one."""
    check_reduction(reduction)
    total = prefix_probabilities(log_probs, valid).sum()
    divisor = valid.sum() if reduction == "weight_sum" else valid.any(dim=1).sum() * valid.shape[1]
    return Sums(total[None], divisor.to(total.dtype)[None])


def streak_sums(log_probs: torch.Tensor, valid: torch.BoolTensor, reduction: str = "weight_sum") -> Sums:
    """Sum of the prefix probabilities of the target's own continuations (SpecDiff-2, arXiv 2606.11552, section 6.5), over the
    valid positions, or ("paper") over the prefixes: then it is the expected streak in tokens."""
    check_reduction(reduction)
    total = prefix_probabilities(log_probs, valid).sum()
    divisor = valid.sum().to(total.dtype) if reduction == "weight_sum" else active_blocks(valid, total.dtype)
    return Sums(total[None], divisor[None])


def acceptance_sums(
    log_probs: torch.Tensor, valid: torch.BoolTensor, alpha: float = 0.5, reduction: str = "weight_sum"
) -> Sums:
    """Cross-entropy with D-PACE's weights; see [`acceptance_weights`]."""
    return weighted_sums(-log_probs, acceptance_weights(log_probs, valid, alpha), valid, reduction)


def denominators_of(sums: dict[str, Sums]) -> torch.Tensor:
    """All objectives' denominators in one tensor, so that processes exchange it at once."""
    return torch.cat([part.denominators for part in sums.values()]).detach().double()


def with_denominators(sums: dict[str, Sums], denominators: torch.Tensor) -> dict[str, Sums]:
    """Sums with other denominators, given as [`denominators_of`] gives them."""
    split = denominators.split([len(part.denominators) for part in sums.values()])
    return {
        name: Sums(part.numerators, own.to(part.denominators))
        for (name, part), own in zip(sums.items(), split, strict=True)
    }


def added(sums: dict[str, Sums], others: dict[str, Sums]) -> dict[str, Sums]:
    """The sums of all batches so far and of another one, without their graph."""
    others = {name: Sums(*(tensor.detach().double() for tensor in part)) for name, part in others.items()}
    return {
        name: Sums(*(a + b for a, b in zip(sums[name], part, strict=True))) if sums else part
        for name, part in others.items()
    }
