"""Two processes (gloo, on the CPU) train as one does, from the first step on and after resuming: with DDP, FSDP2, DeepSpeed."""

import base64
import functools
import json
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_pardraft import AutoDrafter, DraftTrainer, DraftTrainingArguments
from processes import in_processes
from tiny_models import tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def deepspeed(stage: int) -> dict[str, str]:
    """DeepSpeed with a ZeRO stage, which spreads even the smallest weights if it is the third."""
    spreading = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, **(spreading if stage == 3 else {})},
    }
    # What accelerate takes for the name of a file may be the file itself.
    file = base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}


ZERO = {f"zero{stage}": deepspeed(stage) for stage in range(4)}
WAYS = {"ddp": {}, "fsdp2": FSDP2, **ZERO}
with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SEEN_TOGETHER = [
    # With DDP test_processes.py has every kind.
    ("dflare", "ddp"),
    *(("pard", "fsdp2"), ("pard2", "fsdp2"), ("dflash", "fsdp2"), ("dflare", "fsdp2"), ("dart", "fsdp2")),
    *(pytest.param(*case, marks=with_deepspeed) for case in (("dflash", "zero2"), ("pard", "zero3"))),
]
RESUMED = [
    *((kind, way) for kind in ("pard2", "dflash") for way in ("ddp", "fsdp2")),
    *(pytest.param(*case, marks=with_deepspeed) for case in (("dflash", "zero2"), ("dflash", "zero3"))),
]


def assert_spread(trainer, way: str) -> None:
    """What is meant to be tested is what runs."""
    assert trainer.args.world_size == 2
    if way in ZERO:
        assert way == f"zero{trainer.deepspeed.zero_optimization_stage()}"
        # Stage 3 keeps an empty tensor in the place of each.
        assert all(weight.numel() == 0 for weight in trainer.drafter.parameters()) == (way == "zero3")
        return
    spread = [isinstance(weight, DTensor) for weight in trainer.drafter.parameters()]
    assert all(spread) if way == "fsdp2" else not any(spread)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (way == "ddp")


def pairs(settings: dict) -> dict:
    """What two processes need to see the batches of one."""
    return {**settings, "per_device_train_batch_size": 2}


# Without dropped masks, whose pattern leaves each row another number of tokens.
EVERY_ROW = {"cod_retention": 1.0, "max_steps": 4}


@pytest.fixture(scope="module")
def alone(target, text, tmp_path_factory):
    """What one process makes of each kind."""

    @functools.cache
    def trained(kind):
        trainer = trainer_for(kind, target, text, tmp_path_factory.mktemp(kind), **EVERY_ROW)
        trainer.train()
        return trainer

    return trained


@pytest.mark.parametrize(("kind", "way"), SEEN_TOGETHER)
def test_two_processes_have_the_losses_and_weights_of_one(kind, way, alone, target, text, tmp_path):
    alone = alone(kind)

    def train(rank):
        # DeepSpeed would take apart what is made after the training arguments.
        drafter = tiny_drafter(kind, target)
        trainer = trainer_for(kind, target, text, tmp_path / "both", drafter=drafter, **pairs(EVERY_ROW))
        trainer.train()
        assert_spread(trainer, way)
        trainer.save_model()
        return losses(trainer)

    for found in in_processes(train, **WAYS[way]):
        assert found == pytest.approx(losses(alone), abs=1e-5)
    together = AutoDrafter.from_pretrained(tmp_path / "both").state_dict()
    assert together.keys() == alone.drafter.state_dict().keys()
    for name, weight in alone.drafter.state_dict().items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=2e-3, msg=name)


@pytest.mark.parametrize(("kind", "way"), RESUMED)
def test_two_processes_save_evaluate_and_resume(kind, way, target, text, tmp_path):
    """As an unbroken run would, the best checkpoint by tau included, and without waiting for each other for ever."""
    settings = {
        **EVERY_ROW,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "tau_prompts": 3,
        "tau_new_tokens": 8,
        "metric_for_best_model": "tau",
    }

    def train(rank):
        unbroken = trainer_for(kind, target, text, tmp_path / "run", load_best_model_at_end=True, **pairs(settings))
        unbroken.train()
        resumed = trainer_for(kind, target, text, tmp_path / "again", **pairs(settings))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        taus = [
            [entry["eval_tau"] for entry in run.state.log_history if "eval_tau" in entry] for run in (unbroken, resumed)
        ]
        return losses(unbroken), losses(resumed), taus, unbroken.state.best_model_checkpoint

    for unbroken, resumed, taus, best in in_processes(train, **WAYS[way]):
        assert resumed == pytest.approx(unbroken, abs=1e-6)
        assert len(taus[0]) == 2
        assert taus[0] == pytest.approx(taus[1])
        assert best.endswith(("checkpoint-2", "checkpoint-4"))
    for step in (2, 4):
        AutoDrafter.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")


@with_deepspeed
def test_deepspeed_has_the_losses_of_one_process_when_gradients_are_accumulated(target, text, tmp_path):
    """With an objective whose denominators only the drafter's own answers tell."""
    settings = {**EVERY_ROW, "objective": "first_error", "max_grad_norm": 0.5}
    alone = trainer_for("dflash", target, text, tmp_path / "alone", **settings)
    alone.train()

    def train(rank):
        steps = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
        trainer = trainer_for("dflash", target, text, tmp_path / "both", **{**settings, **steps})
        trainer.train()
        assert_spread(trainer, "zero3")
        return losses(trainer)

    for found in in_processes(train, **WAYS["zero3"]):
        assert found == pytest.approx(losses(alone), abs=1e-5)


def assert_stage_3_refuses(work: Callable[[], object], match: str) -> None:
    """In a process that DeepSpeed's stage 3 takes part in."""

    def refused(rank):
        with pytest.raises(ValueError, match=match):
            work()

    in_processes(refused, count=1, **WAYS["zero3"])


@with_deepspeed
def test_a_target_that_deepspeed_has_taken_apart_is_refused(target, text, tmp_path):
    drafter = tiny_drafter("dflash", target)

    def train_with_a_part():
        arguments = DraftTrainingArguments(tmp_path, report_to=[], use_cpu=True)
        DraftTrainer(drafter, target=tiny_target("qwen3"), args=arguments, train_dataset=text)

    assert_stage_3_refuses(train_with_a_part, match="load it before DraftTrainingArguments")


@with_deepspeed
def test_stage_3_without_whole_checkpoints_is_refused(target, text, tmp_path):
    stage = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    settings = {"zero_optimization": stage, "train_micro_batch_size_per_gpu": "auto"}
    assert_stage_3_refuses(
        lambda: trainer_for("dflash", target, text, tmp_path, deepspeed=settings), match="zero3_save_16bit_model=False"
    )
