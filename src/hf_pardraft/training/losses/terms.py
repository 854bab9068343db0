"""Training objectives, one pure function each: logits in, a scalar out.

In a `DraftTrainer` the logits of all rows never stand in memory together: there the same sums (sums.py) are taken over what
the rows scored chunk by chunk.
"""

import torch
from torch.nn import functional

from .inputs import checked_blocks
from .sums import (
    REDUCTIONS,
    Sums,
    acceptance_sums,
    chain_sums,
    first_error_sums,
    mean_of,
    streak_sums,
    subtask_sums,
    weighted_sums,
)
from .weights import (
    acceptance_weights,
    annealing_weights,
    confidence_weights,
    gamma_after_epochs,
    linear_gamma,
    position_weights,
)

__all__ = [
    "FIRST_ERROR_EPSILON",
    "REDUCTIONS",
    "Sums",
    "acceptance_weighted_cross_entropy",
    "acceptance_weights",
    "annealed_kl",
    "annealing_weights",
    "block_cross_entropy",
    "block_kl",
    "chain_reward",
    "confidence_weights",
    "first_error_loss",
    "gamma_after_epochs",
    "kl_divergences",
    "label_log_probs",
    "linear_gamma",
    "position_weights",
    "streak_reward",
    "subtask_cross_entropy",
    "weighted_cross_entropy",
    "weighted_distillation",
]

# epsilon of arXiv 2606.11552, eq. 10.
FIRST_ERROR_EPSILON = 1e-6


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or the wider dtype that they have."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def label_log_probs(
    logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor | None = None
) -> torch.Tensor:
    """log p(label), `(...)`, from logits `(..., vocab)` and labels `(...)`; what an invalid label is doesn't matter."""
    if valid is not None:
        labels = labels.masked_fill(~valid, 0)
    logits = wide(logits)
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none")
    return -losses.view(labels.shape)


def kl_divergences(draft_logits: torch.Tensor, target_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """T^2 KL(target || draft), `(...)`, both `(..., vocab)` softened by T. Natural log; the target's logits are constants.

    T^2 keeps the gradients' size independent of T.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    draft = wide(draft_logits)
    target = target_logits.detach().to(draft.dtype)
    if temperature != 1:
        # Logits are the largest tensors of a step, and divided ones are copies.
        draft, target = draft / temperature, target / temperature
    draft, target = draft.log_softmax(dim=-1), target.log_softmax(dim=-1)
    probabilities = target.exp()
    # What the target never writes costs nothing, where a logit of -inf says so, too.
    terms = (probabilities * (target - draft)).masked_fill_(probabilities == 0, 0)
    return terms.sum(dim=-1) * temperature**2


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
    log_probs = label_log_probs(logits, labels, weights != 0)
    weights = weights.to(log_probs.dtype)
    return -(torch.where(weights != 0, log_probs, 0) * weights).sum(), weights.sum()


def weighted_distillation(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weights: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a weighted mean of T^2 KL(target || draft), both softened by a temperature T (PARD-2, AMD).

    Args:
        draft_logits, target_logits: `(rows, vocab)`; the target's are constants.
        weights: `(rows,)`.
        temperature: T; T^2 keeps the gradients' size independent of it.

    Returns:
        sum of weight times divergence, and sum of weights; scalars in float32 or the logits' wider dtype.
    """
    divergences = kl_divergences(draft_logits, target_logits, temperature)
    weights = weights.to(divergences.dtype)
    return (torch.where(weights != 0, divergences, 0) * weights).sum(), weights.sum()


def block_cross_entropy(
    draft_logits: torch.Tensor,
    labels: torch.LongTensor,
    valid: torch.BoolTensor,
    gamma: float | None = None,
    reduction: str = "weight_sum",
) -> torch.Tensor:
    """Cross-entropy with position decay: sum over k of w_k (-log p_k), w_k = exp(-(k - 1) / gamma) (arXiv 2606.11552, eq. 9).

    Args:
        draft_logits: `(blocks, positions, vocab)`, positions counted from the first drafted token.
        labels: `(blocks, positions)`; a position whose label is -100 doesn't count.
        valid: `(blocks, positions)`, which positions count; holes don't shift k. What stands elsewhere may be anything.
        gamma: see [`position_weights`].
        reduction: "weight_sum" divides by the sum of the weights, so that gamma leaves the scale alone; "paper" is eq. 9 to
            the letter, summed over positions and averaged over the blocks that have a valid one.

    Returns:
        A scalar; 0 if nothing is valid.

    Raises:
        ValueError: for shapes that don't agree, a gamma that isn't positive, or another reduction.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, labels)
    log_probs = label_log_probs(draft_logits, labels, valid)
    weights = position_weights(valid.shape[1], gamma, log_probs.device)
    return mean_of(*weighted_sums(-log_probs, weights, valid, reduction))


def subtask_cross_entropy(
    draft_logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor, gamma: float | None = None
) -> torch.Tensor:
    """PARD's objective: L_k = mean over the rows of subtask k of -log p_k (arXiv 2504.18583, eq. 8), averaged over the subtasks.

    Each subtask is averaged by itself, so those that COD thins out weigh as much as the first. Subtasks without a valid row are
    left out.

    Args:
        draft_logits, labels, valid: as for [`block_cross_entropy`].
        gamma: weighs L_k with w_k = exp(-(k - 1) / gamma), all w_k scaled to an average of 1; `None`, as in the paper, weighs
            all alike. See [`position_weights`].
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, labels)
    log_probs = label_log_probs(draft_logits, labels, valid)
    return mean_of(*subtask_sums(log_probs, position_weights(valid.shape[1], gamma, log_probs.device), valid))


