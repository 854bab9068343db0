"""Objectives as weighted sums over drafted blocks, from what the positions scored: numerators and denominators apart. Pure.

Both are sums over blocks, so batches and processes add theirs before anything is divided, and the quotient is that of one big
batch. `log_probs` and the like are `(blocks, positions)`, positions counted from the first drafted token; what stands at an
invalid position doesn't matter. Where only some of a text's positions are there, their weights say how many each stands for.
"""

from typing import NamedTuple

import torch

from ...widest_float import widest_float

REDUCTIONS = ("weight_sum", "paper")
# epsilon of arXiv 2606.11552, eq. 10.
FIRST_ERROR_EPSILON = 1e-6


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


def position_weights(num_positions: int, gamma: float | None, device: torch.device | None = None) -> torch.Tensor:
    """Weights w_k = exp(-(k - 1) / gamma) of draft positions k = 1..num_positions (arXiv 2606.11552, eq. 8).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: decay constant in positions; `None` weighs all alike.

    Returns:
        `(num_positions,)`, see [`widest_float`].
    """
    if gamma is None:
        return torch.ones(num_positions, device=device, dtype=widest_float(device))
    if not gamma > 0:
        raise ValueError(f"gamma must be positive, or None for uniform weights, got {gamma}")
    return torch.exp(-torch.arange(num_positions, device=device, dtype=widest_float(device)) / gamma)


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


def annealing_weights(num_positions: int, gamma: float, device: torch.device | None = None) -> torch.Tensor:
    """Weights lambda_t = gamma^(t - 1) of draft positions t = 1..num_positions (arXiv 2601.19278, section 3.3).

    Args:
        num_positions: how many positions, counted from the first drafted token.
        gamma: annealing coefficient in (0, 1]; 1 weighs all alike.

    Returns:
        `(num_positions,)`, see [`widest_float`].
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"the annealing coefficient gamma must be in (0, 1], got {gamma}")
    return gamma ** torch.arange(num_positions, device=device, dtype=widest_float(device))


def confidence_weights(
    token_probabilities: torch.Tensor, block: torch.LongTensor, index: torch.LongTensor, num_tokens: int
) -> torch.Tensor:
    """How likely the target is to accept what stands before a PARD label: the weight of its loss (PARD-2, AMD).

    Query (j, p) drafts the token at p + 1 after the prefix that ends at p - j, so its weight is the product of the target's
    probabilities of the tokens in between, at p - j + 1 to p; 1 for block 0.

    Args:
        token_probabilities: `(batch, length)`, the target's probability of each token of the text, given those before it.
        block: `(batch, queries)`, number of masks up to and including the query, below `num_tokens`.
        index: `(batch, queries)`, the query's place p in the text.
        num_tokens: K.

    Returns:
        `(batch, queries)`.
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


