"""A writer's attention over one token is the softmax it should be, as compiled for any processor, or torch's where nothing is."""

import pytest
import torch
from torch.nn import functional

from hf_pardraft.datagen import step_attention as module
from hf_pardraft.datagen.fast_steps import FastSteps
from hf_pardraft.datagen.step_attention import _attend, kernels, step_attention
from processors import PROCESSORS, compile_for
from threads import torch_threads

DTYPES = [torch.float32, torch.bfloat16]
# So near to the exact result: the mean of a few numbers, rounded to their dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 8e-3}

needs_kernels = pytest.mark.skipif(not kernels(), reason="there is no compiler here")


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """The kernels as they are compiled for some processor."""
    compile_for(request.param, monkeypatch)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


def step(dtype, num_queries=3, size=16, columns=40, items=2, heads=2, room=7):
    """Queries, keys whose numbers stand side by side, and values, all of them parts of larger buffers."""
    query = 2 * torch.randn(items, heads, num_queries, size)
    key = torch.randn(items, heads, size, room + columns).transpose(2, 3)[:, :, room:]
    value = torch.randn(items, heads, room + columns, size)[:, :, room:]
    return query.to(dtype), key.to(dtype), value.to(dtype)


def masked(items, columns, dtype, lowest=None):
    """Padding of different lengths, a gap, and columns that count for less."""
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(items, 1, 1, columns, dtype=dtype)
    for item in range(items):
        mask[item, ..., : item * columns // (items + 1)] = lowest
        mask[item, ..., columns // 2 : columns // 2 + item] = lowest
        mask[item, ..., -1] = 0.0
    mask[..., columns // 3] -= 1.5
    return mask.clamp(min=lowest)


def exact(query, key, value, mask, scale):
    """The definition, in float64."""
    scores = torch.einsum("ihqd,ihcd->ihqc", query.double(), key.double()) * scale
    if mask is not None:
        scores = scores + mask.double()
    return torch.einsum("ihqc,ihcd->ihqd", torch.softmax(scores, dim=-1), value.double())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_number_of_columns_queries_and_sizes_has_the_softmax(dtype, num_threads):
    torch.manual_seed(0)
    with torch_threads(num_threads):
        for columns in (1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 80, 129, 200):
            for size in (8, 12, 16, 64, 72, 80, 128):
                for num_queries in (1, 2, 3, 4, 5, 8):
                    query, key, value = step(dtype, num_queries, size, columns)
                    for mask in (None, masked(2, columns, dtype), masked(1, columns, dtype, float("-inf"))):
                        found = _attend(query, key, value, mask, size**-0.5)
                        expected = exact(query, key, value, mask, size**-0.5)
                        torch.testing.assert_close(
                            found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
                        )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right_as_compiled_for_other_processors(processor, dtype):
    torch.manual_seed(0)
    for columns, size in ((5, 8), (70, 24), (131, 80)):
        query, key, value = step(dtype, 5, size, columns)
        found = _attend(query, key, value, masked(2, columns, dtype), 0.3)
        expected = exact(query, key, value, masked(2, columns, dtype), 0.3)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_kernels
def test_the_mean_of_a_long_text_is_rounded_hardly_more_than_that_of_a_short_one():
    torch.manual_seed(0)
    for size in (64, 72):
        query, key, value = step(torch.float32, size=size, columns=8192, items=1)
        found, expected = (each(query / 10, key, value + 1, None, size**-0.5) for each in (_attend, exact))
        assert (found.double() - expected).abs().mean() < 3e-7


@needs_kernels
@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_scores_of_any_spread_are_weighed_rightly(spread):
    torch.manual_seed(0)
    query, key, value = step(torch.float32, columns=300)
    found, expected = (each(query, key, value, None, spread) for each in (_attend, exact))
    # The scores themselves are rounded.
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * spread, rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_not_read_and_what_is_no_number_stays_with_its_own_item(dtype):
    query, key, value = step(dtype, columns=40)
    mask = masked(2, 40, dtype)
    usual = _attend(query, key, value, mask, 0.25)
    # Item 1 begins with 13 columns of padding.
    key[1, :, :13], value[1, :, :13] = float("nan"), float("inf")
    assert torch.equal(_attend(query, key, value, mask, 0.25), usual)
    key[0, 1, 30] = float("nan")
    found = _attend(query, key, value, mask, 0.25)
    assert found[0, 1].isnan().all()
    assert torch.equal(found[0, 0], usual[0, 0])
    assert torch.equal(found[1], usual[1])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_that_sees_nothing_has_what_torch_gives_it(dtype):
    query, key, value = step(dtype, columns=40)
    mask = torch.full((2, 1, 1, 40), torch.finfo(dtype).min, dtype=dtype)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    found = _attend(query, key, value, mask, 0.25)
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


CALLS = {
    "one head for one": {},
    "heads that share keys": {"num_heads": 6, "enable_gqa": True},
    "many heads that share keys": {"num_heads": 40, "enable_gqa": True},
    "no mask": {"mask": None},
    "a mask of booleans": {"mask": "bool"},
    "a mask for all items": {"mask": "one"},
    "a mask of each head": {"mask": "heads"},
    "a mask of one number for all columns": {"mask": "number"},
    "no items": {"num_items": 0, "num_heads": 6, "enable_gqa": True},
    "a scale": {"scale": 0.7},
    "keys that lie as values do": {"lie": "columns"},
    "values of another size": {"value_size": 24},
    "float64": {"dtype": torch.float64},
    "several tokens": {"num_tokens": 3},
    "a causal one": {"mask": None, "num_tokens": 40, "is_causal": True},
}


def arguments_of(dtype, num_heads=2, mask="items", lie=None, value_size=16, num_tokens=1, num_items=2, **options):
    query, key, value = step(dtype, num_tokens, 16, 40, num_items)
    query = torch.randn(num_items, num_heads, num_tokens, 16).to(dtype)
    key = key.contiguous() if lie else key
    value = torch.randn(2, 2, 40, value_size).to(dtype) if value_size != 16 else value
    added = masked(num_items, 40, dtype)
    masks = {
        "items": added,
        "one": added[:1],
        "bool": added > -1e9,
        "heads": added.repeat(1, num_heads, 1, 1),
        "number": torch.full((2, 1, 1, 1), -1.5, dtype=dtype),
        None: None,
    }
    return (query, key, value), {"attn_mask": masks[mask], **options}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_compiler", [True, False])
def test_it_is_torchs_attention_however_it_is_called(call, dtype, has_compiler, monkeypatch):
    torch.manual_seed(0)
    if not has_compiler:
        monkeypatch.setattr(module, "kernels", dict)
    settings = {"dtype": dtype, **CALLS[call]}
    tensors, options = arguments_of(**settings)
    expected = functional.scaled_dot_product_attention(*tensors, **options)
    with torch.no_grad(), FastSteps():
        found = functional.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(found, expected, atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


@needs_kernels
@pytest.mark.parametrize("wrong", ["mask", "query"])
def test_what_is_too_short_or_long_is_refused_as_by_torch_and_nothing_else_is_read(wrong):
    query, key, value = step(torch.float32, num_queries=1)
    mask = torch.zeros(2, 1, 1, 30 if wrong == "mask" else 40)
    query = torch.randn(2, 2, 1, 24) if wrong == "query" else query
    for attend in (functional.scaled_dot_product_attention, step_attention):
        with pytest.raises(RuntimeError):
            attend(query, key, value, mask)


@needs_kernels
@pytest.mark.parametrize("num_heads", [6, 142])
def test_a_token_of_heads_that_share_keys_is_left_to_the_kernel_and_a_gradient_is_not(num_heads, monkeypatch):
    asked = []

    def noted(*arguments, **options):
        asked.append(arguments[0].shape)
        return functional.scaled_dot_product_attention(*arguments, **options)

    monkeypatch.setattr(module, "attention", noted)
    (query, key, value), options = arguments_of(torch.float32, num_heads=num_heads, enable_gqa=True)
    step_attention(query, key, value, **options)
    assert not asked
    step_attention(query.requires_grad_(), key, value, **options).sum().backward()
    assert asked == [query.shape]
    assert query.grad is not None


@needs_kernels
def test_the_kernel_is_an_operation_that_torch_can_compile_with():
    query, key, value = step(torch.float32)
    mask = masked(2, 40, torch.float32)
    torch.library.opcheck(torch.ops.hf_pardraft.step_attention.default, (query, key, value, mask, 0.25))
