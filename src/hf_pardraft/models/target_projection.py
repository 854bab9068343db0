"""PARD-2's projection of a target's hidden states: which states a token gets, and what the weights are called.

The input embedding of token t is E(token_t) + scale * W f_{t-1}, with f the tapped hidden states of the target side by side
and f_{-1} = 0 (PARD-2, AMD). A mask gets what the last real token gets.
"""

import torch
from torch import nn

from .configuration_pard import PardConfig
from .inputs import DraftInputs, StaticDraftInputs, are_real, cached_arange

PROJECTION = "target_proj"
# Ours is in a folder of its own: what stays in the root is an ordinary causal LM, of which other tools load every safetensors
# file. The others are as published.
PROJECTION_FILES = ("target_projection/model.safetensors", "warp_model.safetensors", "warp_model.bin")


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


def new_projection(config: PardConfig) -> nn.Linear | None:
    """The projection of a fresh drafter, which adds nothing: training starts from the PARD drafter. `None` for PARD."""
    if config.pard2_target_layers is None:
        return None
    projection = nn.Linear(config.pard2_target_dim, config.hidden_size, bias=bool(config.pard2_proj_bias))
    for parameter in projection.parameters():
        nn.init.zeros_(parameter)
    return projection


def features_before(inputs: DraftInputs) -> torch.Tensor:
    """What enters the projection at each new token of a round: `(batch, new, dim)`, zero where no features are known.

    Features end just before the anchor, so that, both aligned on the right, each new token meets its predecessor's. None are
    known for the text's first token, and where an earlier call's cache spared the target the reading.
    """
    batch, num_read = inputs.features.shape[:2]
    features = inputs.features
    if inputs.feature_counts is not None:
        real = are_real(inputs.feature_counts, batch, num_read, features.device)
        features = features.masked_fill(~real[:, :, None], 0)
    return nn.functional.pad(features, (0, 0, inputs.new_ids.shape[1] - num_read, 0))


def feature_inputs(inputs: DraftInputs, depth: int, config: PardConfig) -> dict[str, torch.Tensor]:
    """What a forward over the new tokens and `depth - 1` masks needs of the target's features; nothing if there are none.

    Raises:
        ValueError: if the features are not of the width that the projection takes.
    """
    if inputs.features is None:
        return {}
    if inputs.features.shape[2] != config.pard2_target_dim:
        raise ValueError(
            f"the drafter takes features of size {config.pard2_target_dim} (pard2_target_dim), got "
            f"{inputs.features.shape[2]}: pass the target's hidden states {config.pard2_target_layers}, side by side"
        )
    batch, num_new = inputs.new_ids.shape
    # Masks take what the anchor takes, the last of the new tokens.
    sources = cached_arange(0, num_new + depth - 1, inputs.features.device).clamp(max=num_new - 1)
    return {"target_features": features_before(inputs), "feature_rows": sources.expand(batch, -1)}


def feature_rows_of(inputs: StaticDraftInputs, num_masks: int) -> dict[str, torch.Tensor]:
    """[`feature_inputs`] for rounds of fixed shapes."""
    if inputs.features is None:
        return {}
    width = inputs.ids.shape[1]
    sources = torch.arange(width, device=inputs.ids.device).expand(len(inputs.ids), -1)
    anchors = inputs.anchor_columns.expand(-1, num_masks)
    return {"target_features": inputs.features, "feature_rows": torch.cat([sources, anchors], dim=1)}
