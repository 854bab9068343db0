"""Checkpoints that are there in full or not at all: written beside their place, and moved to it when they are complete."""

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from ..checkpoints.atomic_folders import writing_folder
from .run_identity import differences, missing_files, note_identity, read_identity

# No name that a search for checkpoints would take for one.
UNFINISHED = "unfinished-checkpoint"
REPLACED = "replaced"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# What else shows that a folder holds a run, or what came of one.
RUN_FILES = ("config.json", "adapter_config.json", "train_settings.yaml")


class StagedCheckpoint:
    """A checkpoint while it is written: beside its place, and moved there when every process has written its part.

    Args:
        run: folder of the run.
        step: that the checkpoint is of.
        args: of the training, which say what this process writes.
        accelerator: by which processes wait for each other.

    Attributes:
        folder: where it is written.
        final: its place.
    """

    def __init__(self, run: Path, step: int, args: TrainingArguments, accelerator: Accelerator) -> None:
        self.run, self.step, self.args, self.accelerator = run, step, args, accelerator
        self.folder, self.final = run / UNFINISHED / f"checkpoint-{step}", run / f"checkpoint-{step}"

    def begin(self) -> None:
        """Remove what an interrupted run left."""
        if self.args.should_save or self.args.local_process_index == 0:
            tidy(self.run)
        self.accelerator.wait_for_everyone()

    def publish(self, identity: dict[str, Any] | None = None) -> None:
        """Move it to its place; one of the same step that was there before goes only afterwards.

        Args:
            identity: of the run, to be noted in it.
        """
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if identity is not None:
                note_identity(self.folder, identity)
            publish(self.folder, self.final)
        self.accelerator.wait_for_everyone()
        # Nodes that share no file system have parts of their own.
        if self.args.local_process_index == 0 and self.folder.exists():
            publish(self.folder, self.final)
        self.accelerator.wait_for_everyone()
        if self.args.should_save or self.args.local_process_index == 0:
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)

    def failure(self, error: Exception) -> OSError:
        """What to raise when it can't be written, of which nothing is kept."""
        shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
        latest = get_last_checkpoint(self.run) if self.run.is_dir() else None
        kept = f"the checkpoint before it, {latest}, is intact" if latest else "there is no earlier one"
        return OSError(
            f"the checkpoint of step {self.step} could not be written to {self.run}: {error}. Nothing of it was kept, and "
            f"{kept}. Make room, lower save_total_limit or choose another output_dir, and go on with "
            "resume_from_checkpoint=True"
        )


