"""Attention masks for rows of different lengths and for trees: which columns of a cache a query may see."""

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs


def visible_columns(row_lengths: list[int] | None, start: int, within: torch.BoolTensor) -> torch.BoolTensor:
    """Add the columns of the committed text to a mask over the new ones.

    Args:
        row_lengths: entries of each row in the cache; `None` if all have `start`.
        start: columns of the cache before this forward.
        within: `(batch, queries, new)`, which of the new columns a query sees.

    Returns:
        `(batch, queries, start + new)`.
    """
    if row_lengths is None or min(row_lengths) == start:
        return torch.nn.functional.pad(within, (start, 0), value=True)
    lengths = torch.tensor(row_lengths, device=within.device)
    past = torch.arange(start, device=within.device) < lengths[:, None]
    return torch.cat([past[:, None].expand(-1, within.shape[1], -1), within], dim=2)


def token_indices(
    row_lengths: list[int] | None, start: int, new_indices: torch.LongTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The index of each token in its row, which is what windows are measured in.

    Args:
        row_lengths, start: as in [`visible_columns`].
        new_indices: `(batch, new)`, indices of the new tokens counted from the end of their row.

    Returns:
        `(batch, new)` for the new tokens and `(batch, start + new)` for all columns.
    """
    batch = new_indices.shape[0]
    lengths = torch.tensor(row_lengths or [start] * batch, device=new_indices.device)[:, None]
    new = new_indices + lengths
    past = torch.arange(start, device=new_indices.device).expand(batch, -1)
    return new, torch.cat([past, new], dim=1)


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The layer types of a decoder's text config, and the size of their window or chunk; `None` sees all of the past."""
    layer_types, layer_kwargs = get_layer_types_and_kwargs(config)
    return {
        layer_type: kwargs.get("sliding_window")
        for layer_type, kwargs in zip(layer_types, layer_kwargs, strict=True)
        if layer_type != "dummy"
    }


def additive_masks(
    visible: torch.BoolTensor,
    windows: dict[str, int | None],
    indices: tuple[torch.LongTensor, torch.LongTensor] | None,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks of `(batch, 1, queries, columns)` to add to attention scores, as transformers' models take them.

    Args:
        visible: `(batch, queries, columns)`, for a layer that sees all of the past.
        windows: layer types, see [`attention_windows`].
        indices: token indices of queries and columns, see [`token_indices`]; needed if a layer type has a window.
        dtype: what attention computes in.

    Returns:
        One mask, or one per layer type if there are several. They are floats: a boolean mask is silently wrong in eager
        attention.
    """
    masks = {}
    for layer_type, size in windows.items():
        seen = visible
        if size is not None:
            queries, columns = indices[0][:, :, None], indices[1][:, None, :]
            if layer_type == "chunked_attention":
                seen = visible & (queries // size == columns // size)
            else:
                seen = visible & (columns > queries - size)
        masks[layer_type] = additive(seen, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def additive(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """`(batch, queries, columns)` to `(batch, 1, queries, columns)`: 0 where visible, else the lowest number of `dtype`."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)[:, None]
