"""A checkpoint is whole or not there: killed runs, full disks and spoilt numbers cost nothing that was saved."""

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_pardraft import AutoDrafter
from hf_pardraft.training import run_identity
from hf_pardraft.training.run import EvaluateAtTheEnd, last_evaluation
from hf_pardraft.training.run_folder import UNFINISHED, check_no_other_run, checkpoint_to_resume, publish, tidy
from processes import in_a_process
from tiny_models import tiny_drafter, tiny_target
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
    for nowhere in ("/nothere", "last"):
        with pytest.raises(ValueError, match=f"expected the folder of a checkpoint.* '{nowhere}' is none.*latest"):
            trainer.train(resume_from_checkpoint=nowhere)
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


def test_the_best_checkpoint_is_found_where_the_run_has_moved_to(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    begun = trainer_for(
        "dflash", target, text, tmp_path / "begun", save_total_limit=2, max_steps=2, **SAVING, **settings
    )
    begun.train()
    assert begun.state.best_global_step == 1
    (tmp_path / "begun").rename(tmp_path / "moved")
    moved = trainer_for(
        "dflash", target, text, tmp_path / "moved", save_total_limit=2, max_steps=4, **SAVING, **settings
    )
    moved.args.resume_changed = True
    moved.train(resume_from_checkpoint=True)
    assert moved.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")
    assert checkpoints(tmp_path / "moved") == ["checkpoint-1", "checkpoint-4"]
    best = AutoDrafter.from_pretrained(tmp_path / "moved" / "checkpoint-1").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in moved.drafter.state_dict().items())


