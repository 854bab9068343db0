"""Attention of few tokens is the softmax it should be, as compiled for any processor, or torch's where nothing is."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hf_pardraft.datagen.fast_steps import FastSteps
from hf_pardraft.generation.packing import token_attention as module
from hf_pardraft.generation.packing.token_attention import attend, kernels, takes, token_attention
from processors import PROCESSORS, compile_for
from threads import torch_threads

DTYPES = [torch.float32, torch.bfloat16]
# So near to the exact result: the mean of a few numbers, rounded to their dtype.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 8e-3}

needs_kernels = pytest.mark.skipif(not kernels(), reason="there is no compiler here")


@pytest.fixture(autouse=True)
def never_too_little_for_it(monkeypatch):
    monkeypatch.setattr(module, "FEWEST_PRODUCTS", 0)


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """The kernels as they are compiled for some processor."""
    compile_for(request.param, monkeypatch)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


def step(dtype, groups=3, size=16, columns=40, items=2, heads=2, tokens=1, room=7, side_by_side=True):
    """Queries, keys, whose numbers stand side by side or lie as values do, and values, all of them parts of larger buffers."""
    query = 2 * torch.randn(items, tokens + 1, heads * groups, size)[:, 1:].transpose(1, 2)
    key = torch.randn(items, heads, size, room + columns).to(dtype).transpose(2, 3)
    key = (key if side_by_side else key.contiguous())[:, :, room:]
    value = torch.randn(items, heads, room + columns, size)[:, :, room:]
    return query.to(dtype), key, value.to(dtype)


def masked(items, columns, dtype, lowest=None, tokens=1):
    """Padding of different lengths, a gap, what is not written, later tokens, and columns that count for less."""
    lowest = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(items, 1, tokens, columns, dtype=dtype)
    for item in range(items):
        mask[item, ..., : item * columns // (items + 1)] = lowest
        mask[item, ..., columns // 2 : columns // 2 + item] = lowest
        for token in range(tokens):
            mask[item, :, token, columns - 2 * tokens + token :] = lowest
        mask[item, ..., columns * 3 // 4] = 0.0
    mask[..., columns // 3] -= 1.5
    return mask.clamp(min=lowest)


def exact(query, key, value, mask, scale):
    """The definition, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = torch.einsum("ihqd,ihcd->ihqc", query.double(), key) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores + mask.double()
    return torch.einsum("ihqc,ihcd->iqhd", torch.softmax(scores, dim=-1), value)


