"""bfloat16, recomputed activations and compiled models train every kind of drafter as plain training does."""

import os
import shutil

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pardraft.training.losses.objectives import OBJECTIVES
from hf_pardraft.widest_float import widest_float
from tiny_models import tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for

KINDS = ("pard", "pard2", "dflash", "dflare", "dart")


@pytest.fixture(scope="module")
def plain(target, text, tmp_path_factory):
    """The losses of plain training, by kind."""
    found = {}
    for kind in KINDS:
        trainer = trainer_for(kind, target, text, tmp_path_factory.mktemp(kind))
        trainer.train()
        found[kind] = losses(trainer)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in KINDS), *((kind, {"use_reentrant": True}) for kind in ("pard", "dart"))],
)
def test_recomputed_activations_give_the_same_losses(kind, settings, target, text, plain, tmp_path):
    trainer = trainer_for(
        kind, target, text, tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=settings
    )
    runs = []
    attention = next(module for module in trainer.drafter.modules() if type(module).__name__.endswith("Attention"))
    attention.register_forward_hook(lambda *arguments: runs.append(1))
    trainer.train()
    assert losses(trainer) == pytest.approx(plain[kind], abs=1e-5)
    # Once forwards, and once more backwards.
    assert len(runs) == 2 * 6


@pytest.mark.parametrize("kind", ["dflash", "dflare"])
def test_recomputing_that_would_lose_gradients_is_refused(kind, target, text, tmp_path):
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="loses gradients"):
        trainer_for(kind, target, text, tmp_path, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near(kind, target, text, plain, tmp_path):
    trainer = trainer_for(kind, target, text, tmp_path, bf16=True, tau_prompts=1, tau_new_tokens=6)
    seen = set()
    next(m for m in trainer.drafter.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(
        lambda module, arguments, output: seen.add(output.dtype)
    )
    trainer.train()
    assert seen == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.drafter.parameters()} == {torch.float32}
    assert losses(trainer) == pytest.approx(plain[kind], rel=0.08)
    assert trainer.evaluate()["eval_tau"] >= 1


class NoFloat64(TorchDispatchMode):
    """Numbers in float64 can't be made, as on Apple's GPUs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_without_float64_trains_and_evaluates(kind, target, text, tmp_path, monkeypatch):
    assert widest_float(torch.device("mps")) == torch.float32
    settings = {"objective": "+".join(OBJECTIVES), "max_steps": 2, "gradient_accumulation_steps": 2}
    expected = trainer_for(kind, target, text, tmp_path / "wide", **settings)
    expected.train()
    trainer = trainer_for(kind, target, text, tmp_path / "narrow", **settings)
    monkeypatch.setattr(widest_float, "__code__", (lambda device: torch.float32).__code__)
    with NoFloat64():
        trainer.train()
        found = trainer.evaluate()
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-3)
    assert found == pytest.approx({**expected.evaluate(), **timing_of(found)}, rel=1e-3, abs=1e-4)


def timing_of(metrics):
    return {name: value for name, value in metrics.items() if "second" in name or "runtime" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_and_drafter_in_bfloat16_train(kind, text, tmp_path):
    target = tiny_target("qwen3").to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"weights that learn are torch\.bfloat16, which rounds most steps .* away"):
        trainer = trainer_for(kind, target, text, tmp_path, drafter=tiny_drafter(kind, target).to(torch.bfloat16))
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_an_adapter_in_float32_of_a_drafter_in_bfloat16_is_not_warned_of(text, tmp_path, recwarn):
    target = tiny_target("qwen3").to(torch.bfloat16)
    drafter = tiny_drafter("dflash", target).to(torch.bfloat16)
    options = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    trainer_for("dflash", target, text, tmp_path, drafter=drafter, trainer_options=options)
    trainer_for("dflash", target, text, tmp_path)
    assert not [warning for warning in recwarn if "weights that learn" in str(warning.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models_give_the_same_losses(kind, target, text, plain, tmp_path):
    """As far as graphs go; what a compiler makes of them is tried with one kind, below."""
    torch._dynamo.reset()
    trainer = trainer_for(kind, target, text, tmp_path, torch_compile=True, torch_compile_backend="eager", max_steps=3)
    trainer.train()
    assert losses(trainer) == pytest.approx(plain[kind][:3], abs=1e-4)
    trainer.save_model(tmp_path / "out")
    assert (
        type(trainer.drafter).from_pretrained(tmp_path / "out").state_dict().keys()
        == trainer.drafter.state_dict().keys()
    )


@pytest.mark.skipif("PARDRAFT_SLOW_TESTS" not in os.environ, reason="a minute: set PARDRAFT_SLOW_TESTS")
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_trains_as_plain_training_does(kind, target, text, plain, tmp_path):
    torch._dynamo.reset()
    trainer = trainer_for(
        kind, target, text, tmp_path, torch_compile=True, max_steps=2, tau_prompts=1, tau_new_tokens=6
    )
    trainer.train()
    assert losses(trainer) == pytest.approx(plain[kind][:2], abs=1e-4)
    assert trainer.evaluate()["eval_tau"] >= 1