def active_blocks(valid: torch.BoolTensor, stands_for: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """How many blocks have a valid position, each as many as its first one stands for: what the papers' expectations over
    blocks are averages over."""
    return (stands_for * (valid & (valid.cumsum(dim=1) == 1))).sum().to(dtype)


def weighted_sums(
    values: torch.Tensor,
    weights: torch.Tensor,
    valid: torch.BoolTensor,
    reduction: str = "weight_sum",
    stands_for: torch.Tensor | float = 1.0,
) -> Sums:
    """Sum of weight times value, over the sum of the weights, or ("paper") over the blocks that have a valid position.

    Args:
        values: `(blocks, positions)`.
        weights, stands_for: constants that broadcast against them. The blocks are counted by the latter alone.
        valid: `(blocks, positions)`.
    """
    check_reduction(reduction)
    weights = (weights * stands_for).to(values.dtype) * valid
    total = (torch.where(valid, values, 0) * weights).sum()
    divisor = weights.sum() if reduction == "weight_sum" else active_blocks(valid, stands_for, values.dtype)
    return Sums(total[None], divisor[None])


def subtask_sums(log_probs: torch.Tensor, weights: torch.Tensor, valid: torch.BoolTensor) -> Sums:
    """Cross-entropy of each position by itself, over the blocks that have it (arXiv 2504.18583, eq. 8).

    Args:
        log_probs, valid: `(blocks, positions)`.
        weights: `(positions,)`, of the means. They are scaled to an average of 1, so that they leave the loss's scale alone.

    Returns:
        `(positions,)` each.
    """
    weights = (weights / weights.mean()).to(log_probs.dtype)
    return Sums(-weights * torch.where(valid, log_probs, 0).sum(dim=0), valid.sum(dim=0).to(log_probs.dtype))


def first_error_sums(
    log_probs: torch.Tensor,
    is_right: torch.BoolTensor,
    weights: torch.Tensor,
    valid: torch.BoolTensor,
    stands_for: torch.Tensor | float = 1.0,
) -> Sums:
    """Cross-entropy of each block's first wrong position alone, weighted (arXiv 2606.11552, eq. 10).

    Args:
        is_right: `(blocks, positions)`, whether the drafter's likeliest token is the label. Which position is the first wrong
            one is a constant.
    """
    wrong = valid & ~is_right
    return weighted_sums(-log_probs, weights, wrong & (wrong.cumsum(dim=1) == 1), stands_for=stands_for)


def prefix_probabilities(log_probs: torch.Tensor, valid: torch.BoolTensor) -> torch.Tensor:
    """rho_k = prod over valid j <= k of p_j; 0 at invalid positions. `(blocks, positions)`."""
    return torch.where(valid, log_probs, 0).cumsum(dim=1).exp() * valid


def chain_sums(
    log_probs: torch.Tensor,
    valid: torch.BoolTensor,
    reduction: str = "weight_sum",
    stands_for: torch.Tensor | float = 1.0,
) -> Sums:
    """Sum of the prefix probabilities (arXiv 2606.11552, eq. 12), over the valid positions, or ("paper") over all positions of
    the blocks that have a valid one."""
    check_reduction(reduction)
    sums = streak_sums(log_probs, valid, reduction, stands_for)
    return sums if reduction == "weight_sum" else sums._replace(denominators=sums.denominators * valid.shape[1])


def streak_sums(
    log_probs: torch.Tensor,
    valid: torch.BoolTensor,
    reduction: str = "weight_sum",
    stands_for: torch.Tensor | float = 1.0,
) -> Sums:
    """Sum of the prefix probabilities of the target's own continuations (SpecDiff-2, arXiv 2606.11552, section 6.5), over the
    valid positions, or ("paper") over the prefixes: then it is the expected streak in tokens, as far as there are positions."""
    prefixes = prefix_probabilities(log_probs, valid)
    return weighted_sums(prefixes, torch.ones_like(prefixes), valid, reduction, stands_for)


def acceptance_sums(
    log_probs: torch.Tensor,
    valid: torch.BoolTensor,
    alpha: float = 0.5,
    reduction: str = "weight_sum",
    stands_for: torch.Tensor | float = 1.0,
) -> Sums:
    """Cross-entropy with D-PACE's weights; see [`acceptance_weights`]."""
    return weighted_sums(-log_probs, acceptance_weights(log_probs, valid, alpha), valid, reduction, stands_for)


def denominators_of(sums: dict[str, Sums]) -> torch.Tensor:
    """All objectives' denominators in one tensor, so that processes exchange it at once."""
    return wide(torch.cat([part.denominators for part in sums.values()]))


def wide(sums: torch.Tensor) -> torch.Tensor:
    """Sums to which many others can be added, without their graph."""
    return sums.detach().to(widest_float(sums.device))


def with_denominators(sums: dict[str, Sums], denominators: torch.Tensor) -> dict[str, Sums]:
    """Sums with other denominators, given as [`denominators_of`] gives them."""
    split = denominators.split([len(part.denominators) for part in sums.values()])
    return {
        name: Sums(part.numerators, own.to(part.denominators))
        for (name, part), own in zip(sums.items(), split, strict=True)
    }


def added(sums: dict[str, Sums], others: dict[str, Sums]) -> dict[str, Sums]:
    """The sums of all batches so far and of another one, without their graph."""
    others = {name: Sums(*map(wide, part)) for name, part in others.items()}
    return {
        name: Sums(*(a + b for a, b in zip(sums[name], part, strict=True))) if sums else part
        for name, part in others.items()
    }
