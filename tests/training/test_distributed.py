"""Two processes (gloo, on the CPU) train as one does: with DDP and with FSDP2, from the first step on and after resuming."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_pardraft import AutoDrafter
from training.processes import in_processes
from training.tiny_training import losses, trainer_for

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
WAYS = {"ddp": {}, "fsdp2": FSDP2}
SEEN_TOGETHER = [
    *(("pard", "ddp"), ("dflare", "ddp"), ("dart", "ddp")),
    *(("pard", "fsdp2"), ("pard2", "fsdp2"), ("dflash", "fsdp2"), ("dflare", "fsdp2"), ("dart", "fsdp2")),
]


def assert_spread(trainer, way: str) -> None:
    """What is meant to be tested is what runs."""
    assert trainer.args.world_size == 2
    spread = [isinstance(weight, DTensor) for weight in trainer.drafter.parameters()]
    assert all(spread) if way == "fsdp2" else not any(spread)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (way == "ddp")


def pairs(settings: dict) -> dict:
    """What two processes need to see the batches of one."""
    return {**settings, "per_device_train_batch_size": 2}


# Without dropped masks, whose pattern leaves each row another number of tokens.
EVERY_ROW = {"cod_retention": 1.0, "max_steps": 4}


@pytest.mark.parametrize(("kind", "way"), SEEN_TOGETHER)
def test_two_processes_have_the_losses_and_weights_of_one(kind, way, target, text, tmp_path):
    alone = trainer_for(kind, target, text, tmp_path / "alone", **EVERY_ROW)
    alone.train()

    def train(rank):
        trainer = trainer_for(kind, target, text, tmp_path / "both", **pairs(EVERY_ROW))
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["pard2", "dflash"])
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