def assert_close(found, expected, dtype):
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_every_number_of_columns_heads_and_sizes_has_the_softmax(side_by_side, dtype, num_threads):
    torch.manual_seed(0)
    with torch_threads(num_threads):
        for columns in (1, 3, 15, 16, 17, 33, 63, 64, 65, 80, 129, 200):
            for size in (16, 64, 80, 128):
                for groups in (1, 2, 3, 4, 5, 8):
                    query, key, value = step(dtype, groups, size, columns, side_by_side=side_by_side)
                    for mask in (None, masked(2, columns, dtype), masked(1, columns, dtype, float("-inf"))):
                        found = attend(query, key, value, mask, size**-0.5)
                        assert_close(found, exact(query, key, value, mask, size**-0.5), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_every_number_of_tokens_has_the_softmax_of_what_each_sees(side_by_side, dtype, num_threads):
    torch.manual_seed(0)
    with torch_threads(num_threads):
        for tokens in (2, 3, 5, 8, 11, 17, 33, 64):
            for groups, heads in ((1, 1), (3, 2), (2, 5)):
                columns = 2 * tokens + 37
                query, key, value = step(dtype, groups, 32, columns, 2, heads, tokens, side_by_side=side_by_side)
                mask = masked(2, columns, dtype, tokens=tokens)
                of_heads = mask.repeat(1, groups * heads, 1, 1)
                of_heads[:, 0, :, columns // 4] = -0.5
                for one in (mask, mask > -1e9, of_heads, mask[:1], mask[:, :, -1:]):
                    assert_close(attend(query, key, value, one, 0.2), exact(query, key, value, one, 0.2), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side_by_side", [True, False])
def test_it_is_right_as_compiled_for_other_processors(processor, side_by_side, dtype):
    torch.manual_seed(0)
    for columns, size, tokens in ((5, 16, 1), (70, 32, 3), (131, 80, 9)):
        query, key, value = step(dtype, 5, size, columns, tokens=tokens, side_by_side=side_by_side)
        mask = masked(2, columns, dtype, tokens=tokens if columns > 5 else 1)
        for one in (mask, mask > -1e9):
            assert_close(attend(query, key, value, one, 0.3), exact(query, key, value, one, 0.3), dtype)


@needs_kernels
def test_the_mean_of_a_long_text_is_rounded_hardly_more_than_that_of_a_short_one():
    torch.manual_seed(0)
    for size in (64, 80):
        query, key, value = step(torch.float32, size=size, columns=8192, items=1)
        found, expected = (each(query / 10, key, value + 1, None, size**-0.5) for each in (attend, exact))
        assert (found.double() - expected).abs().mean() < 3e-7


@needs_kernels
@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_scores_of_any_spread_are_weighed_rightly(spread):
    torch.manual_seed(0)
    query, key, value = step(torch.float32, columns=300)
    found, expected = (each(query, key, value, None, spread) for each in (attend, exact))
    # The scores themselves are rounded.
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * spread, rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side_by_side", [True, False])
def test_what_no_token_sees_is_not_read_and_what_is_no_number_stays_with_its_own_head(side_by_side, dtype):
    query, key, value = step(dtype, columns=40, tokens=2, side_by_side=side_by_side)
    mask = masked(2, 40, dtype, tokens=2)
    usual = attend(query, key, value, mask, 0.25)
    # Item 1 begins with 13 columns of padding, and both tokens see nothing of the last three.
    key[1, :, :13], value[1, :, :13] = float("nan"), float("inf")
    key[..., -3:, :], value[..., -3:, :] = float("inf"), float("nan")
    assert torch.equal(attend(query, key, value, mask, 0.25), usual)
    key[0, 1, 10] = float("nan")
    found = attend(query, key, value, mask, 0.25)
    assert found[0, :, 3:].isnan().all()
    assert torch.equal(found[0, :, :3], usual[0, :, :3])
    assert torch.equal(found[1], usual[1])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_that_sees_nothing_has_what_torch_gives_it(dtype):
    query, key, value = step(dtype, columns=40)
    lowest, nothing = torch.finfo(dtype).min, torch.zeros(2, 1, 1, 40, dtype=torch.bool)
    for mask in (
        torch.full_like(nothing, lowest, dtype=dtype),
        torch.full_like(nothing, -torch.inf, dtype=dtype),
        nothing,
    ):
        expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        assert_close(attend(query, key, value, mask, 0.25), expected.transpose(1, 2).double(), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_sees_nothing_beside_one_that_sees_something_has_zeros_as_in_torch(dtype):
    query, key, value = step(dtype, columns=40, tokens=2)
    seen = masked(2, 40, dtype, tokens=2) > -1e9
    seen[:, :, 0] = False
    added = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
    for mask in (seen, added):
        found = attend(query, key, value, mask, 0.25)
        expected = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True, scale=0.25
        )
        assert not found[:, 0].any()
        assert_close(found, expected.transpose(1, 2).double(), dtype)


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
    "a head that doesn't fill vectors": {"size": 24},
    "tokens that lie in turns": {"lie": "turns"},
    "a causal one": {"mask": None, "num_tokens": 40, "is_causal": True},
}


def arguments_of(
    dtype, num_heads=2, mask="items", lie=None, value_size=None, num_tokens=1, num_items=2, size=16, **options
):
    query, key, value = step(dtype, num_heads // 2, size, 40, num_items, tokens=num_tokens, side_by_side=lie is None)
    if lie == "turns":
        query, value = (tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in (query, value))
    value = torch.randn(2, 2, 40, value_size).to(dtype) if value_size else value
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
@pytest.mark.parametrize("wrong", ["mask", "query", "heads"])
def test_what_is_too_short_or_long_is_refused_as_by_torch_and_nothing_else_is_read(wrong):
    query, key, value = step(torch.float32, groups=1)
    mask = torch.zeros(2, 1, 1, 30 if wrong == "mask" else 40)
    query = torch.randn(2, 2, 1, 24) if wrong == "query" else query
    # Nobody says that they share keys.
    query = torch.randn(2, 6, 1, 16) if wrong == "heads" else query
    for each in (functional.scaled_dot_product_attention, token_attention):
        with torch.no_grad(), pytest.raises(RuntimeError):
            each(query, key, value, mask)


@needs_kernels
@pytest.mark.parametrize("which", range(4))
def test_tensors_without_numbers_of_their_own_are_left_to_torch(which):
    tensors = [*step(torch.float32, tokens=2), masked(2, 40, torch.float32, tokens=2)]
    assert takes(*tensors)
    with FakeTensorMode() as mode:
        assert not takes(*tensors[:which], mode.from_tensor(tensors[which]), *tensors[which + 1 :])


@needs_kernels
def test_few_tokens_after_a_text_are_left_to_the_kernel_and_a_prompt_and_a_gradient_are_not(monkeypatch):
    asked = []

    def noted(*arguments, **options):
        asked.append(arguments[0].shape)
        return functional.scaled_dot_product_attention(*arguments, **options)

    monkeypatch.setattr(module, "attention", noted)
    for num_tokens in (1, 39, 40):
        (query, key, value), options = arguments_of(torch.float32, 6, num_tokens=num_tokens, enable_gqa=True)
        options["attn_mask"] = options["attn_mask"].expand(2, 1, num_tokens, 40)
        with torch.no_grad():
            token_attention(query, key, value, **options)
    assert asked == [query.shape]
    (query, key, value), options = arguments_of(torch.float32, 6, enable_gqa=True)
    token_attention(query.requires_grad_(), key, value, **options).sum().backward()
    assert asked[1:] == [query.shape]
    assert query.grad is not None


@needs_kernels
def test_what_takes_longer_to_call_than_to_compute_is_torchs(monkeypatch):
    query, key, value = step(torch.float32, tokens=2)
    assert takes(query, key, value, None)
    monkeypatch.setattr(module, "FEWEST_PRODUCTS", query.numel() * 40 + 1)
    assert not takes(query, key, value, None)
    monkeypatch.setattr(module, "_by_kernel", lambda *arguments: pytest.fail("it was called"))
    for mask in (None, masked(2, 40, torch.float32, tokens=2)):
        # A graph that was made for more.
        found = torch.ops.hf_pardraft.token_attention(query, key, value, mask, 0.3)
        assert_close(found, exact(query, key, value, mask, 0.3), torch.float32)


@needs_kernels
def test_the_kernel_is_an_operation_that_torch_can_compile_with():
    query, key, value = step(torch.float32, tokens=2)
    mask = masked(2, 40, torch.float32, tokens=2)
    assert takes(query, key, value, mask)
    torch.library.opcheck(torch.ops.hf_pardraft.token_attention.default, (query, key, value, mask, 0.25))
