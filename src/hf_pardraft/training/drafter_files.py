"""A `Trainer` whose folders hold drafters: adapters merged or kept, weights beside the main file, cards, what is pushed."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.training_args import HubStrategy

from ..checkpoints.atomic_files import is_no_room
from ..checkpoints.atomic_folders import CARD, replaced_files
from ..checkpoints.checksums import check_checksums
from ..checkpoints.saving import checksummed_files
from ..models.base import ParallelDrafter
from .adapters import is_adapted, save_drafter_config, save_merged
from .checkpointing import WholeCheckpointTrainer

# What a drafter has in its folder besides the files of any model.
DRAFTER_FILES = ("*.safetensors", "*/*.safetensors", "*.py", "*/*.py")


class DrafterFilesTrainer(WholeCheckpointTrainer):
    """Subclasses set `drafter`, which is `model` or what PEFT has wrapped in it."""

    drafter: ParallelDrafter

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; of an adapted drafter the adapter (`keep_adapter`), or all of it.

        Raises:
            OSError: if it can't be written, whatever the writer raises.
        """
        folder = output_dir or self.args.output_dir
        try:
            super().save_model(output_dir, _internal_call)
        except Exception as error:
            if not is_of_writing(error):
                raise
            raise OSError(f"the drafter could not be written to {folder}: {error}") from error

    @property
    def _merges(self) -> bool:
        """Whether what is saved now is an adapted drafter as an ordinary one; checkpoints keep the adapter, to be trained on."""
        return is_adapted(self.model) and not self.args.keep_adapter and not self._stages_checkpoint

    def _save(self, output_dir=None, state_dict=None):
        # The arguments are saved as they are, and a token is nobody else's to know.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            self._save_drafter(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def _save_drafter(self, output_dir=None, state_dict=None):
        folder = Path(output_dir or self.args.output_dir)
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        # A checkpoint is moved to its place as a whole, anyway.
        with nullcontext(folder) if self._stages_checkpoint else replaced_files(folder) as workspace:
            self._write(workspace, folder, state_dict)

    def _write(self, workspace: Path, folder: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
        """Write into `workspace` what goes into `folder`."""
        if self._merges:
            self._name_card(workspace, folder)
            save_merged(self.model, workspace)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(workspace)
            torch.save(self.args, workspace / TRAINING_ARGS_NAME)
        elif is_adapted(self.model):
            super()._save(str(workspace), state_dict)
            save_drafter_config(self.drafter, workspace)
        else:
            self._name_card(workspace, folder)
            super()._save(str(workspace), state_dict)

    def _name_card(self, workspace: Path, folder: Path) -> None:
        """Write the card of a drafter that goes to the Hub under its name there; `save_pretrained` knows the folder's alone."""
        is_published = self.hub_model_id is not None and folder == Path(self.args.output_dir)
        if is_published and not (folder / CARD).exists():
            ParallelDrafter.package().write_card(self.drafter, workspace, self.hub_model_id)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """As in `Trainer`, and what the drafter keeps outside the main file.

        Raises:
            ValueError: if weights of the checkpoint are damaged.
        """
        for path in checksummed_files(resume_from_checkpoint):
            check_checksums(path)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_separate_weights(resume_from_checkpoint)

    def _load_best_model(self):
        """As in `Trainer`, and what the drafter keeps outside the main file."""
        super()._load_best_model()
        self._load_separate_weights(self.state.best_model_checkpoint)

    def _load_separate_weights(self, checkpoint: str) -> None:
        # An adapter, and what FSDP and DeepSpeed write of their own for resuming, have all trained weights in them.
        if not (is_adapted(self.model) or self.is_fsdp_enabled or self.is_deepspeed_enabled):
            self.drafter.load_separate_weights(checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder):
        """As in `Trainer`, with all that the checkpoint has of the drafter. An adapter that is to be merged waits for the end."""
        pushes = self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END
        if self._stages_checkpoint or not pushes or self._merges:
            return
        for pattern in DRAFTER_FILES:
            for file in Path(checkpoint_folder).glob(pattern):
                copy = Path(self.args.output_dir) / file.relative_to(checkpoint_folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """The drafter's own card, not the one that a `Trainer` writes, with what is said here in its metadata.

        Args:
            finetuned_from: the target's repository.
            tasks, dataset_args: of no use here: measured results come from `pardraft card --results`.
            others: as in `Trainer`.
        """
        folder = Path(self.args.output_dir)
        if is_adapted(self.model) and self.args.keep_adapter:
            super().create_model_card(
                language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )
            return
        if not self.is_world_process_zero():
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CARD).exists():
            ParallelDrafter.package().write_card(self.drafter, folder, self.hub_model_id or folder.resolve().name)
        card = ModelCard.load(folder / CARD)
        given: dict[str, Any] = {
            "language": language,
            "license": license,
            "model_name": model_name,
            "base_model": finetuned_from,
            "datasets": listed(dataset_tags) or listed(dataset),
            "tags": list(dict.fromkeys([*(card.data.tags or []), *listed(tags)])),
        }
        for field, value in given.items():
            if value:
                setattr(card.data, field, value)
        card.save(folder / CARD)


def is_of_writing(error: Exception) -> bool:
    """Whether an error says that a file can't be written; each library has a way of its own."""
    # Of torch.save, and of tokenizers, which raises nothing more particular.
    is_theirs = "PytorchStreamWriter" in str(error) or (type(error) is Exception and "os error" in str(error))
    return is_theirs or is_no_room(error)


def listed(values: str | list[str] | None) -> list[str]:
    """One value, several or none, as a list."""
    return [values] if isinstance(values, str) else list(values or [])
