"""Packed weights give the same products, are packed once, and are never older than the weights."""

import gc

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from compiled_cases import static
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.compiled.decoder import packs_weights
from hf_pardraft.generation.packing import packed_weights
from hf_pardraft.generation.packing.inductor_pass import PackLinearLayers
from hf_pardraft.generation.packing.packed_layouts import layouts_for
from hf_pardraft.generation.packing.packed_weights import can_pack, forget, forget_changed, linear
from hf_pardraft.generation.packing.packing_trials import trial_of
from hf_pardraft.generation.settings import DraftSettings
from tiny_models import random_prompt, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("packed_without_trials")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def packs(monkeypatch):
    """What was packed, in order."""
    original, made = packed_weights._pack, []

    def noted(parameter, transposed):
        made.append(parameter.shape)
        return original(parameter, transposed)

    monkeypatch.setattr(packed_weights, "_pack", noted)
    return made


@pytest.fixture(params=layouts_for(torch.float32), ids=lambda layout: layout.name)
def layout(request, monkeypatch):
    """The layout in which weights are packed, as if it were the faster one."""
    monkeypatch.setattr(packed_weights, "faster_layout", lambda matrix: request.param)
    return request.param


def weight_of(rows=320, columns=256, dtype=torch.float32):
    torch.manual_seed(rows)
    return torch.nn.Parameter((torch.randn(rows, columns) / 16).to(dtype))


