"""Checkpoints that are there in full or not at all: written beside their place, and moved to it when they are complete."""

import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

# No name that a search for checkpoints would take for one.
UNFINISHED = "unfinished-checkpoint"
REPLACED = "replaced"


def discard_unfinished(folder: Path) -> None:
    """Remove what an interrupted run left of a checkpoint."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)


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


def write_failure(step: int, folder: Path, error: Exception) -> OSError:
    """What to raise when a checkpoint can't be written."""
    latest = get_last_checkpoint(folder) if folder.is_dir() else None
    kept = f"the checkpoint before it, {latest}, is intact" if latest else "there is no earlier one"
    return OSError(
        f"the checkpoint of step {step} could not be written to {folder}: {error}. Nothing of it was kept, and {kept}. Make "
        "room, lower save_total_limit or choose another output_dir, and go on with resume_from_checkpoint=True"
    )
