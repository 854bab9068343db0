"""Every objective as a term of a loss, against loops over single positions in float64."""

import math
from dataclasses import replace

import pytest
import torch

from hf_pardraft.training.losses.objectives import (
    OBJECTIVES,
    BlockScores,
    ObjectiveSettings,
    objective_sums,
    total_loss,
)

BLOCKS, POSITIONS = 3, 5
SETTINGS = ObjectiveSettings(gamma=2.0, kl_gamma=0.5, dpace_alpha=0.3)


def scores(seed: int = 0) -> BlockScores:
    """Numbers such as a batch may have: a hole, a label that can't be drafted, a block that ends early, one that is right."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, POSITIONS)
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    known = valid.clone()
    known[0, 3] = False
    unbroken = known.clone()
    unbroken[0, 3:] = False
    random = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    is_right = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    return BlockScores(valid, known, unbroken, is_right, -3 * random[0], 2 * random[1], random[2], valid, -random[3])


def mean_over(pairs) -> float:
    """Weighted mean of (weight, value) pairs."""
    pairs = list(pairs)
    return sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)


def places(mask):
    return [(block, position) for block in range(BLOCKS) for position in range(POSITIONS) if mask[block, position]]


def decay(position: int) -> float:
    return math.exp(-position / 2.0)


def cross_entropy(s):
    return mean_over((decay(k), -s.log_probs[b, k].item()) for b, k in places(s.known))


def first_error(s):
    numerator = denominator = 0.0
    for block in range(BLOCKS):
        wrong = [k for k in range(POSITIONS) if s.unbroken[block, k] and not s.is_right[block, k]]
        if wrong:
            numerator += decay(wrong[0]) * -s.log_probs[block, wrong[0]].item()
            denominator += decay(wrong[0])
    return numerator / (denominator + 1e-6)


def annealed_kl(s):
    return mean_over((0.5**k, s.divergences[b, k].item()) for b, k in places(s.valid))


def forward_kl(s):
    return mean_over((decay(k), s.divergences[b, k].item()) for b, k in places(s.valid))


def cat_cross_entropy(s):
    return mean_over((s.confidences[b, k].item(), -s.log_probs[b, k].item()) for b, k in places(s.known))


def cat_kl(s):
    return mean_over((s.confidences[b, k].item(), s.divergences[b, k].item()) for b, k in places(s.valid))


BY_HAND = {
    "cross_entropy": cross_entropy,
    "first_error": first_error,
    "annealed_kl": annealed_kl,
    "forward_kl": forward_kl,
    "cat_cross_entropy": cat_cross_entropy,
    "cat_kl": cat_kl,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_term_is_what_its_positions_add_up_to(name):
    batch = scores()
    loss = total_loss({name: 1.0}, objective_sums({name: 1.0}, batch, SETTINGS))
    assert OBJECTIVES[name].sign == 1
    assert loss.item() == pytest.approx(BY_HAND[name](batch), rel=1e-12)


def test_weights_of_a_first_error_far_from_the_anchor_vanish_beside_epsilon():
    """arXiv 2606.11552, eq. 10: a block that errs at the last of 15 positions only weighs exp(-14), as much as epsilon."""
    shape = (1, 15)
    everywhere, is_right = torch.ones(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    is_right[0, 14] = False
    log_probs = torch.full(shape, -2.0, dtype=torch.float64)
    batch = BlockScores(everywhere, everywhere, everywhere, is_right, log_probs)
    loss = total_loss({"first_error": 1.0}, objective_sums({"first_error": 1.0}, batch, ObjectiveSettings(gamma=1.0)))
    weight = math.exp(-14)
    assert loss.item() == pytest.approx(2 * weight / (weight + 1e-6), rel=1e-6)
    assert loss.item() < 1


def repeated(batch: BlockScores, counts: torch.LongTensor) -> BlockScores:
    """Scores with each block as many times as that says."""
    return BlockScores(
        **{
            name: value.repeat_interleave(counts, dim=0)
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor)
        }
    )


@pytest.mark.parametrize("reduction", ["weight_sum", "paper"])
@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"subtask_cross_entropy"}))
def test_a_block_that_stands_for_others_like_it_counts_as_often_as_it_would_be_there(name, reduction):
    batch, counts, settings = scores(), torch.tensor([3, 1, 2]), replace(SETTINGS, reduction=reduction)
    standing = replace(batch, stands_for=counts[:, None].expand(BLOCKS, POSITIONS).double())
    losses = [
        total_loss({name: 1.0}, objective_sums({name: 1.0}, each, settings))
        for each in (standing, repeated(batch, counts), batch)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    assert losses[0].item() != pytest.approx(losses[2].item(), rel=1e-3)
