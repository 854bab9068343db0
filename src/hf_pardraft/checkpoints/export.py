"""Writing a drafter in somebody else's layout: its weights under their names, bit by bit, and a config.json that they read."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedConfig

from ..models.base import ParallelDrafter
from ..models.modeling_pard import VOCABULARY_MAPS
from .checksums import add_checksums
from .layouts import NATIVE, layout_for, without
from .published import class_of_config
from .saving import checksummed_files
from .vocabulary import save_vocabulary
from .weights import NAMED


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as a dict, without what every config of transformers has and says nothing about a drafter."""
    common = PreTrainedConfig().to_dict()
    fields = config.to_dict()
    return {name: value for name, value in fields.items() if name not in common or value != common[name]}


def own_weights(drafter: ParallelDrafter) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint of a drafter holds: tied ones once, under the name that others read."""
    weights = drafter.state_dict()
    return {name: weight for name, weight in weights.items() if name not in drafter.all_tied_weights_keys}


def check_weights(config: PreTrainedConfig, weights: dict[str, torch.Tensor]) -> None:
    """Raise a `ValueError` unless these are the weights of a drafter with this config, all of them and no other.

    Of our own class, that is: one that somebody has derived from it may have more, and serving stacks skip what they don't know.
    That our classes have the weights that docs/formats.md lists is tested with published checkpoints, and with readers that don't
    know our classes.
    """
    with torch.device("meta"):
        expected = own_weights(class_of_config(config)(config))
    found, allowed = ({name: tuple(w.shape) for name, w in each.items()} for each in (weights, expected))
    wrong = sorted(name for name in found.keys() | allowed.keys() if found.get(name) != allowed.get(name))
    if wrong:
        told = "; ".join(f"{name}: found {found.get(name)}, expected {allowed.get(name)}" for name in wrong[:NAMED])
        raise ValueError(
            f"these weights are not those of a {config.drafter_kind} checkpoint ({told}), and a serving stack would skip them"
        )


def check_export(drafter: ParallelDrafter, layout_name: str) -> None:
    """Raise a `ValueError` if a drafter can't be written in a layout; the message says what to do instead."""
    if layout_name != NATIVE:
        config_and_weights(drafter, layout_name)


def config_and_weights(drafter: ParallelDrafter, layout_name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and weights of a drafter in a layout.

    Raises:
        ValueError: if the layout can't hold it, or its weights are not exactly those of its kind.
    """
    layout, fields = layout_for(layout_name, drafter.config.drafter_kind), fields_of(drafter.config)
    if fields.get("draft_vocab_size") is None:
        # Layouts that know of no draft vocabulary have no field for it.
        fields = without(fields, "draft_vocab_size", "own_head")
    config, weights = layout.write_config(drafter, fields), own_weights(drafter)
    check_weights(drafter.config, weights)
    return config, {layout.name_of(name): weight.detach().cpu().contiguous() for name, weight in weights.items()}


def export_drafter(drafter: ParallelDrafter, folder: str | Path, layout_name: str, max_shard_size: str = "5GB") -> None:
    """Write a drafter into a folder, in a layout.

    Args:
        drafter: the drafter; its weights are written in the dtypes that they have.
        folder: an existing folder.
        layout_name: "native", or one of [`LAYOUTS`].
        max_shard_size: a larger checkpoint becomes several files.

    Raises:
        ValueError: see [`config_and_weights`].
    """
    if layout_name == NATIVE:
        drafter.save_pretrained(folder, max_shard_size=max_shard_size)
        return
    config, weights = config_and_weights(drafter, layout_name)
    save_torch_state_dict(weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    if drafter.draft_token_ids is not None and not weights.keys() & {*VOCABULARY_MAPS}:
        # Beside weights that stay an ordinary causal LM's: readers that know nothing of it propose all tokens.
        save_vocabulary(drafter, folder)
    for path in checksummed_files(folder):
        add_checksums(path)
    text = json.dumps(config, indent=2, sort_keys=True)
    (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
    drafter.generation_config._from_model_config = False
    drafter.generation_config.save_pretrained(folder)
