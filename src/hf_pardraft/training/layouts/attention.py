"""How a drafter attends while it trains: with dense masks, or with flex attention where that is faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.masks import additive, attention_windows
from .masks import BlockQueries, PrefixQueries, dense_mask, flex_mask

FLEX = "flex_attention"
ATTENTIONS = ("auto", "dense", "flex")


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """What attention computes in, autocast considered; an additive mask has to be of that dtype."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def layout_mask(queries: PrefixQueries | BlockQueries, drafter: PreTrainedModel) -> Any:
    """The mask of a layout as the drafter's attention takes it: a `BlockMask`, or `(batch, 1, queries, keys)` to add.

    One, or one per layer type if the drafter has several.

    Raises:
        ValueError: for layers that see chunks of a text: the layouts have no such mask.
    """
    windows = attention_windows(drafter.config)
    if "chunked_attention" in windows:
        raise ValueError(
            f"can't train a drafter with chunked attention, which the {drafter.config.model_type} model has"
        )
    masks = {}
    for layer_type, window in windows.items():
        if drafter.config._attn_implementation == FLEX:
            masks[layer_type] = flex_mask(queries, window, compiled=queries.block.device.type != "cpu")
        else:
            masks[layer_type] = additive(dense_mask(queries, window), compute_dtype(drafter))
    return masks if len(masks) > 1 else next(iter(masks.values()))


def training_attention(drafter: PreTrainedModel, setting: str, device: torch.device) -> str:
    """The attention implementation to train with.

    Args:
        drafter: the model.
        setting: "dense": the drafter's own, with a mask over all queries and keys. "flex": flex attention, which skips what
            sees nothing. "auto": "flex" on a CUDA device if the drafter supports it.
        device: where it will train.

    Raises:
        ValueError: if flex attention is asked for where it can't train.
    """
    own = drafter.config._attn_implementation
    obstacle = flex_obstacle(drafter, device)
    if setting == "flex" and obstacle:
        raise ValueError(f'can\'t train with flex attention: {obstacle}. Use training_attention="dense"')
    if setting == "flex" or (setting == "auto" and not obstacle):
        return FLEX
    # A dense mask means nothing to these kernels.
    return "sdpa" if own == FLEX or own.startswith("flash") else own


def flex_obstacle(drafter: PreTrainedModel, device: torch.device) -> str:
    """Why this drafter can't train with flex attention there; empty if it can."""
    if device.type != "cuda":
        return f"it has no backward pass on {device.type}, only on CUDA devices"
    if not drafter._supports_flex_attn:
        return f"a {type(drafter).__name__} does not support it"
    if drafter.config.to_dict().get("attention_dropout"):
        return "it knows no attention_dropout, and the drafter's config sets one"
    return ""


@contextmanager
def attending_with(drafter: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let a drafter attend in another way for a while: what decodes or is saved keeps its own."""
    own = drafter.config._attn_implementation
    drafter.config._attn_implementation = implementation
    try:
        yield
    finally:
        drafter.config._attn_implementation = own
