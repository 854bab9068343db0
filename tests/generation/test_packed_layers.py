"""Uncompiled calls multiply by packed weights on a CPU, and nobody finds a model changed by it."""

import gc
import threading

import pytest
import torch
from torch.nn.utils import prune
from transformers import (
    CompileConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
)

from compiled_cases import ONE_LAYER, leave_uncompiled, static
from hf_pardraft.generation.packing import packed_layers as module
from hf_pardraft.generation.packing import packed_weights
from hf_pardraft.generation.packing.packed_layers import (
    PackedForward,
    PackedProducts,
    packable_layers,
    packed_layers,
)
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.pairing.gathered_rows import has_plain_rows
from threads import in_threads
from tiny_models import ragged_prompts, random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart")


@pytest.fixture(autouse=True)
def small_weights_are_packed(monkeypatch, packed_without_trials):
    monkeypatch.setattr(packed_weights, "FEWEST_ELEMENTS", 64)
    packed_weights._packed.clear()


def weights_given_to(name, monkeypatch):
    """The weights that a product of this name is given."""
    weights, product = [], getattr(module, name)

    def noted(tokens, weight, bias, transposed):
        weights.append(weight)
        return product(tokens, weight, bias, transposed)

    monkeypatch.setattr(module, name, noted)
    return weights


@pytest.fixture
def products(monkeypatch):
    """The weights that were multiplied by, packed."""
    return weights_given_to("packed_product", monkeypatch)


