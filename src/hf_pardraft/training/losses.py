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


def annealing_weights(
    num_positions: int, gamma: float, device: torch.device | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights lambda_t = gamma^(t - 1) of draft positions t = 1..num_positions (dart.txt, section 3.3).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: annealing coefficient in (0, 1]; 1 weighs all alike.

    Returns:
        `(num_positions,)`.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"the annealing coefficient gamma must be in (0, 1], got {gamma}")
    return gamma ** torch.arange(num_positions, device=device, dtype=dtype)


def weighted_kl(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a weighted mean of KL(target || draft), as in [`weighted_cross_entropy`]. Natural log, temperature 1.

    Args:
        draft_logits, target_logits: `(rows, vocab)`; the target's are constants.
        weights: `(rows,)`.

    Returns:
        sum of weight times divergence, and sum of weights; scalars in float32 or the logits' wider dtype.
    """
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    target = target_logits.detach().to(wide).log_softmax(dim=-1)
    draft = draft_logits.to(wide).log_softmax(dim=-1)
    divergences = functional.kl_div(draft, target, reduction="none", log_target=True).sum(dim=-1)
    weights = weights.to(wide)
    return (divergences * weights).sum(), weights.sum()


def weighted_distillation(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weights: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a weighted mean of T^2 KL(target || draft), both softened by a temperature T (PARD-2, AMD).

    T^2 keeps the gradients' size independent of T. Arguments and sums are those of [`weighted_kl`].
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    total, weight_sum = weighted_kl(draft_logits.to(wide) / temperature, target_logits.to(wide) / temperature, weights)
    return total * temperature**2, weight_sum


def confidence_weights(
    token_probabilities: torch.Tensor, block: torch.LongTensor, index: torch.LongTensor, num_tokens: int
) -> torch.Tensor:
    """How likely the target is to accept a PARD row's predecessors: the weight of the row's loss (PARD-2, AMD).

    Row (j, p) drafts the token at p + 1 behind the prefix that ends at p - j, so its weight is the product of the target's
    probabilities of the tokens in between, at p - j + 1 to p; 1 for block 0.

    Args:
        token_probabilities: `(batch, length)`, the target's probability of each token of the text, given those before it.
        block: `(batch, rows)`, number of masks up to and including the row, below `num_tokens`.
        index: `(batch, rows)`, the row's place p in the text.
        num_tokens: K.

    Returns:
        `(batch, rows)`.
    """
    weights = torch.ones(block.shape, dtype=token_probabilities.dtype, device=block.device)
    for back in range(num_tokens - 1):
        place = index - back
        probability = token_probabilities.gather(1, place.clamp(min=0))
        # Before the text begins there is nothing to accept.
        weights = torch.where((back < block) & (place >= 0), weights * probability, weights)
    return weights


def annealed_kl(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    valid: torch.BoolTensor,
    gamma: float = 0.6,
    reduction: str = "weight_sum",
) -> torch.Tensor:
    """KL(target || draft) over the whole vocabulary, later positions weighing less (dart.txt, section 3.3).

    Args:
        draft_logits: `(blocks, positions, vocab)`, positions counted from the first drafted token.
        target_logits: the same shape; the target's logits for the same future tokens, constants.
        valid: `(blocks, positions)`, which positions count; holes don't shift t.
        gamma: see [`annealing_weights`].
        reduction: "weight_sum" divides by the sum of the weights; "paper" is the equation to the letter, summed over
            positions, and averaged over the blocks that have a valid one.

    Returns:
        A scalar; 0 if nothing is valid.
    """
    blocks, positions, vocab = draft_logits.shape
    weights = annealing_weights(positions, gamma, draft_logits.device).expand(blocks, -1) * valid
    total, weight_sum = weighted_kl(
        draft_logits.reshape(-1, vocab), target_logits.reshape(-1, vocab), weights.reshape(-1)
    )
    return reduced(total, weight_sum, valid, reduction)


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
    blocks, positions, vocab = draft_logits.shape
    weights = position_weights(positions, gamma, draft_logits.device).expand(blocks, -1) * valid
    total, weight_sum = weighted_cross_entropy(draft_logits.reshape(-1, vocab), labels.reshape(-1), weights.reshape(-1))
    return reduced(total, weight_sum, valid, reduction)


def reduced(total: torch.Tensor, weight_sum: torch.Tensor, valid: torch.BoolTensor, reduction: str) -> torch.Tensor:
    """A sum over all positions, divided by the sum of the weights or by the number of blocks with a valid position."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    divisor = weight_sum if reduction == "weight_sum" else valid.any(dim=1).sum().to(total.dtype)
    return total / divisor.masked_fill(divisor == 0, 1)
