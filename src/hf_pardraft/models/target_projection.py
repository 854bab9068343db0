"""PARD-2's projection of a target's hidden states: which states a row gets, and where the weights are kept.

The input embedding of token t is E(token_t) + scale * W f_{t-1}, with f the tapped hidden states of the target side by side
and f_{-1} = 0 (PARD-2, AMD). A mask gets what the last real token gets.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import safe_save_file
from transformers.utils import cached_file

from .base import DraftInputs, StaticDraftInputs, are_real, cached_arange, hub_arguments
from .checkpoint_files import check_beside, describe_tensors, find_weight_files, is_safetensors, read_tensors
from .checkpoint_weights import all_finite
from .checksums import add_checksums, check_checksums
from .configuration_pard import PardConfig, default_target_layers
from .pairing import describe_target
from .tap_checks import check_can_be_tapped, check_tapped_states, check_taps, num_layer_outputs, text_fact

PROJECTION = "target_proj"
# A folder of its own: what stays in the root is an ordinary causal LM, of which other tools load every safetensors file.
PROJECTION_FOLDER = "target_projection"
PROJECTION_FILES = (f"{PROJECTION_FOLDER}/model.safetensors", "warp_model.safetensors", "warp_model.bin")
# Where published repositories keep the drafter.
PUBLISHED_FOLDER = "pard_model"


def check_pard2_config(config: PardConfig) -> None:
    """Raise a `ValueError` for a PARD-2 configuration that does not say what is projected."""
    if config.spd_type != "pard2":
        return
    layers, width, scale = config.pard2_target_layers, config.pard2_target_dim, config.pard2_scale
    if not layers or not width or width % len(layers) or scale is None:
        raise ValueError(
            "a PARD-2 drafter needs pard2_target_layers, pard2_target_dim (their width, side by side) and pard2_scale, got "
            f"{layers}, {width} and {scale}: set them in config.json, or make the drafter with PardDrafter.from_causal_lm(..., "
            "target=target)"
        )


def projection_fields(target: PreTrainedModel, target_layers: list[int] | None, target_scale: float) -> dict[str, Any]:
    """The fields of a configuration that make a fresh PARD-2 drafter for `target`.

    Raises:
        ValueError: if the target has no such hidden states.
    """
    kind = "PARD-2 drafter"
    check_can_be_tapped(kind, target)
    layers = default_target_layers(num_layer_outputs(target)) if target_layers is None else list(target_layers)
    check_taps(kind, target, layers)
    check_tapped_states(kind, target, layers)
    return {
        **describe_target(target),
        "pard2_target_layers": layers,
        "pard2_target_dim": len(layers) * text_fact(target, "hidden_size"),
        "pard2_scale": target_scale,
        "pard2_proj_bias": False,
    }


def new_projection(config: PardConfig) -> nn.Linear | None:
    """The projection of a fresh drafter, which adds nothing: training starts from the PARD drafter. `None` for PARD."""
    if config.pard2_target_layers is None:
        return None
    projection = nn.Linear(config.pard2_target_dim, config.hidden_size, bias=bool(config.pard2_proj_bias))
    for parameter in projection.parameters():
        nn.init.zeros_(parameter)
    return projection


def one_place_behind(features: torch.Tensor) -> torch.Tensor:
    """What enters the projection at each token of a text: `(batch, length, dim)`, each token's predecessor's features."""
    return nn.functional.pad(features, (0, 0, 1, -1))


def features_behind(context: DraftInputs) -> torch.Tensor:
    """What enters the projection at each new token of a round: `(batch, new, dim)`, zero where no features are known.

    Features end just before the anchor, so that, both aligned on the right, each new token meets its predecessor's. None are
    known for the text's first token, and where an earlier call's cache spared the target the reading.
    """
    batch, num_read = context.features.shape[:2]
    features = context.features
    if context.feature_counts is not None:
        real = are_real(context.feature_counts, batch, num_read, features.device)
        features = features.masked_fill(~real[:, :, None], 0)
    return nn.functional.pad(features, (0, 0, context.new_ids.shape[1] - num_read, 0))


def feature_inputs(context: DraftInputs, depth: int, config: PardConfig) -> dict[str, torch.Tensor]:
    """What a forward over the new tokens and `depth - 1` masks needs of the target's features; nothing if there are none.

    Raises:
        ValueError: if the features are not of the width that the projection takes.
    """
    if context.features is None:
        return {}
    if context.features.shape[2] != config.pard2_target_dim:
        raise ValueError(
            f"the drafter takes features of size {config.pard2_target_dim} (pard2_target_dim), got "
            f"{context.features.shape[2]}: pass the target's hidden states {config.pard2_target_layers}, side by side"
        )
    batch, num_new = context.new_ids.shape
    # Masks take what the anchor takes, the last of the new tokens.
    rows = cached_arange(0, num_new + depth - 1, context.features.device).clamp(max=num_new - 1)
    return {"target_features": features_behind(context), "feature_rows": rows.expand(batch, -1)}


def feature_rows_of(news: StaticDraftInputs, num_masks: int) -> dict[str, torch.Tensor]:
    """[`feature_inputs`] for rounds of fixed shapes."""
    if news.features is None:
        return {}
    width = news.ids.shape[1]
    rows = torch.arange(width, device=news.ids.device).expand(len(news.ids), -1)
    anchors = news.anchors.expand(-1, num_masks)
    return {"target_features": news.features, "feature_rows": torch.cat([rows, anchors], dim=1)}


def find_projection(folder, **source: Any) -> str | None:
    """The file with the projection of a drafter in `folder` (or on the Hub); `None` if there is none.

    Raises:
        ValueError: if it is a link that leads out of the folder.
    """
    for name in PROJECTION_FILES:
        found = cached_file(folder, name, _raise_exceptions_for_missing_entries=False, **source)
        if found is not None:
            check_beside(found, Path(found).parents[len(Path(name).parts) - 1])
            return found
    return None


def is_among_weights(folder, kwargs: dict[str, Any], has_bias: bool) -> bool:
    """Whether a drafter's own weights include the projection, as in the checkpoints of PARD-2's authors' trainer.

    Args:
        folder: or a repository on the Hub.
        kwargs: of `from_pretrained`.
        has_bias: what its config says.

    Raises:
        OSError: if there are no weights.
        ValueError: if a part of the projection is there.
    """
    names = kwargs["state_dict"].keys() if kwargs.get("state_dict") is not None else names_of_weights(folder, kwargs)
    found = {name for name in names if name.startswith(f"{PROJECTION}.")}
    expected = {f"{PROJECTION}.weight", *([f"{PROJECTION}.bias"] if has_bias else [])}
    if found and found != expected:
        raise ValueError(
            f"the projection among the weights of {folder} does not fit config.json (pard2_proj_bias): expected "
            f"{sorted(expected)}, found {sorted(found)}"
        )
    return bool(found)


def names_of_weights(folder, kwargs: dict[str, Any]) -> set[str]:
    """What the weights of a folder or repository are called in its files."""
    choice = {name: kwargs[name] for name in ("use_safetensors", "variant") if name in kwargs}
    paths = find_weight_files(folder, **choice, **hub_arguments(kwargs))
    return set(describe_tensors(paths))


def with_subfolder(folder, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that lead to the drafter in a published repository, if its root holds none."""
    source = {name: value for name, value in hub_arguments(kwargs).items() if name != "subfolder"}
    if kwargs.get("subfolder"):
        return kwargs
    for subfolder in ("", PUBLISHED_FOLDER):
        source["subfolder"] = subfolder
        if cached_file(folder, "config.json", _raise_exceptions_for_missing_entries=False, **source) is not None:
            return {**kwargs, "subfolder": subfolder}
    return kwargs