def write(target, drafter=None, ids=None, **options):
    config = GenerationConfig(**{"max_new_tokens": 12, "do_sample": False, "draft_schedule": "fixed", **options})
    ids = random_prompt(6) if ids is None else ids
    return target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_config=config)


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("options", [{}, {"tree_budget": 8}, {"do_sample": True}], ids=["chain", "tree", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_target_and_drafter_multiply_by_packed_weights_and_the_text_is_plains(products, kind, options):
    target = tiny_target("llama")
    drafter = tiny_drafter(kind, target)
    torch.manual_seed(3)
    expected = write(target, **{name: value for name, value in options.items() if name == "do_sample"})
    assert not products
    torch.manual_seed(3)
    assert torch.equal(write(target, drafter, **options), expected)
    packed = {id(weight) for weight in products}
    for model in (target, drafter):
        assert packed & {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Linear)}


def test_layers_that_hold_their_weights_the_other_way_round_are_packed_too(products):
    target = tiny_gpt2()
    drafter = tiny_drafter("pard", target)
    assert torch.equal(write(target, drafter), write(target))
    assert any(weight is target.transformer.h[0].mlp.c_fc.weight for weight in products)


def test_a_call_that_is_left_to_plain_generate_multiplies_so_as_well(products, monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    text = write(target, drafter, draft_schedule="auto")
    assert products
    assert not any("forward" in vars(layer) for layer in target.modules())
    assert torch.equal(text, write(target))


class Raising(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("no")


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_the_models_are_as_they_were(fails):
    target = tiny_target("llama")
    drafter = tiny_drafter("dart", target)
    layers = [layer for model in (target, drafter) for layer in packable_layers(model)]
    before = [vars(layer).copy() for layer in layers]
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            target.generate(
                random_prompt(4),
                assistant_model=drafter,
                max_new_tokens=4,
                logits_processor=LogitsProcessorList([Raising()]),
            )
    else:
        write(target, drafter)
    assert layers
    assert [vars(layer) for layer in layers] == before
    target(random_prompt(4), labels=random_prompt(4)).loss.backward()
    assert all(parameter.grad is not None for parameter in target.parameters())


class Looking(LogitsProcessor):
    """Does something with the target in the middle of a call."""

    def __init__(self, look):
        self.look = look

    def __call__(self, input_ids, scores):
        self.look()
        return scores


def test_meanwhile_the_target_can_be_trained_and_read_by_other_threads(products):
    target = tiny_target("llama")
    drafter, ids = tiny_drafter("pard", target), random_prompt(4)
    gradients, by_others = [], []

    def look():
        with torch.inference_mode(False), torch.enable_grad():
            target(ids, labels=ids).loss.backward()
        gradients.append(target.lm_head.weight.grad is not None)
        number = len(products)
        thread = threading.Thread(target=torch.no_grad()(lambda: target(ids)))
        thread.start()
        thread.join()
        by_others.append(len(products) - number)

    processors = LogitsProcessorList([Looking(look)])
    target.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=False, logits_processor=processors)
    assert all(gradients)
    assert gradients
    assert products
    assert not any(by_others)


def test_autocast_has_products_of_its_own(products):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    with torch.autocast("cpu", torch.bfloat16):
        write(target, drafter)
    assert not products


@pytest.fixture
def products_of_forwards(monkeypatch):
    """The weights that forwards multiplied by, packed, while none of their layers was changed."""
    return weights_given_to("multiply", monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_what_reads_the_prompt_of_compiled_rounds_multiplies_by_packed_weights(products_of_forwards, kind, monkeypatch):
    leave_uncompiled(monkeypatch)
    target, ids, changed = tiny_target("llama"), random_prompt(6), []
    drafter, expected = tiny_drafter(kind, target), write(target, ids=ids)
    layers = [layer for model in (target, drafter) for layer in packable_layers(model)]
    look = Looking(lambda: changed.extend(layer for layer in layers if "forward" in vars(layer)))
    options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": LogitsProcessorList([look])}
    assert torch.equal(static(target, ids, drafter, CompileConfig(), **options), expected)
    packed = {id(weight) for weight in products_of_forwards}
    assert packed >= {id(layer.weight) for layer in packable_layers(target)}
    assert packed & {id(layer.weight) for layer in packable_layers(drafter)}
    assert not changed


@pytest.mark.parametrize("make", [lambda: tiny_target("llama"), tiny_gpt2], ids=["linear", "convolution"])
def test_a_forward_multiplies_by_packed_weights_where_it_may(products_of_forwards, make):
    target, ids = make(), random_prompt(6)
    with torch.no_grad():
        expected = target(ids).logits
        with PackedProducts(target):
            torch.testing.assert_close(target(ids).logits, expected, atol=1e-5, rtol=1e-5)
            packed = len(products_of_forwards)
            assert packed == len(packable_layers(target))
            # Of another thread that says nothing, and autocast has products of its own.
            in_threads(1, torch.no_grad()(lambda: target(ids)))
            with torch.autocast("cpu", torch.bfloat16):
                target(ids)
    with PackedProducts(target):
        target(ids, labels=ids).loss.backward()
    assert len(products_of_forwards) == packed
    assert all(layer.weight.grad is not None for layer in packable_layers(target))


@torch.no_grad()
def test_other_products_are_as_ever(products_of_forwards):
    layer, other = torch.nn.Linear(64, 48), torch.nn.Linear(64, 48)
    tokens, weight = torch.randn(3, 64), torch.nn.Parameter(torch.randn(64, 48))

    def others():
        doubled = torch.nn.functional.linear(input=tokens, weight=2 * layer.weight)
        return other(tokens), doubled, torch.addmm(torch.ones(48), tokens, weight, alpha=2)

    expected = others()
    with PackedProducts(torch.nn.Sequential(layer)):
        found = others()
        with pytest.raises(RuntimeError, match="dtype"):
            layer(tokens.double())
        assert not products_of_forwards
        layer(tokens)
    assert all(map(torch.equal, found, expected))
    assert len(products_of_forwards) == 1


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 0, 64), (0, 64), (2, 3, 5, 64)])
def test_inputs_of_any_shape(products, shape):
    layer = torch.nn.Linear(64, 48)
    holder = torch.nn.Sequential(layer)
    inputs = torch.randn(shape)
    with torch.no_grad():
        expected = layer(inputs)
        with packed_layers(holder, wanted=True):
            torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=1e-5)
    assert len(products) == 1


