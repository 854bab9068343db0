"""RMS norms that calls compute in one operation: to the last bit what transformers computes, and only while a call runs."""

import functools
import weakref
from collections import Counter

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from compiled_cases import oracle
from hf_pardraft.generation.packing import fused_norms as norms_module
from hf_pardraft.generation.packing.fused_norms import FusedNorm, fusable_norms, fused_norms
from hf_pardraft.generation.scheduling.schedule import Schedule
from threads import in_threads
from tiny_models import batch_of, tiny_drafter, tiny_target

SIZES = (8, 33, 576)


@pytest.fixture(params=["kernel", "torch"])
def fused(request, monkeypatch):
    """The shapes that went through one operation, of ours or, where that can't be compiled, of torch."""
    if request.param == "torch":
        monkeypatch.setattr(norms_module, "kernels", dict)
    shapes = []

    def counted(way, states, *args):
        shapes.append(tuple(states.shape))
        num_norms = len(shapes)
        normed = way(states, *args)
        # What ours leaves to torch's is no norm more.
        del shapes[num_norms:]
        return normed

    for name in ("kernel_norm", "torch_norm"):
        monkeypatch.setattr(norms_module, name, functools.partial(counted, getattr(norms_module, name)))
    monkeypatch.setattr(norms_module, "_tried", weakref.WeakKeyDictionary())
    return shapes


def norm_of(kind, size, dtype=torch.float32):
    norm = kind(size).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_is_the_same_to_the_last_bit(size, dtype, fused):
    norm = norm_of(LlamaRMSNorm, size, dtype)
    batches = [
        torch.randn(shape, dtype=dtype) for shape in ((1, 1, size), (3, 17, size), (2, 0, size), (1, 40, 6, size))
    ]
    batches += [1e-4 * batches[1], torch.zeros(1, 2, size, dtype=dtype), batches[3].transpose(1, 2)]
    with torch.no_grad():
        expected = [norm(states) for states in batches]
        with fused_norms(norm):
            fused.clear()
            found = [norm(states) for states in batches]
    # Transformers rounds norms of float64 to float32 within: such are left alone.
    assert len(fused) == (0 if dtype == torch.float64 else len(batches))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_sums_in_torchs_order(dtype):
    if not norms_module.kernels():
        pytest.skip("our C++ can't be compiled here")
    for size in (*range(8, 70), 96, 127, 128, 500, 512, 576, 1000, 1024, 1100, 2560, 4096, 5120, 16384):
        states, weight = (
            (torch.randn(3, size) * torch.tensor([[1e-3], [1.0], [30.0]])).to(dtype),
            torch.randn(size).to(dtype),
        )
        expected = norms_module.torch_norm(states, weight, 1e-6)
        assert torch.equal(norms_module.kernel_norm(states, weight, 1e-6), expected), size
    states[0, 3], states[1, 5] = torch.inf, torch.nan
    found, expected = (way(states, weight, 1e-6) for way in (norms_module.kernel_norm, norms_module.torch_norm))
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def test_a_kernel_that_sums_in_another_order_is_not_used(fused, monkeypatch):
    """As on processors whose vectors are of other lengths."""
    norm = norm_of(LlamaRMSNorm, 576)

    def reversed_sums(states, weight, epsilon):
        return norms_module.torch_norm(states.flip(-1), weight.flip(-1), epsilon).flip(-1)

    monkeypatch.setattr(norms_module, "kernel_norm", reversed_sums)
    assert norms_module.way_of(norm) is norms_module.torch_norm


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_oss", "phi3"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_texts_and_scores_are_plain_generates(kind, options, fused):
    target, batch = tiny_target(kind), batch_of(6)
    drafter = oracle("dflash", target, batch, rates=[0.7] * 4, settings={"draft_schedule": "fixed"})
    wanted = {"max_new_tokens": 20, "output_scores": True, "return_dict_in_generate": True, **options}
    torch.manual_seed(3)
    expected = target.generate(**batch, **wanted)
    fused.clear()
    torch.manual_seed(3)
    found = target.generate(**batch, **wanted, assistant_model=drafter)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    # Gemma multiplies by one more than its weight. The drafter's norms are fused with any target.
    assert bool(fusable_norms(target)) == (kind != "gemma3")
    assert fused
    assert not any("forward" in vars(module) for module in target.modules())


