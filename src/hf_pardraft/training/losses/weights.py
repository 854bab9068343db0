"""Weights of the supervised positions: by depth, by the target's confidence, by the drafter's own. Pure."""

import torch


def position_weights(
    num_positions: int, gamma: float | None, device: torch.device | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights w_k = exp(-(k - 1) / gamma) of draft positions k = 1..num_positions (arXiv 2606.11552, eq. 8).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: decay constant in positions; `None` weighs all alike.

    Returns:
        `(num_positions,)`.
    """
    if gamma is None:
        return torch.ones(num_positions, device=device, dtype=dtype)
    if not gamma > 0:
        raise ValueError(f"gamma must be positive, or None for uniform weights, got {gamma}")
    return torch.exp(-torch.arange(num_positions, device=device, dtype=dtype) / gamma)


def linear_gamma(step: int, num_steps: int, start: float, end: float) -> float:
    """The decay constant gamma(s), which grows from `start` before the first step to `end` at last (arXiv 2606.02091, eq. 5).

    Args:
        step: s, optimiser steps that are done.
        num_steps: S, optimiser steps of the whole training, at least 1.
    """
    return start + step / num_steps * (end - start)


def gamma_after_epochs(epochs: float, start: float, growth: float) -> float:
    """The decay constant that grows from `start` by `growth` after each whole epoch (arXiv 2606.02091, section A.1).

    Args:
        epochs: epochs that are done, a started one in part.
    """
    return start + growth * int(epochs)


def annealing_weights(
    num_positions: int, gamma: float, device: torch.device | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights lambda_t = gamma^(t - 1) of draft positions t = 1..num_positions (arXiv 2601.19278, section 3.3).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: annealing coefficient in (0, 1]; 1 weighs all alike.

    Returns:
        `(num_positions,)`.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"the annealing coefficient gamma must be in (0, 1], got {gamma}")
    return gamma ** torch.arange(num_positions, device=device, dtype=dtype)


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


def acceptance_weights(log_probs: torch.Tensor, valid: torch.BoolTensor, alpha: float = 0.5) -> torch.Tensor:
    """How much each position adds to the accepted length: w_k = sum over j >= k of prod over i <= j of s_i, a constant (D-PACE).

    s_i = (1 - alpha) p_i + alpha, with the drafter's probability p_i of the token at i: what the accepted length's surrogate,
    the sum of the prefix products, gains with log s_k. An invalid position has a factor of 1, no term, and weight 0.

    Args:
        log_probs: `(blocks, positions)`, log p_i.
        valid: `(blocks, positions)`.
        alpha: in [0, 1): keeps a block's deep positions in the sum while its first ones are still unlikely (arXiv 2605.18810
            uses 0.5); 0 takes the probabilities as they are.

    Returns:
        `(blocks, positions)`, without a gradient.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"the smoothing alpha of D-PACE must be in [0, 1), got {alpha}")
    factors = torch.where(valid, (1 - alpha) * log_probs.detach().exp() + alpha, 1.0)
    prefixes = factors.cumprod(dim=1) * valid
    return prefixes.flip(1).cumsum(dim=1).flip(1) * valid