def test_calls_in_several_threads_put_the_layers_back_when_the_last_one_ends():
    target = tiny_target("llama")
    layers = packable_layers(target)
    outer, inner = packed_layers(target, wanted=True), packed_layers(target, wanted=True)
    with outer:
        with inner:
            assert all(type(vars(layer)["forward"]) is PackedForward for layer in layers)
        assert all(vars(layer)["forward"].num_calls == 1 for layer in layers)
    assert not any("forward" in vars(layer) for layer in layers)
    drafter, expected = tiny_drafter("dflash", target), write(target)
    texts = in_threads(4, lambda: write(target, drafter))
    assert len(texts) == 4
    assert all(torch.equal(text, expected) for text in texts)
    assert not any("forward" in vars(layer) for layer in layers)


def hooked_by_accelerate(layer):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(layer, AlignDevicesHook())


def replaced(layer):
    layer.forward = type(layer).forward.__get__(layer)


def compiled(layer):
    layer.compile(backend="eager")


def parametrised(layer):
    torch.nn.utils.parametrizations.weight_norm(layer)


def of_float64(layer):
    layer.double()


def quantised(layer):
    class Quantised(torch.Tensor):
        pass

    layer._parameters["weight"] = layer.weight.data.as_subclass(Quantised)


def pruned(layer):
    prune.l1_unstructured(layer, "bias", amount=0.5)


def with_a_buffer_for_a_bias(layer):
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


CHANGES = [
    hooked_by_accelerate,
    replaced,
    compiled,
    parametrised,
    of_float64,
    quantised,
    pruned,
    with_a_buffer_for_a_bias,
]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_somebody_has_changed_are_left_alone(change):
    target = tiny_target("llama", mlp_bias=True)
    layer = target.model.layers[0].mlp.up_proj
    assert layer in packable_layers(target)
    change(layer)
    assert layer not in packable_layers(target)


@pytest.mark.parametrize("change", [pruned, with_a_buffer_for_a_bias])
def test_a_target_whose_biases_are_no_parameters_writes_plains_text(products, change):
    target = tiny_target("qwen2")
    drafter = tiny_drafter("pard", target)
    layer = target.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.bias)
    change(layer)
    assert torch.equal(write(target, drafter), write(target))
    assert products


@pytest.mark.parametrize("whole", [False, True])
def test_a_target_that_is_compiled_keeps_its_layers(products, whole):
    target = tiny_target("llama", num_hidden_layers=2)
    drafter, expected = tiny_drafter("dflash", target, **ONE_LAYER["dflash"]), write(target, max_new_tokens=4)
    if whole:
        target.forward = torch.compile(target.forward, backend="eager")
    else:
        target.model.layers[1].compile(backend="eager")
    assert torch.equal(write(target, drafter, max_new_tokens=4), expected)
    assert products
    assert not any(
        weight is layer.weight for weight in products for layer in target.modules() if type(layer) is torch.nn.Linear
    )


def test_a_compiled_call_that_is_left_to_plain_generate_keeps_its_layers(products, monkeypatch):
    target = tiny_target("llama", num_hidden_layers=2)
    drafter = tiny_drafter("dflash", target, **ONE_LAYER["dflash"])
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    config = CompileConfig(backend="eager")
    write(target, drafter, draft_schedule="auto", cache_implementation="static", compile_config=config)
    assert not products


