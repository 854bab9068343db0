"""While calls on a CPU run, few tokens attend by our kernel, and no keys are copied; afterwards all is as it was."""

import operator

import pytest
import torch
from transformers import CompileConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compiled_cases import oracle
from hf_pardraft.generation.packing import token_attention
from hf_pardraft.generation.packing.fast_attention import fast_attention
from hf_pardraft.generation.packing.token_attention import kernels
from threads import in_threads
from tiny_models import batch_of, tiny_target

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
    target, batch = tiny_target("llama"), batch_of(*lengths)
    drafter = oracle("dflash", target, batch, rates=[0.7] * 4, settings={"tree_budget": 8})
    text = target.generate(**batch, do_sample=False, max_new_tokens=20)
    seen.clear()
    with_drafts = target.generate(**batch, do_sample=False, max_new_tokens=20, assistant_model=drafter, **options)
    assert torch.equal(with_drafts, text)
    # The prompt is read like that of plain `generate`, the rounds are several tokens.
    assert {heads for heads in seen if heads[2] > 1} == {(HEADS, SHARED, length) for *_, length in seen if length > 1}
    assert sdpa_attention.use_gqa_in_sdpa is usual


@pytest.fixture
def tokens_of_kernels(monkeypatch):
    """How many tokens each call of a kernel is given, however few they are."""
    found, seen = kernels(), []

    def counted(kernel):
        def call(*arguments):
            # Of what it is told of shapes the fourth number.
            seen.append(arguments[5][3])
            kernel(*arguments)

        return call

    monkeypatch.setattr(token_attention, "FEWEST_PRODUCTS", 0)
    monkeypatch.setattr(token_attention, "kernels", lambda: {key: counted(kernel) for key, kernel in found.items()})
    return seen


needs_kernels = pytest.mark.skipif(not kernels(), reason="there is no compiler here")


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(6,), (9, 3)])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["uncompiled", "compiled"])
def test_rounds_attend_by_the_kernel_and_write_the_same_text(
    options, lengths, budget, architecture, tokens_of_kernels, monkeypatch
):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target, batch = tiny_target(architecture, head_dim=16), batch_of(*lengths)
    drafter = oracle(
        "dflash", target, batch, rates=[0.7] * 4, settings={"tree_budget": budget, "draft_schedule": "fixed"}
    )
    text = target.generate(**batch, do_sample=False, max_new_tokens=20)
    assert not tokens_of_kernels
    with_drafts = target.generate(**batch, do_sample=False, max_new_tokens=20, assistant_model=drafter, **options)
    assert torch.equal(with_drafts, text)
    # All layers of the target, in every round of a whole tree.
    assert tokens_of_kernels.count((budget or 4) + 1) >= 3 * target.config.num_hidden_layers


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rounds_have_it_in_their_graphs(dtype, tokens_of_kernels):
    target, batch = tiny_target("llama", head_dim=16, num_hidden_layers=2).to(dtype), batch_of(6)
    drafter = oracle("dflash", target, batch, rates=[0.7] * 4, settings={"draft_schedule": "fixed"})
    options = {"cache_implementation": "static", "compile_config": CompileConfig(backend="aot_eager", fullgraph=True)}
    target.generate(**batch, do_sample=False, max_new_tokens=20, assistant_model=drafter, **options)
    assert tokens_of_kernels.count(5) >= 2 * 3


def test_what_a_caller_calls_attention_stays_what_it_is(monkeypatch):
    calls, usual = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def own(*arguments, **options):
        calls.append(arguments)
        return usual(*arguments, **options)

    target = tiny_target("llama", head_dim=16)
    with monkeypatch.context() as changed:
        changed.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
        with torch.no_grad(), fast_attention(target):
            target(torch.arange(6)[None])
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert len(calls) == target.config.num_hidden_layers
    with fast_attention(target):
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


@needs_kernels
def test_other_threads_and_what_trains_or_is_another_attention_have_transformers_own(tokens_of_kernels):
    module, tensors = torch.nn.Module(), [torch.randn(1, 2, length, 16) for length in (2, 9, 9)]
    mask = torch.zeros(1, 1, 2, 9)

    def attend(mask=mask, **options):
        before = len(tokens_of_kernels)
        mixed, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, mask, **options)
        assert mixed.shape == (1, 2, 2, 16)
        return len(tokens_of_kernels) - before

    with torch.no_grad(), fast_attention(tiny_target("llama")):
        assert attend() == attend(is_causal=True) == attend(None, is_causal=False) == 1
        assert attend(None) == attend(None, is_causal=True) == attend(dropout=0.5) == 0
        assert attend(position_bias=torch.zeros(1, 2, 2, 9)) == 0
        assert in_threads(1, torch.no_grad()(attend)) == [0]
        with torch.enable_grad():
            assert attend() == 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend() == 0
        with pytest.raises(ValueError, match="softcap"):
            attend(softcap=30.0)
    with torch.no_grad():
        assert attend() == 0


def test_what_trains_or_is_elsewhere_or_is_one_token_decides_as_ever():
    usual, masks = sdpa_attention.use_gqa_in_sdpa, [torch.zeros(1, 1, count, 2) for count in (1, 2)]
    keys, elsewhere = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8, device="meta")
    target = tiny_target("llama")
    with torch.no_grad(), fast_attention(target):
        assert sdpa_attention.use_gqa_in_sdpa(masks[1], keys, keys)
        # Its heads become the queries of one head, which rounds otherwise.
        assert not sdpa_attention.use_gqa_in_sdpa(masks[0], keys, keys)
        assert not sdpa_attention.use_gqa_in_sdpa(masks[1], elsewhere, elsewhere)
        with torch.enable_grad():
            assert not sdpa_attention.use_gqa_in_sdpa(masks[1], keys, keys)
    target.model.layers[1].compile()
    with fast_attention(target):
        assert sdpa_attention.use_gqa_in_sdpa is usual
    with fast_attention(tiny_target("llama").to("meta")):
        assert sdpa_attention.use_gqa_in_sdpa is usual
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention.sdpa_attention_forward


def test_calls_in_threads_leave_what_they_found():
    target = tiny_target("llama")

    def functions():
        return sdpa_attention.use_gqa_in_sdpa, ALL_ATTENTION_FUNCTIONS["sdpa"]

    usual = functions()

    def enter_and_leave():
        found = []
        for _ in range(300):
            with fast_attention(target):
                found += map(operator.is_not, functions(), usual)
        return all(found)

    assert in_threads(4, enter_and_leave) == [True] * 4
    assert functions() == usual


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
