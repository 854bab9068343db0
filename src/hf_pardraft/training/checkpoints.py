"""Checkpoints that are there in full or not at all: written beside their place, and moved to it when they are complete."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

# No name that a search for checkpoints would take for one.
UNFINISHED = "unfinished-checkpoint"
REPLACED = "replaced"


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
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def publish(self) -> None:
        """Move it to its place; one of the same step that was there before goes only afterwards."""
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
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
    found = get_last_checkpoint(folder) if resume_from is True and Path(folder).is_dir() else resume_from
    if found is None or found is True:
        raise ValueError(
            f"expected a checkpoint to resume from in {folder}, found none: leave resume_from_checkpoint out"
        )
    if not (Path(found) / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"{found} is no complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing. Resume from "
            "another one"
        )
    return str(found)


def not_finite(what: str, value: torch.Tensor, step: int, folder: str) -> FloatingPointError:
    """What to raise when training can't go on; the checkpoints in `folder` know nothing of it."""
    return FloatingPointError(
        f"the {what} became {value.item()} at step {step}: training has stopped, and the checkpoints in {folder} are intact. "
        "Lower learning_rate or max_grad_norm, train in bfloat16 rather than float16, or look for damaged examples; "
        "resume_from_checkpoint=True goes on from the last checkpoint"
    )