def test_a_round_has_fewer_operations(fused):
    target, batch = tiny_target("qwen3"), batch_of(6)
    norms = fusable_norms(target)
    # Before attention, for queries and for keys, before the feed-forward layer; and at the end.
    assert len(norms) == 4 * target.config.num_hidden_layers + 1
    counts = []
    for ways in ((), (target,)):
        with torch.no_grad(), fused_norms(*ways), torch.profiler.profile() as profiler:
            target(**batch)
        counts.append(Counter({each.key: each.count for each in profiler.key_averages()}))
    plain, ours = counts
    assert (plain["aten::rms_norm"], plain["aten::pow"]) == (0, len(norms))
    # Torch's operation calls others. Heads of 4 numbers are left to it.
    by_torch = [norm for norm in norms if norms_module.way_of(norm) is not norms_module.kernel_norm]
    assert ours["aten::rms_norm"] == ours["aten::pow"] == len(by_torch)


def test_what_a_call_leaves_to_plain_generate_is_computed_so_too(fused, monkeypatch):
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter, expected = tiny_drafter("dflash", target), target.generate(**batch, max_new_tokens=4, do_sample=False)
    drafter.generation_config.draft_schedule = "auto"
    fused.clear()
    text = target.generate(**batch, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert torch.equal(text, expected)
    num_norms = len(fusable_norms(target))
    # Of whole forwards: norms are tried by rows.
    assert [shape[1] for shape in fused if len(shape) == 3] == [6] * num_norms + [1] * 3 * num_norms


def test_compiled_calls_change_no_norm(fused, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = oracle("dflash", target, batch, rates=[0.7] * 4)
    fused.clear()
    target.generate(**batch, do_sample=False, max_new_tokens=8, assistant_model=drafter, cache_implementation="static")
    assert not fused


def test_training_and_autocast_go_the_usual_way(fused):
    norm, states = norm_of(LlamaRMSNorm, 8), torch.randn(2, 8)
    with fused_norms(norm):
        fused.clear()
        norm(states).sum().backward()
        assert norm.weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            norm(states)
        with torch.no_grad():
            norm(states.bfloat16())
            norm(hidden_states=states)
        assert not fused
        # Another thread's forward, too.
        with torch.no_grad():
            in_threads(1, lambda: norm(states))
        assert not fused
    assert "forward" not in vars(norm)


def test_a_call_that_is_interrupted_while_it_replaces_norms_leaves_them_as_they_were(monkeypatch):
    made = []

    class Interrupted(FusedNorm):
        def __init__(self, layer):
            super().__init__(layer)
            made.append(layer)
            if len(made) > 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(norms_module, "FusedNorm", Interrupted)
    target, batch = tiny_target("llama"), batch_of(6)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**batch, max_new_tokens=8, assistant_model=tiny_drafter("dflash", target))
    assert not any("forward" in vars(module) for module in target.modules())


def of_groups(size):
    return Zamba2RMSNormGated(size, group_size=size // 2)


@pytest.mark.parametrize("norm", [norm_of(GemmaRMSNorm, 8), norm_of(of_groups, 8), torch.nn.LayerNorm(8)])
def test_norms_that_compute_something_else_are_left_alone(norm):
    assert fusable_norms(norm) == []


class OwnRMSNorm(LlamaRMSNorm):
    """A caller's."""


def test_norms_of_others_and_changed_ones_are_left_alone():
    own = OwnRMSNorm(8)
    assert fusable_norms(own) == []
    replaced, frozen = LlamaRMSNorm(8), LlamaRMSNorm(8)
    replaced.forward = lambda states: states
    assert fusable_norms(replaced) == []
    torch.nn.utils.parametrize.register_parametrization(frozen, "weight", torch.nn.Identity())
    assert fusable_norms(frozen) == []
    assert fusable_norms(LlamaRMSNorm(8).to("meta")) == []


def test_an_epsilon_that_is_changed_later_counts():
    norm, states = norm_of(LlamaRMSNorm, 8), 1e-3 * torch.randn(2, 8)
    for epsilon in (1e-6, 1e-2):
        norm.variance_epsilon = epsilon
        with torch.no_grad():
            expected = norm(states)
            with fused_norms(norm):
                assert isinstance(vars(norm)["forward"], FusedNorm)
                assert torch.equal(norm(states), expected)


def test_nobodys_random_numbers_are_used():
    norm, state = LlamaRMSNorm(8), torch.get_rng_state()
    assert fusable_norms(norm) == [norm]
    assert torch.equal(torch.get_rng_state(), state)