@torch.no_grad()
def product(weight, tokens=8, bias=None, transposed=False):
    """The packed product, compared with the one of torch."""
    torch.manual_seed(1)
    matrix = weight.t() if transposed else weight
    inputs = torch.randn(tokens, matrix.shape[1]).to(weight.dtype)
    result = linear(inputs, weight, bias, transposed)
    expected = torch.nn.functional.linear(inputs.double(), matrix.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if weight.dtype == torch.float32 else 0.05
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_torch_for_any_number_of_tokens(packs, dtype, transposed):
    if not can_pack(weight_of(dtype=dtype)):
        pytest.skip(f"this machine does not pack {dtype}")
    weight = weight_of(dtype=dtype)
    bias = torch.randn(256 if transposed else 320).to(dtype)
    for tokens in (1, 2, 8, 17, 130):
        product(weight, tokens, transposed=transposed)
        product(weight, tokens, bias, transposed)
    assert packs == [weight.shape]


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_packed_in_the_faster_layout(layout, transposed):
    weight = weight_of()
    for tokens in (1, 8, 65):
        product(weight, tokens, torch.randn(256 if transposed else 320), transposed)
    assert packed_weights._packed[id(weight), transposed].layout is layout


def added_in_place(weight):
    weight.add_(1)


def filled_behind_its_back(weight):
    weight.data.mul_(-2)


def other_data(weight):
    weight.data = weight.data.flip(0)


def columns_swapped(weight):
    weight.data.copy_(weight.data.flip(1))


def one_element(weight):
    weight.data[7, 9] = 3


CHANGES = [added_in_place, filled_behind_its_back, other_data, columns_swapped, one_element]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_changed_weight_is_packed_again_and_an_unchanged_one_is_not(packs, layout, change):
    changed, unchanged = weight_of(), weight_of(rows=512)
    before = product(changed), product(unchanged)
    forget_changed([changed, unchanged])
    assert torch.equal(product(changed), before[0])
    change(changed)
    forget_changed([changed, unchanged])
    assert not torch.equal(product(changed), before[0])
    assert torch.equal(product(unchanged), before[1])
    assert packs == [changed.shape, unchanged.shape, changed.shape]


@torch.no_grad()
def test_a_change_that_torch_counts_is_seen_at_once(packs):
    weight = weight_of()
    product(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    product(weight)
    weight.data = weight.data.view(256, 320)
    product(weight)
    assert len(packs) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_weight_may_begin_anywhere_in_memory_that_it_shares(packs, dtype):
    if not can_pack(weight_of(dtype=dtype)):
        pytest.skip(f"this machine does not pack {dtype}")
    shared, weight = torch.empty(320 * 256 + 1, dtype=dtype), weight_of(dtype=dtype)
    shared[1:] = weight.flatten()
    weight.data = shared[1:].view(320, 256)
    product(weight)
    forget_changed([weight])
    product(weight)
    assert len(packs) == 1
    shared[-1] += 1
    forget_changed([weight])
    product(weight)
    assert len(packs) == 2


@torch.no_grad()
def test_of_calls_that_find_a_change_at_once_each_goes_on(monkeypatch):
    weight, fingerprint = weight_of(), packed_weights._fingerprint
    product(weight)
    weight.data.mul_(2)

    def while_another_call_packs_it_anew(parameter):
        monkeypatch.setattr(packed_weights, "_fingerprint", fingerprint)
        forget_changed([parameter])
        product(parameter)
        return fingerprint(parameter)

    monkeypatch.setattr(packed_weights, "_fingerprint", while_another_call_packs_it_anew)
    forget_changed([weight])
    # What the other call has packed is of the weight as it is.
    assert packed_weights.is_packed(weight, False)
    product(weight)


def test_any_small_change_alters_the_fingerprint():
    weight = weight_of(rows=4, columns=64).detach()
    before = packed_weights._fingerprint(weight)
    for row in range(4):
        for column in range(64):
            changed = weight.clone()
            # The last bit of one number.
            changed.view(torch.int32)[row, column] ^= 1
            differs = packed_weights._fingerprint(changed) != before
            assert differs.tolist() == [index == row for index in range(4)]


CHANGES = {
    "all signs": lambda weight: weight.neg_(),
    "signs of odd columns": lambda weight: weight[:, 1::2].neg_(),
    "signs of two columns": lambda weight: weight[:, 1:5:2].neg_(),
    "signs of every fourth column": lambda weight: weight[:, 3::4].neg_(),
    "exponents": lambda weight: weight.mul_(2),
    "exponents of two columns": lambda weight: weight[:, 4:8].mul_(0.25),
    "two columns exchanged": lambda weight: weight.copy_(weight[:, [1, 0, *range(2, 64)]]),
    "columns moved": lambda weight: weight.copy_(weight.roll(8, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_many_numbers_in_the_same_way_alter_the_fingerprint(change, dtype):
    weight = weight_of(rows=32, columns=64, dtype=dtype).detach()
    before = packed_weights._fingerprint(weight)
    change(weight)
    assert (packed_weights._fingerprint(weight) != before).all()


def test_packed_copies_go_with_their_parameters_or_when_told():
    packed_weights._packed.clear()
    gone = weight_of()
    product(gone)
    assert packed_weights.has_copies()
    del gone
    gc.collect()
    assert not packed_weights.has_copies()
    kept, told = weight_of(), weight_of(rows=512)
    product(kept)
    product(told)
    forget([told])
    assert [packed_weights.is_packed(weight, False) for weight in (kept, told)] == [True, False]


def test_what_can_not_be_packed(monkeypatch):
    assert can_pack(weight_of())
    assert not can_pack(weight_of(dtype=torch.float64))
    assert not can_pack(weight_of(rows=16))
    # Its rows are no whole number of words.
    assert not can_pack(weight_of(columns=257))
    assert not can_pack(weight_of().to("meta"))
    assert not can_pack(weight_of().reshape(-1))
    monkeypatch.setattr(packed_weights, "layouts_for", lambda dtype: ())
    assert not can_pack(weight_of())


def test_what_is_no_parameter_is_multiplied_as_ever(packs):
    product(weight_of().detach())
    product(weight_of().detach(), transposed=True)
    assert not packs


def test_where_there_is_no_layout_a_graph_that_was_kept_multiplies_as_ever(packs, monkeypatch):
    monkeypatch.setattr(packed_weights, "layouts_for", lambda dtype: ())
    product(weight_of())
    assert not packs


@torch.no_grad()
def test_inference_tensors_are_packed_and_compared_by_their_bits(packs, layout):
    with torch.inference_mode():
        weight = weight_of()
        product(weight)
        weight.mul_(2)
        forget_changed([weight])
        product(weight)
    assert len(packs) == 2


@torch.no_grad()
def test_graphs_multiply_by_packed_weights_where_they_can(packs):
    weights = {"linear": weight_of(), "convolution": weight_of(256, 384), "small": weight_of(8, 256)}

    def layers(tokens, linear_weight, convolution_weight, small_weight, bias):
        product = torch.ops.aten.mm(tokens, torch.ops.aten.permute(linear_weight, [1, 0]))
        biased = torch.ops.aten.addmm(bias, tokens, convolution_weight)
        small = torch.ops.aten.mm(tokens, torch.ops.aten.permute(small_weight, [1, 0]))
        computed = torch.ops.aten.mm(tokens, torch.ops.aten.permute(linear_weight * 2, [1, 0]))
        scaled = torch.ops.aten.addmm(bias, tokens, convolution_weight, alpha=2)
        return product, biased, small, computed, scaled

    arguments = (torch.randn(5, 256), *weights.values(), torch.randn(384))
    expected = layers(*arguments)
    graph = make_fx(layers, tracing_mode="fake")(*arguments)
    PackLinearLayers()(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(*arguments), expected, atol=1e-5, rtol=1e-5)
    assert [node.target for node in graph.graph.nodes].count(linear) == 2
    assert packs == [weights["linear"].shape, weights["convolution"].shape]


def test_a_call_that_packs_nothing_gives_the_memory_back():
    target = tiny_target("llama", num_hidden_layers=1)
    drafter, config = tiny_drafter("pard", target), CompileConfig(backend="eager")
    weights = [model.get_output_embeddings().weight for model in (target, drafter)]

    def how_many_are_packed():
        return sum(packed_weights.is_packed(weight, False) for weight in weights)

    for weight in weights:
        product(weight)
    static(target, random_prompt(5), drafter, config)
    assert how_many_are_packed() == 2
    with torch.no_grad():
        weights[0].mul_(2)
    static(target, random_prompt(5), drafter, config)
    assert how_many_are_packed() == 1
    # What was found to make nothing faster is given back, too.
    trial_of(weights[1], False, 8).packs = False
    static(target, random_prompt(5), drafter, config)
    assert how_many_are_packed() == 0
    trial_of(weights[1], False, 8).packs = True
    product(weights[1])
    assert how_many_are_packed() == 1
    drafter.generation_config.pack_weights = False
    static(target, random_prompt(5), drafter, config)
    assert how_many_are_packed() == 0


@pytest.mark.parametrize("own_pass", [None, print])
def test_inductor_gets_a_pass_where_weights_are_packed_and_there_is_no_other(own_pass):
    target = tiny_target("llama", num_hidden_layers=1)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=own_pass):
        names = [set(Compiler(target, None, packs).inductor) for packs in (True, False)]
    assert ("post_grad_custom_pre_pass" in names[0]) == (own_pass is None)
    assert "post_grad_custom_pre_pass" not in names[1]


@pytest.mark.parametrize(
    ("device", "wanted", "packs"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_weights_are_packed_on_a_cpu_if_nobody_objects(device, wanted, packs):
    assert packs_weights(torch.device(device), DraftSettings(depth=3, pack_weights=wanted)) == packs
