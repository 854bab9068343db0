"""What the package does for drafters and the code that travels with them does not; imported when it is called for."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .models.base import PairedConfig, ParallelDrafter


class PackageServices:
    """[`~.models.base.DrafterServices`], which `import hf_pardraft` sets; see there."""

    def native_fields(self, config_class: type[PairedConfig], fields: dict[str, Any]) -> dict[str, Any]:
        from .checkpoints.published import native_fields

        return native_fields(config_class, fields)

    def load(self, drafter_class: type[ParallelDrafter], name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        from .checkpoints.loading import load_drafter

        return load_drafter(drafter_class, name_or_path, *model_args, **kwargs)

    def save(self, drafter: ParallelDrafter, folder: Any, **kwargs: Any) -> None:
        from .checkpoints.saving import save_drafter

        save_drafter(drafter, folder, self.write_card, **kwargs)

    def write_card(self, drafter: ParallelDrafter, folder: Path, name: str) -> None:
        from .hub.cards import write_card

        write_card(drafter, folder, name)

    def push(self, drafter: ParallelDrafter, repo_id: str, **kwargs: Any) -> Any:
        from .hub.push import push_drafter

        return push_drafter(drafter, repo_id, **kwargs)

    def fresh(self, drafter_class: type[ParallelDrafter], base: Any, *args: Any, **kwargs: Any) -> ParallelDrafter:
        from .pairing.fresh import fresh_drafter

        return fresh_drafter(drafter_class, base, *args, **kwargs)

    def check_target(self, drafter: ParallelDrafter, target: PreTrainedModel, taps: list[int]) -> None:
        from .checkpoints.vocabulary import check_vocabulary_is_named
        from .pairing.remembered import warn_if_other_target
        from .pairing.target_checks import check_readable

        check_vocabulary_is_named(drafter)
        check_readable(drafter, target, taps)
        warn_if_other_target(drafter, target)

    def note_target(self, drafter: ParallelDrafter, target: PreTrainedModel, *args: Any) -> None:
        from .pairing.remembered import note_pairing

        note_pairing(drafter, target, *args)

    def set_draft_vocabulary(self, drafter: ParallelDrafter, token_ids: Any, target: PreTrainedModel | None) -> None:
        from .pairing.draft_vocabulary import set_draft_vocabulary

        set_draft_vocabulary(drafter, token_ids, target)

    def draft_head(self, drafter: ParallelDrafter, head: nn.Module) -> nn.Module:
        from .pairing.gathered_rows import draft_head

        return draft_head(drafter, head)

    def num_layer_outputs(self, target: PreTrainedModel) -> int:
        from .pairing.target_checks import num_layer_outputs

        return num_layer_outputs(target)