def first_error_loss(
    draft_logits: torch.Tensor,
    labels: torch.LongTensor,
    valid: torch.BoolTensor,
    gamma: float | None = None,
) -> torch.Tensor:
    """Cross-entropy at the position that breaks each block's chain (arXiv 2606.11552, eq. 10).

    k* is the first valid position whose likeliest token is not the label (on ties the lowest id is the likeliest), a constant
    for the gradient: sum over blocks of w_k* (-log p_k*), divided by the sum of w_k* + 1e-6. Blocks without an error add
    nothing. Arguments are those of [`block_cross_entropy`].

    Returns:
        A scalar; 0 if no block has an error.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, labels)
    log_probs = label_log_probs(draft_logits, labels, valid)
    weights = position_weights(valid.shape[1], gamma, log_probs.device)
    sums = first_error_sums(log_probs, draft_logits.argmax(dim=-1) == labels, weights, valid)
    return mean_of(*sums, FIRST_ERROR_EPSILON)


def chain_reward(
    draft_logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor, reduction: str = "weight_sum"
) -> torch.Tensor:
    """A surrogate of the accepted length: the mean over k of rho_k = prod over j <= k of p_j (arXiv 2606.11552, eq. 12).

    It is a reward, in [0, 1]: a loss subtracts it. An invalid position has a factor of 1 and no term.

    Args:
        draft_logits, labels, valid: as for [`block_cross_entropy`].
        reduction: "weight_sum" divides by the number of valid positions; "paper" is eq. 12 to the letter, divided by the
            number of positions even where fewer are valid, and averaged over the blocks that have a valid one.

    Returns:
        A scalar; 0 if nothing is valid.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, labels)
    return mean_of(*chain_sums(label_log_probs(draft_logits, labels, valid), valid, reduction))


def streak_reward(
    draft_logits: torch.Tensor, continuations: torch.LongTensor, valid: torch.BoolTensor, reduction: str = "weight_sum"
) -> torch.Tensor:
    """Streak distillation: sum over m of prod over j <= m of q_j(x_j), on x sampled from the target (arXiv 2606.11552, 6.5).

    It is a reward: a loss subtracts it.

    Args:
        draft_logits: as for [`block_cross_entropy`].
        continuations: `(blocks, positions)`, what the target wrote behind each block's prefix.
        valid: `(blocks, positions)`, how far it wrote.
        reduction: "paper" averages the sum over the blocks, which gives tokens; "weight_sum" divides it by the number of valid
            positions, which gives [0, 1] at every block size.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, continuations)
    return mean_of(*streak_sums(label_log_probs(draft_logits, continuations, valid), valid, reduction))


def acceptance_weighted_cross_entropy(
    draft_logits: torch.Tensor,
    labels: torch.LongTensor,
    valid: torch.BoolTensor,
    alpha: float = 0.5,
    reduction: str = "weight_sum",
) -> torch.Tensor:
    """D-PACE: cross-entropy whose weights are what each position adds to the accepted length, as constants (arXiv 2605.18810).

    Args:
        draft_logits, labels, valid: as for [`block_cross_entropy`].
        alpha: see [`acceptance_weights`].
        reduction: "weight_sum" divides by the sum of the weights; "paper" by the blocks that have a valid position.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, labels)
    return mean_of(*acceptance_sums(label_log_probs(draft_logits, labels, valid), valid, alpha, reduction))


def annealed_kl(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    valid: torch.BoolTensor,
    gamma: float = 0.6,
    reduction: str = "weight_sum",
) -> torch.Tensor:
    """Sum over t of gamma^(t - 1) KL(target || draft) over the whole vocabulary (arXiv 2601.19278, section 3.3).

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
    weights = annealing_weights(draft_logits.shape[1], gamma, draft_logits.device)
    return block_kl(draft_logits, target_logits, valid, weights, reduction)


def block_kl(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    valid: torch.BoolTensor,
    weights: torch.Tensor,
    reduction: str = "weight_sum",
    temperature: float = 1.0,
) -> torch.Tensor:
    """T^2 KL(target || draft) with weights of any kind: [`position_weights`], [`confidence_weights`].

    Args:
        draft_logits, target_logits, valid, reduction: as for [`annealed_kl`].
        weights: constants that broadcast against `(blocks, positions)`.
        temperature: T, by which both laws are softened.
    """
    draft_logits, valid = checked_blocks(draft_logits, valid, target_logits=target_logits)
    target_logits = target_logits.masked_fill(~valid[:, :, None], 0)
    divergences = kl_divergences(draft_logits, target_logits, temperature)
    return mean_of(*weighted_sums(divergences, weights, valid, reduction))
