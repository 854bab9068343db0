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


def weighted_distillation(
    logits: torch.Tensor, teacher_logits: torch.Tensor, weights: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a weighted mean of T^2 KL(teacher || student), both softened by a temperature T (PARD-2, AMD).

    T^2 keeps the gradients' size independent of T.

    Args:
        logits: `(rows, vocab)`.
        teacher_logits: `(rows, vocab)`, the target's for the same token; constants.
        weights: `(rows,)`.
        temperature: T.

    Returns:
        sum of weight times divergence, in nats, and sum of weights; scalars in float32 or the logits' wider dtype.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = weights.to(wide)
    student = functional.log_softmax(logits.to(wide) / temperature, dim=-1)
    teacher = functional.log_softmax(teacher_logits.detach().to(wide) / temperature, dim=-1)
    divergences = functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
    return (divergences * weights).sum() * temperature**2, weights.sum()


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
