"""A checkpoint is whole or not there: killed runs, full disks and spoilt numbers cost nothing that was saved."""

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from hf_pardraft import AutoDrafter
from hf_pardraft.training.checkpoints import UNFINISHED, publish
from training.processes import in_a_process
from training.tiny_training import losses, trainer_for

SAVING = {"save_strategy": "steps", "save_steps": 1}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(kind, target, text, folder, patch) -> None:
    """A run in a process of its own, which `patch(trainer)` lets be killed from outside or by itself."""

    def work():
        trainer = trainer_for(kind, target, text, folder, **SAVING)
        patch(trainer)
        trainer.train()

    assert in_a_process(work) == -signal.SIGKILL


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["pard", "pard2", "dflash", "dart"])
def test_a_run_killed_in_the_middle_of_a_step_goes_on_with_the_losses_of_an_unbroken_one(kind, target, text, tmp_path):
    unbroken = trainer_for(kind, target, text, tmp_path / "unbroken")
    unbroken.train()
    # Any step will do, and another one for each kind.
    steps_before = 1 + sum(map(ord, kind)) % 4

    def patch(trainer):
        forward, calls = trainer.compute_loss, []

        def dying(*arguments, **options):
            calls.append(1)
            if len(calls) > steps_before:
                die()
            return forward(*arguments, **options)

        trainer.compute_loss = dying

    run_until_killed(kind, target, text, tmp_path / "killed", patch)
    resumed = trainer_for(kind, target, text, tmp_path / "killed", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed)) == 6
    assert losses(resumed) == losses(unbroken)
    for mine, theirs in zip(resumed.drafter.parameters(), unbroken.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# What of a checkpoint has been written by then.
MOMENTS = {"weights": "_save_optimizer_and_scheduler", "optimizer": "_save_rng_state", "nothing": "save_model"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_checkpoint_interrupted_while_it_is_written_is_never_resumed_from(moment, target, text, tmp_path):
    unbroken = trainer_for("dflash", target, text, tmp_path / "unbroken")
    unbroken.train()

    def patch(trainer):
        write = getattr(trainer, MOMENTS[moment])

        def dying(*arguments, **options):
            if trainer.state.global_step == 4:
                die()
            return write(*arguments, **options)

        setattr(trainer, MOMENTS[moment], dying)

    run_until_killed("dflash", target, text, tmp_path / "killed", patch)
    assert get_last_checkpoint(str(tmp_path / "killed")).endswith("checkpoint-3")
    resumed = trainer_for("dflash", target, text, tmp_path / "killed", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(unbroken)
    assert checkpoints(tmp_path / "killed") == [f"checkpoint-{step}" for step in range(1, 7)]


def assert_whole(checkpoint: Path, kind, target, text, tmp_path) -> None:
    """A drafter loads from the checkpoint, and a run goes on from it."""
    AutoDrafter.from_pretrained(checkpoint)
    trainer_for(kind, target, text, tmp_path / "again", max_steps=5).train(str(checkpoint))


@pytest.mark.parametrize("kind", ["pard2", "dflash"])
def test_a_full_disk_stops_with_a_clear_message_and_leaves_the_last_checkpoint(kind, target, text, tmp_path):
    trainer = trainer_for(kind, target, text, tmp_path / "run", **SAVING)
    write = trainer._save_optimizer_and_scheduler

    def full(folder):
        write(folder)
        if trainer.state.global_step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer._save_optimizer_and_scheduler = full
    with pytest.raises(OSError, match=r"step 3 could not be written.*No space left.*checkpoint-2, is intact"):
        trainer.train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert_whole(tmp_path / "run" / "checkpoint-2", kind, target, text, tmp_path)


def test_writers_that_really_fail_are_noticed_whatever_they_raise(target, text, tmp_path):
    """Under a limit on the size of files, which safetensors and torch.save meet in ways of their own."""
    for share, writer in ((0.5, "model"), (1.5, "optimizer")):
        trainer = trainer_for("dflash", target, text, tmp_path / writer, max_steps=2, **SAVING)
        weights = sum(weight.numel() * 4 for weight in trainer.drafter.parameters())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * weights), before[1]))
        try:
            with pytest.raises(OSError, match=r"step 1 could not be written.*there is no earlier one"):
                trainer.train()
            if writer == "model":
                with pytest.raises(OSError, match="the drafter could not be written to"):
                    trainer.save_model(tmp_path / "drafter")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints(tmp_path / writer) == []


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(filtered, target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path / "run", logging_nan_inf_filter=filtered, **SAVING)
    compute_loss = trainer.compute_loss

    def spoilt(*arguments, **options):
        loss = compute_loss(*arguments, **options)
        return loss * float("nan") if trainer.state.global_step == 2 else loss

    trainer.compute_loss = spoilt
    with pytest.raises(FloatingPointError, match=r"loss became nan at step 3.*learning_rate"):
        trainer.train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert all(torch.isfinite(weight).all() for weight in trainer.drafter.parameters())
    assert_whole(tmp_path / "run" / "checkpoint-2", "dflash", target, text, tmp_path)


def test_a_gradient_that_is_not_a_number_is_not_saved(target, text, tmp_path):
    trainer = trainer_for("pard", target, text, tmp_path / "run", **SAVING)
    weight = next(trainer.drafter.parameters())
    # Times an infinity that the loss does not show.
    weight.register_hook(lambda grad: grad * (float("inf") if trainer.state.global_step == 2 else 1.0))
    with pytest.raises(FloatingPointError, match=r"gradient's norm became (inf|nan)"):
        trainer.train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


def test_no_checkpoint_and_half_a_checkpoint_are_refused_before_any_work(target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path / "run")
    with pytest.raises(ValueError, match="expected a checkpoint to resume from"):
        trainer.train(resume_from_checkpoint=True)
    half = tmp_path / "run" / "checkpoint-2"
    half.mkdir(parents=True)
    (half / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"no complete checkpoint: trainer_state.json"):
        trainer.train(resume_from_checkpoint=str(half))


def test_the_limit_on_checkpoints_counts_whole_ones_and_spares_the_best(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_for("dflash", target, text, tmp_path, save_total_limit=2, max_steps=4, **SAVING, **settings)
    trainer.train()
    # The loss falls, so by this measure the first checkpoint stays the best.
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    for folder, content in ((tmp_path / "checkpoint-1", "old"), (tmp_path / UNFINISHED / "checkpoint-1", "new")):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(content)
    publish(tmp_path / UNFINISHED / "checkpoint-1", tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "weights").read_text() == "new"
    assert list((tmp_path / UNFINISHED).iterdir()) == []
