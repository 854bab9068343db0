"""While calls run on a CPU, keys that heads share are not copied; afterwards, and elsewhere, all is as it was."""

import pytest
import torch
from transformers.integrations import sdpa_attention

from compiled_cases import batch_of, oracle
from hf_pardraft.generation.target_side.shared_keys import shared_keys
from threads import in_threads
from tiny_models import tiny_target

HEADS, SHARED = 4, 2


@pytest.fixture
def seen(monkeypatch):
    """How many heads of queries and of keys each scaled dot-product attention gets, and how many queries."""
    attention, seen = torch.nn.functional.scaled_dot_product_attention, []

    def noted(query, key, value, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1], query.shape[2]))
        return attention(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
def test_rounds_copy_no_keys(lengths, options, seen, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    usual = sdpa_attention.use_gqa_in_sdpa
    target, batch = tiny_target("llama"), batch_of(lengths)
    drafter = oracle("dflash", target, batch, rates=[0.7] * 4, settings={"tree_budget": 8})
    text = target.generate(**batch, do_sample=False, max_new_tokens=20)
    seen.clear()
    with_drafts = target.generate(**batch, do_sample=False, max_new_tokens=20, assistant_model=drafter, **options)
    assert torch.equal(with_drafts, text)
    # The prompt is read like that of plain `generate`, the rounds are several tokens.
    assert {heads for heads in seen if heads[2] > 1} == {(HEADS, SHARED, length) for *_, length in seen if length > 1}
    assert sdpa_attention.use_gqa_in_sdpa is usual


def test_what_trains_or_is_elsewhere_or_is_one_token_decides_as_ever():
    usual, masks = sdpa_attention.use_gqa_in_sdpa, [torch.zeros(1, 1, count, 2) for count in (1, 2)]
    keys, elsewhere = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8, device="meta")
    target = tiny_target("llama")
    with torch.no_grad(), shared_keys(target):
        assert sdpa_attention.use_gqa_in_sdpa(masks[1], keys, keys)
        # Its heads become the queries of one head, which rounds otherwise.
        assert not sdpa_attention.use_gqa_in_sdpa(masks[0], keys, keys)
        assert not sdpa_attention.use_gqa_in_sdpa(masks[1], elsewhere, elsewhere)
        with torch.enable_grad():
            assert not sdpa_attention.use_gqa_in_sdpa(masks[1], keys, keys)
    target.model.layers[1].compile()
    with shared_keys(target):
        assert sdpa_attention.use_gqa_in_sdpa is usual
    with shared_keys(tiny_target("llama").to("meta")):
        assert sdpa_attention.use_gqa_in_sdpa is usual


def test_calls_in_threads_leave_what_they_found():
    usual, target = sdpa_attention.use_gqa_in_sdpa, tiny_target("llama")

    def enter_and_leave():
        found = []
        for _ in range(300):
            with shared_keys(target):
                found.append(sdpa_attention.use_gqa_in_sdpa is not usual)
        return all(found)

    assert in_threads(4, enter_and_leave) == [True] * 4
    assert sdpa_attention.use_gqa_in_sdpa is usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_kernel_gives_the_same_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 16, generator=generator).to(dtype) for heads, length in ((6, 9), (2, 40), (2, 40))
    )
    mask = torch.zeros(2, 1, 9, 40, dtype=dtype).masked_fill(
        torch.rand(2, 1, 9, 40, generator=generator) < 0.4, torch.finfo(dtype).min
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    copied = attention(query, *(sdpa_attention.repeat_kv(tensor, 3) for tensor in (key, value)), mask)
    assert torch.equal(attention(query, key, value, mask, enable_gqa=True), copied)
