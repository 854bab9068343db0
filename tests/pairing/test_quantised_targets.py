"""Targets whose weights are quantised: what is borrowed of them is borrowed as it is, and what can't be had is not asked for."""

import warnings

import pytest
import torch
from torch import nn
from transformers.integrations.gguf import utils as gguf_modules
from transformers.integrations.gguf.dequant import GGML_Q8_0

from hf_pardraft import PardDrafter
from hf_pardraft.checkpoints.weights import check_finite
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

RATES = [0.8, 0.7, 0.7, 0.6]
PLAIN = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


def q8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in GGUF's Q8_0: of each 32 values a scale in float16, and as many bytes."""
    blocks = weight.detach().reshape(len(weight), -1, 32)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / 127).half()
    values = (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], dim=2).flatten(1)


class Kernel:
    """Stands in for the published one: all types are known to it."""

    def supports(self, ggml_type: int) -> bool:
        return True


def unpacked_product(weight, x, ggml_type, out_features):
    return x @ gguf_modules.dequantize_blocks(weight, ggml_type, out_features, x.shape[1], x.dtype).T


@pytest.fixture
def packed(monkeypatch):
    """A target with its weights in GGUF blocks, as transformers keeps them."""
    target = tiny_target("llama", tie_word_embeddings=False, intermediate_size=64)
    plan = {
        f"{name}.weight": GGML_Q8_0
        for name, module in target.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    }
    blocks = {name: q8_blocks(target.get_parameter(name)) for name in plan}
    replaced = gguf_modules.replace_with_gguf_modules(target, plan, Kernel())
    assert replaced.keys() == plan.keys()
    for name, module in replaced.items():
        module.weight.data = blocks[name]
    monkeypatch.setattr(gguf_modules, "mul_mat_vec", unpacked_product)
    return target


def unpacked(target):
    """The same target with the values of its blocks."""
    other = tiny_target("llama", tie_word_embeddings=False, intermediate_size=64)
    for name, parameter in other.named_parameters():
        module = target.get_submodule(name.rpartition(".")[0])
        values = module.weight.data
        if values.dtype == torch.uint8:
            values = gguf_modules.dequantize_blocks(values, GGML_Q8_0, *parameter.shape, torch.float32)
        parameter.data.copy_(values)
    return other


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart"])
def test_a_drafter_borrows_a_packed_head_and_embedding_as_their_values(packed, kind):
    values = unpacked(packed)
    drafter = tiny_drafter(kind, values)
    drafter.generation_config.record_drafts = True
    drafts = {}
    for name, target in (("values", values), ("packed", packed)):
        text = target.generate(random_prompt(5), assistant_model=drafter, **PLAIN)
        drafts[name] = text.tolist(), [round.tokens for round in drafter.last_stats.proposals]
    assert drafts["packed"] == drafts["values"]


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("budget", [0, 12])
def test_the_text_of_a_packed_target_is_its_own(packed, kind, budget):
    plain = packed.generate(random_prompt(5), **PLAIN)
    drafter = make_oracle(tiny_drafter(kind, packed), list(plain), RATES, runner_up=0.7)
    drafter.generation_config.tree_budget = budget
    assert torch.equal(packed.generate(random_prompt(5), assistant_model=drafter, **PLAIN), plain)
    assert drafter.last_stats.tau > 1.2


class Quantised(torch.Tensor):
    """As libraries that quantise weights make them: a float by its dtype, and not to be indexed."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            raise ValueError("quantised rows can't be had")
        if func is torch.Tensor.sum:
            raise NotImplementedError("unimplemented: aten.sum")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


@pytest.fixture
def subclassed():
    target = tiny_target("llama", seed=5)
    for module in target.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone().as_subclass(Quantised), requires_grad=False)
    return target


def test_quantised_weights_of_a_drafter_are_asked_for_no_sum():
    drafter = tiny_drafter("pard", tiny_target("llama"))
    drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight.detach().as_subclass(Quantised), requires_grad=False)
    check_finite(drafter, "a folder")


def test_quantised_weights_are_not_compared_with_those_of_training(subclassed):
    drafter = tiny_drafter("dflash", tiny_target("llama"))
    assert drafter.config.target_fingerprint is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subclassed.generate(random_prompt(4), assistant_model=drafter, **PLAIN)


def test_a_fresh_drafter_is_made_for_quantised_weights_and_a_copy_of_them_is_refused(subclassed):
    assert tiny_drafter("dart", subclassed).config.target_fingerprint is None
    with pytest.raises(ValueError, match="quantised or spread over devices: load it without"):
        PardDrafter.from_causal_lm(subclassed, mask_token_id=3)
