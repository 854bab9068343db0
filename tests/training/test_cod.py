"""COD by hand: how many each subtask keeps, and where a chain of them ends (arXiv 2504.18583, algorithm 1)."""

import itertools

import torch

from hf_pardraft.training.layouts.dropped_masks import conditional_drop


def kept(length: int, num_tokens: int, retention: float, least: float, unsupervised=()) -> list[list[int]]:
    predicts = torch.ones(length, dtype=torch.bool)
    predicts[list(unsupervised)] = False
    rows = conditional_drop(predicts, num_tokens, retention, least, torch.Generator().manual_seed(0))
    return [block.tolist() for block in rows]


def test_subtasks_thin_out_to_the_least_retention_and_no_further():
    sizes = [len(block) for block in kept(1000, 6, retention=0.5, least=0.2)]
    assert sizes[:4] == [1000, 500, 250, 200]
    # From there on only chains that meet the end of the text are lost.
    assert 195 <= sizes[5] <= sizes[4] <= 200


def test_as_many_are_kept_as_the_papers_equation_says_whatever_powers_round_to():
    for count in (100, 1000, 10_000):
        sizes = [len(block) for block in kept(count, 4, retention=0.7, least=0.2)]
        assert sizes == [count, count * 7 // 10, count * 49 // 100, count * 343 // 1000]


def test_a_chain_ends_with_the_text_and_before_what_is_not_learned():
    assert kept(5, 3, retention=1.0, least=1.0) == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4]]
    assert kept(6, 3, retention=1.0, least=1.0, unsupervised=[3]) == [[0, 1, 2, 4, 5], [1, 2, 5], [2]]


def test_each_kept_mask_stands_after_one_that_the_subtask_before_kept():
    blocks = kept(60, 5, retention=0.7, least=0.1)
    for before, after in itertools.pairwise(blocks):
        assert {row - 1 for row in after} <= {*before}
        assert after == sorted(after)