def test_an_adapters_own_layers_are_packed_with_the_layers_that_it_adapts(products):
    from peft import LoraConfig, get_peft_model

    target = tiny_target("llama")
    adapted = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    drafter = tiny_drafter("pard", target)
    ids = random_prompt(6)
    texts = [
        adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False, **options)
        for options in ({}, {"assistant_model": drafter})
    ]
    assert torch.equal(*texts)
    assert any(weight is target.model.layers[0].self_attn.q_proj.base_layer.weight for weight in products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_weights_between_calls_is_noticed(dtype):
    target = tiny_target("llama").to(dtype)
    drafter = tiny_drafter("dflash", target).to(dtype)
    write(target, drafter)
    with torch.no_grad():
        # Not counted by torch.
        for parameter in target.parameters():
            parameter.data.copy_(parameter.data.flip(0))
    changed = write(target, drafter)
    packed_weights._packed.clear()
    assert torch.equal(changed, write(target, drafter))


def test_a_machine_that_can_not_multiply_so_multiplies_as_ever(products, monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter("dart", target)
    monkeypatch.setattr(packed_weights, "layouts_for", lambda dtype: ())
    assert torch.equal(write(target, drafter), write(target))
    assert not products


def test_without_memory_for_the_copies_nothing_is_packed(products, monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter("dart", target)
    layers = [layer for model in (target, drafter) for layer in packable_layers(model)]
    needed = sum({id(layer.weight): layer.weight.nbytes for layer in layers}.values())
    monkeypatch.setattr(module, "free_memory", lambda: 2 * needed - 1)
    write(target, drafter)
    assert not products
    assert not packed_weights.has_copies()
    monkeypatch.setattr(module, "free_memory", lambda: 2 * needed)
    write(target, drafter)
    assert products
    # What there is needs no more room.
    products.clear()
    monkeypatch.setattr(module, "free_memory", lambda: needed)
    write(target, drafter)
    assert products


def test_a_containers_limit_is_what_there_is_of_memory(monkeypatch, tmp_path):
    most, used = tmp_path / "most", tmp_path / "used"
    monkeypatch.setattr(module, "CONTAINER_FILES", (most, used))
    free = module.free_memory()
    assert free > 1 << 20
    used.write_text("1000\n")
    most.write_text("max\n")
    assert module.free_memory() > 1 << 20
    most.write_text("5000\n")
    assert module.free_memory() == 4000


def test_a_call_that_wants_no_copies_gives_their_memory_back(products):
    target = tiny_target("llama")
    drafter = tiny_drafter("dart", target)
    expected = write(target, drafter)
    assert packed_weights.has_copies()
    products.clear()
    assert torch.equal(write(target, drafter, pack_weights=False), expected)
    assert not products
    assert not packed_weights.has_copies()


def test_copies_go_with_their_models():
    target = tiny_target("llama")
    drafter = tiny_drafter("pard", target)
    write(target, drafter)
    assert packed_weights.has_copies()
    del target, drafter
    gc.collect()
    assert not packed_weights.has_copies()


def test_items_of_a_batch_go_their_own_ways(products):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    ids, mask = ragged_prompts((5, 3, 7))
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    texts = [target.generate(ids, **options, **more) for more in ({}, {"assistant_model": drafter})]
    assert torch.equal(*texts)
    assert products


@pytest.mark.parametrize("wanted", [True, False])
def test_copies_of_weights_that_have_become_of_another_dtype_go(wanted):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    write(target, drafter)
    assert packed_weights.has_copies()
    # Those of float64 are not packed.
    target.double()
    drafter.double()
    write(target, drafter, pack_weights=wanted)
    assert not packed_weights.has_copies()


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare"])
def test_the_head_of_a_draft_vocabulary_is_packed_too(products, kind):
    target = tiny_target("llama")
    drafter = tiny_drafter(kind, target)
    expected = write(target)
    drafter.set_draft_vocabulary(range(3, 40))
    assert torch.equal(write(target, drafter), expected)
    heads = {id(weight) for weight in products if weight.shape == (37, target.config.hidden_size)}
    assert len(heads) == 1
    # The same copy in the next call.
    products.clear()
    write(target, drafter)
    assert {id(weight) for weight in products if weight.shape == (37, target.config.hidden_size)} == heads


def test_a_head_that_another_call_multiplies_packed_can_be_gathered_meanwhile():
    target = tiny_target("llama")
    head = target.get_output_embeddings()
    with packed_layers(target, wanted=True):
        assert "forward" in vars(head)
        assert has_plain_rows(head)
    head.forward = lambda states: states
    assert not has_plain_rows(head)
