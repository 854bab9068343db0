"""The text of every row is the same whenever somebody looks at it, and is written only then."""

import random

import pytest
import torch

from compiled_cases import oracle
from hf_pardraft.generation.sequences import TokenBuffer
from tiny_models import batch_of, tiny_target


def test_more_than_a_short_row_has_may_be_asked_for():
    texts = TokenBuffer(torch.tensor([[1], [2]]))
    texts.append([[3, 4, 5], [6]])
    last = texts.last(4)
    assert last[0].tolist() == [1, 3, 4, 5]
    assert last[1, 2:].tolist() == [2, 6]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("looks", [0.0, 0.3, 1.0])
def test_rows_are_what_was_appended_and_not_removed(batch, looks):
    draw = random.Random(batch)
    prompts = torch.arange(2 * batch).view(batch, 2)
    texts, expected = TokenBuffer(prompts), prompts.tolist()

    def look():
        for index, row in enumerate(expected):
            assert texts.item(index).tolist() == [row]
        shortest = min(map(len, expected))
        assert texts.last(shortest).tolist() == [row[-shortest:] for row in expected]

    for _ in range(60):
        new = [[draw.randrange(100) for _ in range(draw.randrange(1, 6))] for _ in expected]
        texts.append(new)
        for index, tokens in enumerate(new):
            expected[index] += tokens
        if draw.random() < looks:
            look()
        for index, tokens in enumerate(new):
            count = draw.randrange(len(tokens))
            texts.remove(index, count)
            expected[index] = expected[index][: len(expected[index]) - count]
        if draw.random() < looks:
            look()
        if len(expected) > 1 and draw.random() < 0.02:
            kept = sorted(draw.sample(range(len(expected)), len(expected) - 1))
            texts.select_items(kept)
            expected = [expected[row] for row in kept]
        assert texts.lengths == [len(row) for row in expected]
    look()


def test_rows_of_short_integers_grow_unevenly():
    texts = TokenBuffer(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    for new in ([[5], [6, 7]], [[8, 9], [10]]):
        texts.append(new)
        texts.last(1)
    assert texts.last(5).tolist() == [[1, 2, 5, 8, 9], [3, 4, 6, 7, 10]]
    assert texts.item(0).dtype == torch.long


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}])
def test_nothing_is_written_until_the_text_is_over(monkeypatch, options):
    written, original = [], TokenBuffer._write
    monkeypatch.setattr(TokenBuffer, "_write", lambda texts: (written.append(texts.waiting[0]), original(texts)))
    target, batch = tiny_target("llama"), batch_of(5)
    drafter = oracle("dflash", target, batch)
    target.generate(**batch, assistant_model=drafter, **{"do_sample": False, "max_new_tokens": 12, **options})
    assert [len(tokens) for tokens in written] == [12]
