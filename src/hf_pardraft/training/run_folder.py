"""The folder of a run: checkpoints that are there in full or not at all, and which of them a run may go on from or remove.

A checkpoint is written beside its place, and moved to it when it is complete.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

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
    before, after = (((run or {}).get("drafter") or {}).get("draft_vocab_size") for run in (found, identity))
    if changed and found is not None and before != after:
        raise ValueError(
            f"{checkpoint} is of a drafter that proposes {before or 'all'} tokens (draft_vocab_size), and this run's proposes "
            f"{after or 'all'}, which can't change on the way: ask for as many, or train the checkpoint's drafter in another run"
        )
    told = [] if found is None or changed else differences(found, identity)
    if told:
        raise ValueError(
            f"{checkpoint} was trained with {'; '.join(told)}: use the same settings, another output, or pass --resume-changed "
            "(resume_changed=True) to go on with the new ones"
        )