def without_projection(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a PARD drafter of a PARD-2 configuration."""
    plain = {"spd_type": "pard", "pard2_target_layers": None}
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        return {**kwargs, **plain}
    config = copy.deepcopy(kwargs["config"])
    config.update(plain)
    return {**kwargs, "config": config}


def load_projection(projection: nn.Linear, path: str) -> None:
    """Copy the weights in `path` into `projection`.

    Raises:
        ValueError: if the file is damaged, or a weight is missing, left over, of another shape or no number.
    """
    facts = describe_tensors([path])
    if is_safetensors(path):
        check_checksums(path)
    found = {name: tensor.shape for name, tensor in facts.items()}
    expected = {f"{PROJECTION}.{name}": tuple(weight.shape) for name, weight in projection.state_dict().items()}
    if found != expected:
        raise ValueError(
            f"the projection in {path} does not fit config.json: expected {expected} (pard2_target_dim, hidden_size and "
            f"pard2_proj_bias), found {found}"
        )
    if not all(tensor.is_floating_point for tensor in facts.values()):
        raise ValueError(f"the projection in {path} should hold floating-point numbers: get the file again")
    if projection.weight.is_meta:
        return
    weights = read_tensors(facts)
    if not all(map(all_finite, weights.values())):
        raise ValueError(f"the projection in {path} holds infinities or NaN: the file is damaged, get it again")
    projection.load_state_dict({name.removeprefix(f"{PROJECTION}."): weight for name, weight in weights.items()})


def save_projection(weights: dict[str, torch.Tensor], folder) -> None:
    """Write the projection's weights, named as in the drafter's state dict, where [`find_projection`] looks first."""
    file = Path(folder) / PROJECTION_FILES[0]
    file.parent.mkdir(exist_ok=True)
    safe_save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, str(file), metadata={"format": "pt"}
    )
    add_checksums(file)
