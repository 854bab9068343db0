"""The likeliest token of each position is `argmax`'s, whatever way it is found."""

import pytest
import torch

from hf_pardraft.likeliest import BLOCK, FEWEST_BLOCKS, likeliest

LARGE = BLOCK * FEWEST_BLOCKS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [7, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + BLOCK, 50257])
def test_it_is_argmax_for_equals_and_nans_too(dtype, vocab):
    torch.manual_seed(vocab)
    scores = torch.randn(2, 5, vocab)
    rounded = (scores * 2).round()
    broken = scores.clone()
    broken[:, ::2, vocab // 2 :: vocab // 3] = torch.nan
    masked = torch.full_like(scores, -torch.inf)
    masked[0, :, -1] = 0
    across = torch.randn(2, vocab, 5).transpose(1, 2)
    for case in (scores, rounded, broken, masked, across, scores[:, :, 1:], torch.zeros_like(scores)):
        case = case.to(dtype)
        assert torch.equal(likeliest(case), case.argmax(dim=-1))


def test_it_compiles_to_the_same():
    torch.manual_seed(0)
    scores = (torch.randn(1, 9, LARGE) * 3).round()
    assert torch.equal(torch.compile(likeliest)(scores), scores.argmax(dim=-1))