def publish(staged: Path, final: Path) -> None:
    """Move a complete checkpoint to its place; one of the same step that was there before goes only afterwards."""
    replaced = staged.with_name(REPLACED)
    if final.exists():
        final.rename(replaced)
    staged.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what an interrupted run left; a checkpoint that was about to replace another one does so first."""
    left = run / UNFINISHED
    if (left / REPLACED).exists():
        for staged in left.glob("checkpoint-*"):
            if not (run / staged.name).exists():
                staged.rename(run / staged.name)
    shutil.rmtree(left, ignore_errors=True)


def checkpoints_in(run: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, by their steps."""
    found = Path(run).glob("checkpoint-*") if Path(run).is_dir() else ()
    return sorted((path for path in found if CHECKPOINT.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(CHECKPOINT.fullmatch(checkpoint.name)[1])


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which is none any more from the first file on."""
    doomed = checkpoint.parent / UNFINISHED / f"removed-{checkpoint.name}"
    doomed.parent.mkdir(exist_ok=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed.parent, ignore_errors=True)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep at most `limit` checkpoints, by their steps and whatever the clock says; the newest and the best always stay."""
    if not limit or limit < 0:
        return
    kept = {newest.name, *([Path(best).name] if best else [])}
    others = [path for path in checkpoints_in(newest.parent) if path.name not in kept]
    num_kept = sum((newest.parent / name).is_dir() for name in kept)
    for checkpoint in others[: max(0, len(others) - max(0, limit - num_kept))]:
        remove(checkpoint)


def checkpoint_to_resume(resume_from: str | bool | None, folder: str) -> str | None:
    """The checkpoint that a run goes on from.

    Args:
        resume_from: a checkpoint, `True` for the latest in `folder`, or `None` or `False` to start anew.
        folder: of the run.

    Raises:
        ValueError: if there is none, or it is not complete.
    """
    if resume_from is None or resume_from is False:
        return None
    if resume_from is not True and not Path(resume_from).is_dir():
        raise ValueError(
            f"expected the folder of a checkpoint to resume from, and {str(resume_from)!r} is none: check the path, or take the "
            "latest of the output folder (True, on the command line last)"
        )
    found = checkpoints_in(folder)[::-1] if resume_from is True else [Path(resume_from)]
    if not found:
        raise ValueError(
            f"expected a checkpoint to resume from in {folder}, found none: leave resume_from_checkpoint out"
        )
    for checkpoint in found:
        problem = incompleteness(checkpoint)
        if problem is None:
            return str(checkpoint)
    raise ValueError(f"{checkpoint} is no complete checkpoint: {problem}. Resume from another one")


def incompleteness(checkpoint: Path) -> str | None:
    """What a checkpoint lacks; `None` if nothing is known to be missing."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME}, which is written last, is missing"
    missing = missing_files(checkpoint)
    return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing or cut off" if missing else None


def check_no_other_run(folder: str | Path, overwrite: bool, files: bool = False) -> None:
    """Raise a `ValueError` if a run that begins anew would mix its checkpoints with those of an earlier one.

    Args:
        folder: of the run.
        overwrite: whether the earlier run's may go.
        files: whether a drafter without checkpoints is in the way, too.
    """
    checkpoints = [path.name for path in checkpoints_in(folder)]
    there = checkpoints + [name for name in RUN_FILES if files and (Path(folder) / name).exists()]
    if not there or overwrite:
        return
    # Without a checkpoint there is nothing to resume from.
    go_on = (
        "go on with it (--resume-from-checkpoint last)"
        if checkpoints
        else f"its drafter is whole, though perhaps not evaluated (pardraft eval), and can be trained on (--drafter {folder})"
    )
    raise ValueError(
        f"{folder} holds an earlier run ({', '.join(there[-3:])}): {go_on}, choose another output, or replace it "
        "(--overwrite-output, or overwrite_output=True, which removes its checkpoints)"
    )


def check_same_run(checkpoint: str, identity: dict[str, Any], changed: bool) -> None:
    """Raise a `ValueError` if a checkpoint is another run's than `identity` describes, unless that is wanted (`changed`)."""
    found = read_identity(Path(checkpoint))
    told = [] if found is None or changed else differences(found, identity)
    if told:
        raise ValueError(
            f"{checkpoint} was trained with {'; '.join(told)}: use the same settings, another output, or pass --resume-changed "
            "(resume_changed=True) to go on with the new ones"
        )


def not_finite(what: str, value: torch.Tensor, step: int, folder: str) -> FloatingPointError:
    """What to raise when training can't go on; the checkpoints in `folder` know nothing of it."""
    return FloatingPointError(
        f"the {what} became {value.item()} at step {step}: training has stopped, and the checkpoints in {folder} are intact. "
        "Lower learning_rate or max_grad_norm, train in bfloat16 rather than float16, or look for damaged examples; "
        "resume_from_checkpoint=True goes on from the last checkpoint"
    )


class WholeCheckpointTrainer(Trainer):
    """A `Trainer` whose checkpoints are whole, see [`StagedCheckpoint`], and that stops at what is not finite.

    Attributes:
        identity: of the run, noted in its checkpoints; see [`identity_of`].
        saves_before_last_evaluation: whether the model, and a checkpoint if one is due, are saved after the last step, so that an
            evaluation that fails loses nothing.
    """

    saves_before_last_evaluation = False
    identity: dict[str, Any] | None = None
    _stages_checkpoint = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`, but it is the only run that writes its folder, and mixes its checkpoints with no other's.

        Raises:
            ValueError, OSError: see [`checkpoint_to_resume`], [`check_no_other_run`], [`check_same_run`], [`writing_folder`].
        """
        # Without checkpoints nothing is written before `save_model`, which sees to it by itself.
        writes = self.args.save_strategy != SaveStrategy.NO or self.args.overwrite_output
        writes_first = writes and self.args.process_index == 0
        with writing_folder(self.args.output_dir) if writes_first else nullcontext():
            checkpoint = self._checked_start(resume_from_checkpoint, writes, writes_first)
            return super().train(checkpoint, *args, **kwargs)

    def find_identity(self) -> dict[str, Any] | None:
        """What the checkpoints of this run depend on; `None` notes nothing and compares nothing."""
        return None

    def _checked_start(self, resume_from: str | bool | None, writes: bool, writes_first: bool) -> str | None:
        """The checkpoint to go on from, `None` for a run that begins anew. What else is in the folder is out of its way."""
        args, run = self.args, Path(self.args.output_dir)
        if writes_first:
            tidy(run)
        self.accelerator.wait_for_everyone()
        checkpoint = checkpoint_to_resume(resume_from, args.output_dir)
        goes_on = checkpoint is not None and Path(checkpoint).resolve().parent == run.resolve()
        # One that trains for a second time goes over its own checkpoints.
        if writes and self.identity is None and not goes_on:
            check_no_other_run(run, args.overwrite_output)
        self.identity = self.find_identity()
        if checkpoint is not None and self.identity is not None:
            check_same_run(checkpoint, self.identity, args.resume_changed)
        self.accelerator.wait_for_everyone()
        if writes_first and args.overwrite_output and not goes_on:
            for earlier in checkpoints_in(run):
                remove(earlier)
        self.accelerator.wait_for_everyone()
        return checkpoint

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """As in `Trainer`, but the best checkpoint is known by its step: since the run began, its folder may have moved."""
        counts = max_steps, num_update_steps_per_epoch, num_train_epochs
        found = super()._init_training_state(*counts, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None and self.state.best_global_step:
            best = Path(resume_from_checkpoint).parent / f"checkpoint-{self.state.best_global_step}"
            if best.is_dir():
                self.state.best_model_checkpoint = str(best)
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, but a run that is resumed where it ended has no step to do; Trainer looks only after one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `Trainer`, but a loss that is not finite stops the run before the weights take it in."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise not_finite("loss", loss, self.state.global_step + 1, self.args.output_dir)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, but weights that a gradient has spoilt are not saved."""
        # With a gradient scaler, such a step is left out.
        is_last = self.state.global_step >= self.state.max_steps
        is_due = is_last or self.control.should_log or self.control.should_save or self.control.should_evaluate
        if is_due and grad_norm is not None and self.accelerator.scaler is None:
            grad_norm = torch.as_tensor(grad_norm)
            if not torch.isfinite(grad_norm):
                raise not_finite("gradient's norm", grad_norm, self.state.global_step, self.args.output_dir)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _evaluate(self, trial, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.state.global_step >= self.state.max_steps and self.saves_before_last_evaluation:
            self.save_model()
            if self.control.should_save:
                # Afterwards it is saved once more, with what was found.
                self._save_checkpoint(self.model, trial)
        return super()._evaluate(trial, *args, **kwargs)

    def _get_output_dir(self, trial):
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._stages_checkpoint else folder

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self._stages_checkpoint:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model, trial):
        """As in `Trainer`, but beside its place, to which it is moved when every process has written its part."""
        staged = StagedCheckpoint(
            Path(self._get_output_dir(trial)), self.state.global_step, self.args, self.accelerator
        )
        staged.begin()
        best_before, self._stages_checkpoint = self.state.best_model_checkpoint, True
        try:
            super()._save_checkpoint(model, trial)
            # Trainer looks for the best checkpoint where it writes this one.
            is_best = self.state.best_global_step == self.state.global_step
            self.state.best_model_checkpoint = str(staged.final) if is_best else best_before
            if self.args.should_save:
                self.state.save_to_json(str(staged.folder / TRAINER_STATE_NAME))
        except (OSError, RuntimeError) as error:
            raise staged.failure(error) from error
        finally:
            self._stages_checkpoint = False
        staged.publish(self.identity)
        if self.args.should_save:
            rotate(staged.final, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staged.final))
