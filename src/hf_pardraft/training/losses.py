"""Training objectives, one pure function each: tensors in, tensors out."""

import torch
from torch.nn import functional

REDUCTIONS = ("weight_sum", "paper")


def position_weights(
    num_positions: int, gamma: float | None, device: torch.device | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights w_k = exp(-(k - 1) / gamma) of draft positions k = 1..num_positions (left_to_right.txt, eq. 8).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: decay constant in positions; `None` weighs all alike.

    Returns:
        `(num_positions,)`.
    """
    if gamma is None:
        return torch.ones(num_positions, device=device, dtype=dtype)
    if gamma <= 0:
        raise ValueError(f"gamma must be positive, or None for uniform weights, got {gamma}")
    return torch.exp(-torch.arange(num_positions, device=device, dtype=dtype) / gamma)


def linear_gamma(step: int, num_steps: int, start: float, end: float) -> float:
    """The decay constant gamma(s) that grows from `start` before the first step to `end` behind the last (dflare.txt, eq. 5).

    Args:
        step: s, optimiser steps that are done.
        num_steps: S, optimiser steps of the whole training, at least 1.
    """
    return start + step / num_steps * (end - start)


def gamma_after_epochs(epochs: float, start: float, growth: float) -> float:
    """The decay constant that grows from `start` by `growth` after each whole epoch (dflare.txt, section A.1).

    Args:
        epochs: epochs that are done, a started one in part.
    """
    return start + growth * int(epochs)


def weighted_cross_entropy(
    logits: torch.Tensor, labels: torch.LongTensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a weighted mean of -log p(label), so that a caller can add them over batches and processes.

    Args:
        logits: `(rows, vocab)`.
        labels: `(rows,)`; what stands in a row of weight 0 doesn't matter.
        weights: `(rows,)`.

    Returns:
        sum of weight times cross-entropy, and sum of weights; scalars in float32 or the logits' wider dtype.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = weights.to(wide)
    losses = functional.cross_entropy(logits.to(wide), labels.masked_fill(weights == 0, 0), reduction="none")
    return (losses * weights).sum(), weights.sum()


def block_cross_entropy(
    draft_logits: torch.Tensor,
    labels: torch.LongTensor,
    valid: torch.BoolTensor,
    gamma: float | None = None,
    reduction: str = "weight_sum",
) -> torch.Tensor:
    """Cross-entropy with position decay (left_to_right.txt, eq. 9).

    Args:
        draft_logits: `(blocks, positions, vocab)`, positions counted from the first drafted token.
        labels: `(blocks, positions)`.
        valid: `(blocks, positions)`, which positions count; holes don't shift k.
        gamma: see [`position_weights`].
        reduction: "weight_sum" divides by the sum of the weights, so that gamma leaves the scale alone; "paper" is eq. 9 to
            the letter, summed over positions and averaged over the blocks that have a valid one.

    Returns:
        A scalar; 0 if nothing is valid.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    blocks, positions, vocab = draft_logits.shape
    weights = position_weights(positions, gamma, draft_logits.device).expand(blocks, -1) * valid
    total, weight_sum = weighted_cross_entropy(draft_logits.reshape(-1, vocab), labels.reshape(-1), weights.reshape(-1))
    divisor = weight_sum if reduction == "weight_sum" else valid.any(dim=1).sum().to(total.dtype)
    return total / divisor.masked_fill(divisor == 0, 1)