def test_what_is_told_of_a_run_is_of_the_weights_that_are_saved(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_for(
        "dflash", target, text, tmp_path, max_steps=4, save_strategy="steps", save_steps=2, **settings
    )
    trainer.train()
    # The first evaluation was the best by this measure, and nothing was saved then.
    assert trainer.state.best_global_step == 1
    told = last_evaluation(trainer.args, trainer.state)
    assert told["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


def test_a_gradient_that_is_not_a_number_in_the_last_step_is_noticed_too(target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path, max_steps=2, logging_steps=100)
    trainer.saves_before_last_evaluation = True
    weight = next(weight for weight in trainer.drafter.parameters() if weight.requires_grad)
    weight.register_hook(lambda gradient: gradient * math.nan if trainer.state.global_step == 1 else gradient)
    with pytest.raises(FloatingPointError, match="gradient's norm became nan at step 2"):
        trainer.train()
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("saving", [{"save_strategy": "steps", "save_steps": 100}, {"save_strategy": "no"}])
def test_a_run_that_ends_in_its_last_evaluation_has_lost_nothing(saving, target, text, tmp_path):
    def trainer():
        made = trainer_for("dflash", target, text, tmp_path, max_steps=2, **saving)
        made.saves_before_last_evaluation = True
        made.add_callback(EvaluateAtTheEnd())
        return made

    ended = trainer()
    ended.evaluate = lambda **options: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        ended.train()
    weights = ended.drafter.state_dict()
    assert same_weights(weights_in(tmp_path), weights)
    if saving["save_strategy"] == "no":
        with pytest.raises(ValueError, match=rf"its drafter is whole.*--drafter {tmp_path}.*choose another output"):
            check_no_other_run(tmp_path, overwrite=False, files=True)
        return
    with pytest.raises(ValueError, match=r"go on with it \(--resume-from-checkpoint last\)"):
        check_no_other_run(tmp_path, overwrite=False, files=True)
    resumed = trainer()
    resumed.compute_loss = lambda *arguments, **options: pytest.fail("a step was made")
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(resumed.drafter.state_dict(), weights)
    assert any("loss" in entry for entry in resumed.state.log_history)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    for folder, content in ((tmp_path / "checkpoint-1", "old"), (tmp_path / UNFINISHED / "checkpoint-1", "new")):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(content)
    publish(tmp_path / UNFINISHED / "checkpoint-1", tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "weights").read_text() == "new"
    assert list((tmp_path / UNFINISHED).iterdir()) == []


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return AutoDrafter.from_pretrained(folder).state_dict()


def same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_that_is_resumed_where_it_ended_only_evaluates_and_saves(target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=4, **SAVING).train()
    for _ in range(2):
        resumed = trainer_for("dflash", target, text, tmp_path, max_steps=4, **SAVING)
        resumed.compute_loss = lambda *arguments, **options: pytest.fail("a step was made")
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 4
        resumed.save_model(tmp_path / "drafter")
        assert same_weights(weights_in(tmp_path / "drafter"), weights_in(tmp_path / "checkpoint-4"))
    assert get_last_checkpoint(str(tmp_path)).endswith("checkpoint-4")


def test_a_run_in_epochs_that_is_resumed_where_it_ended_makes_no_step_either(target, text, tmp_path):
    epochs = {"max_steps": -1, "num_train_epochs": 2}
    trainer_for("dflash", target, text, tmp_path, **epochs, **SAVING).train()
    resumed = trainer_for("dflash", target, text, tmp_path, **epochs, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.global_step, losses(resumed)[4:]) == (4, [])


def test_a_run_that_was_given_more_steps_goes_on(target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=2, **SAVING).train()
    # What it logs, saves and evaluates may change, too, and in which pieces it computes.
    others = {"logging_steps": 2, "save_steps": 2, "loss_chunk_rows": 7, "per_device_train_batch_size": 2}
    more = trainer_for(
        "dflash", target, text, tmp_path, max_steps=4, gradient_accumulation_steps=2, **{**SAVING, **others}
    )
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 4


def test_a_run_does_not_begin_where_another_one_has_its_checkpoints(target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=4, **SAVING).train()
    before = checkpoints(tmp_path)
    with pytest.raises(
        ValueError, match=r"holds an earlier run \(checkpoint-2, checkpoint-3, checkpoint-4\).*overwrite"
    ):
        trainer_for("dflash", target, text, tmp_path, max_steps=2, **SAVING).train()
    assert checkpoints(tmp_path) == before
    trainer = trainer_for("dflash", target, text, tmp_path, max_steps=2, overwrite_output=True, **SAVING)
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    # The same trainer goes over its own.
    trainer.train()


def test_a_run_that_goes_on_from_elsewhere_does_not_mix_its_checkpoints_with_others(begun, target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=1, **SAVING).train()
    with pytest.raises(ValueError, match="holds an earlier run"):
        trainer_for("dflash", target, text, tmp_path, **SAVING).train(str(begun / "checkpoint-2"))


CHANGES = [
    ({"learning_rate": 2e-2}, "learning_rate 0.01 (now 0.02)"),
    ({"seed": 7}, "seed 42 (now 7)"),
    ({"objective": "cross_entropy+first_error"}, "objective None (now 'cross_entropy+first_error')"),
    ({"per_device_train_batch_size": 2}, "examples per step 4 (now 2)"),
    ({"loss_gamma": 3.0}, "loss_gamma 4.0 (now 3.0)"),
    ({"num_anchors": 3}, "num_anchors 512 (now 3)"),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy 'random' (now 'sequential')"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last False (now True)"),
]


@pytest.fixture(scope="module")
def begun(target, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    trainer_for("dflash", target, text, folder, max_steps=2, **SAVING).train()
    return folder


@pytest.mark.parametrize(("changes", "told"), CHANGES)
def test_a_checkpoint_of_other_settings_is_not_gone_on_with_unless_that_is_wanted(
    changes, told, begun, target, text, tmp_path
):
    with pytest.raises(ValueError, match=rf"checkpoint-2 was trained with {re.escape(told)}.*--resume-changed"):
        trainer_for("dflash", target, text, begun, **SAVING, **changes).train(resume_from_checkpoint=True)
    shutil.copytree(begun, tmp_path / "copy")
    changed = trainer_for("dflash", target, text, tmp_path / "copy", max_steps=3, resume_changed=True, **changes)
    changed.train(resume_from_checkpoint=True)
    assert changed.state.global_step == 3


def rates(trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_a_run_goes_on_with_its_new_learning_rate_and_decay(begun, target, text, tmp_path):
    changes = {"learning_rate": 1e-6, "weight_decay": 0.5, "lr_scheduler_type": "linear", "max_steps": 4}
    shutil.copytree(begun, tmp_path / "copy")
    changed = trainer_for("dflash", target, text, tmp_path / "copy", resume_changed=True, **changes)
    changed.train(resume_from_checkpoint=True)
    # What is logged is the next step's.
    assert rates(changed)[-2:] == pytest.approx([1e-6 * 2 / 4, 1e-6 * 1 / 4])
    assert {group["weight_decay"] for group in changed.optimizer.param_groups} == {0.0, 0.5}
    # What the optimizer has learned is kept.
    assert all(state["step"] == 4 for state in changed.optimizer.state.values())


@pytest.mark.parametrize("objective", ["dpace", "cross_entropy+first_error"])
def test_denominators_that_a_drafter_with_dropout_says_are_those_of_an_unbroken_run(objective, target, text, tmp_path):
    settings = {"objective": objective, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **SAVING}

    def trainer(folder):
        drafter = tiny_drafter("dflash", target)
        for module in drafter.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        return trainer_for("dflash", target, text, tmp_path / folder, drafter=drafter, **settings, max_steps=3)

    unbroken, resumed = trainer("unbroken"), trainer("resumed")
    unbroken.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-1"))
    assert losses(resumed)[-2:] == losses(unbroken)[-2:]


def test_a_checkpoint_of_another_drafter_target_or_other_data_is_not_gone_on_with(begun, target, text):
    def resume(drafter, target, text):
        trainer_for("dflash", target, text, begun, drafter=drafter, **SAVING).train(resume_from_checkpoint=True)

    drafter = tiny_drafter("dflash", target)
    drafter.config.block_size += 1
    with pytest.raises(ValueError, match=r"was trained with block_size \d+ \(now \d+\)"):
        resume(drafter, target, text)
    with pytest.raises(ValueError, match=r"another target \(its weights differ\)"):
        resume(None, tiny_target("qwen3", seed=5), text)
    with pytest.raises(ValueError, match=r"other data \(8 examples, now 7\)"):
        resume(None, target, text.select(range(7)))
    rows = text.to_list()
    rows[5]["labels"][-1] = -100
    with pytest.raises(ValueError, match=r"other data \(8 examples, now 8\)"):
        resume(None, target, rows)
    # The same ones in another form are no others.
    trainer = trainer_for("dflash", target, text.to_list(), begun, max_steps=2, **SAVING)
    trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_a_plain_trainer_is_gone_on_with(begun, target, text, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    for checkpoint in (tmp_path / "run").iterdir():
        (checkpoint / run_identity.FILE).unlink()
    trainer = trainer_for("dflash", target, text, tmp_path / "run", learning_rate=2e-2, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_checkpoints_are_rotated_by_step_whatever_the_clock_says(target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=2, **SAVING).train()
    for ahead, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (time.time() + 86400 + ahead,) * 2)
    limited = {"save_total_limit": 2, **SAVING}
    trainer_for("dflash", target, text, tmp_path, max_steps=4, **limited).train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    # From an earlier one on, what was written last stays, too.
    limited["save_total_limit"] = 1
    trainer = trainer_for("dflash", target, text, tmp_path, max_steps=4, **limited)
    trainer.add_callback(LooksForCheckpoints(tmp_path))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert checkpoints(tmp_path) == ["checkpoint-4"]


class LooksForCheckpoints(TrainerCallback):
    """Looks, after each save, whether its checkpoint is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args, state, control, **kwargs):
        assert (self.folder / f"checkpoint-{state.global_step}").is_dir()


def test_the_last_checkpoint_that_is_whole_is_gone_on_with(target, text, tmp_path):
    trainer_for("dflash", target, text, tmp_path, max_steps=3, **SAVING).train()
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    with (tmp_path / "checkpoint-2" / "scheduler.pt").open("r+b") as file:
        file.truncate(10)
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=r"checkpoint-3 is no complete checkpoint: optimizer.pt is missing or cut off"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-3"), str(tmp_path))


def test_damaged_weights_are_not_gone_on_with(begun, target, text, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: the checksums"):
        trainer_for("dflash", target, text, tmp_path / "run", **SAVING).train(resume_from_checkpoint=True)


def test_two_runs_do_not_write_one_output(target, text, tmp_path):
    second = trainer_for("dflash", target, text, tmp_path, **SAVING)

    class Intruder(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            def work():
                with pytest.raises(OSError, match=rf"is being written by process {os.getppid()}"):
                    second.train()

            assert in_a_process(work) == 0

    first = trainer_for("dflash", target, text, tmp_path, max_steps=1, **SAVING)
    first.add_callback(Intruder())
    first.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]


def test_a_checkpoint_that_was_about_to_replace_another_one_does_so(tmp_path):
    """Killed between the two renamings."""
    for name, content in ((f"{UNFINISHED}/replaced", "old"), (f"{UNFINISHED}/checkpoint-4", "new")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text(content)
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / "weights").read_text() == "new"


def test_a_tokenizer_that_can_not_be_written_leaves_the_drafter_that_was_there(target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path / "run")
    trainer.save_model(tmp_path / "drafter")
    before = {path: path.read_bytes() for path in (tmp_path / "drafter").rglob("*") if path.is_file()}

    class FullDisk:
        def save_pretrained(self, folder):
            # As tokenizers puts it.
            raise Exception("No space left on device (os error 28)")

    other = trainer_for("dflash", target, text, tmp_path / "run", drafter=tiny_drafter("dflash", target, seed=5))
    other.processing_class = FullDisk()
    with pytest.raises(OSError, match=r"the drafter could not be written to .*No space left on device"):
        other.save_model(tmp_path / "drafter")
    assert {path: path.read_bytes() for path in (tmp_path / "drafter").rglob("*") if path.is_file()} == before
