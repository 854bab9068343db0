"""A `Trainer` whose checkpoints are whole, that mixes them with no other run's, and that saves nothing that is not finite."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from ..checkpoints.atomic_folders import writing_folder
from .run_folder import (
    UNFINISHED,
    StagedCheckpoint,
    check_no_other_run,
    check_same_run,
    checkpoint_to_resume,
    checkpoints_in,
    remove,
    rotate,
    tidy,
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
        resumed_from: the checkpoint that training goes on from, until its first batches are there.
        saves_before_last_evaluation: whether the model, and a checkpoint if one is due, are saved after the last step, so that an
            evaluation that fails loses nothing.
    """

    saves_before_last_evaluation = False
    identity: dict[str, Any] | None = None
    resumed_from: str | None = None
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
            self.resumed_from = self._checked_start(resume_from_checkpoint, writes, writes_first)
            return super().train(self.resumed_from, *args, **kwargs)

    def find_identity(self) -> dict[str, Any] | None:
        """What the checkpoints of this run depend on; `None` notes nothing and compares nothing."""
        return None

    def noted_identity(self) -> dict[str, Any] | None:
        """What a checkpoint that is saved now says of its run; `None` for nothing."""
        return self.identity

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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As in `Trainer`; a run with other settings keeps what the optimizer has learned, and takes its own rates and decay."""
        own = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not getattr(self.args, "resume_changed", False):
            return
        groups, schedule = self.optimizer.param_groups, self.lr_scheduler
        for group, settings in zip(groups, own, strict=True):
            group.update(settings)
        # transformers' schedules are factors of the rate that a run begins with, by step.
        if not hasattr(schedule, "lr_lambdas"):
            return
        schedule.base_lrs = [group["initial_lr"] for group in groups]
        for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(schedule.last_epoch)
        schedule._last_lr = [group["lr"] for group in groups]

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
        staged.publish(self.noted_identity())
        if self.args.should_save:
            rotate(staged.final, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staged.final))
