"""A `Trainer` whose checkpoints are there in full or not at all, and that stops at what is not finite."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from .checkpoints import UNFINISHED, StagedCheckpoint, not_finite


class WholeCheckpointTrainer(Trainer):
    """See [`StagedCheckpoint`]; all arguments are those of `Trainer`."""

    _stages_checkpoint = False

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `Trainer`, but a loss that is not finite stops the run before the weights take it in."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise not_finite("loss", loss, self.state.global_step + 1, self.args.output_dir)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, but weights that a gradient has spoilt are not saved."""
        # With a gradient scaler, such a step is left out.
        is_due = self.control.should_log or self.control.should_save or self.control.should_evaluate
        if is_due and grad_norm is not None and self.accelerator.scaler is None:
            grad_norm = torch.as_tensor(grad_norm)
            if not torch.isfinite(grad_norm):
                raise not_finite("gradient's norm", grad_norm, self.state.global_step, self.args.output_dir)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

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
        staged.publish()
        if self.args.should_save:
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(staged.final.parent), limit, best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staged.final))
