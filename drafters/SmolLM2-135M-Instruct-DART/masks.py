"""Attention masks for items of different lengths and for trees: which columns of a cache a query may see."""

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from .cache import GrowingCache, HeldColumns, StaticColumns


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The layer types of a decoder's text config, and the size of their window or chunk; `None` sees all of the past."""
    layer_types, layer_kwargs = get_layer_types_and_kwargs(config)
    return {
        layer_type: kwargs.get("sliding_window")
        for layer_type, kwargs in zip(layer_types, layer_kwargs, strict=True)
        if layer_type != "dummy"
    }


def in_reach(layer_type: str, size: int, queries: torch.LongTensor, places: torch.LongTensor) -> torch.BoolTensor:
    """Which columns lie in a query's chunk or window of `size`, `(batch, queries, columns)`.

    Args:
        layer_type: see [`attention_windows`].
        size: of its windows.
        queries, places: `(batch, queries)` and `(batch, columns)`, the index of each token in its text.
    """
    queries, places = queries[:, :, None], places[:, None, :]
    return places // size == queries // size if layer_type == "chunked_attention" else places > queries - size


def additive_masks(
    within: torch.BoolTensor,
    new_indices: torch.LongTensor,
    windows: dict[str, int | None],
    columns: HeldColumns | StaticColumns | dict[str, HeldColumns],
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks of `(batch, 1, queries, keys)` to add to attention scores, as transformers' models take them.

    Args:
        within: `(batch, queries, new)`, which of the new columns a query sees; the last ones are the queries' own.
        new_indices: `(batch, new)`, indices of the new tokens counted from the end of their text.
        windows: layer types, see [`attention_windows`].
        columns: where the committed text is, if need be for each layer type.
        dtype: what attention computes in.

    Returns:
        One mask, or one per layer type if there are several. They are floats: a boolean mask is silently wrong in eager
        attention.
    """
    masks = {}
    for layer_type, size in windows.items():
        held = columns[layer_type] if isinstance(columns, dict) else columns
        seen = held.visible(within)
        if size is not None:
            new, places = held.token_indices(new_indices)
            seen = seen & in_reach(layer_type, size, new[:, -within.shape[1] :], places)
        masks[layer_type] = additive(seen, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def causal_masks(
    real: torch.BoolTensor,
    windows: dict[str, int | None],
    columns: HeldColumns | StaticColumns | dict[str, HeldColumns],
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks for items of different lengths: each sees its own committed text, and is causal after it.

    Args:
        real: `(batch, new)`, which of the new columns are no padding.
        windows, columns, dtype: as in [`additive_masks`], whose masks these are.
    """
    # Padding sees itself, since a query that sees nothing gives NaN in some attention implementations.
    own = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    within = (own.new_ones(own.shape).tril() & real[:, None]) | own
    return additive_masks(within, real.cumsum(dim=1) - 1, windows, columns, dtype)


def padded_masks(
    real: torch.BoolTensor, windows: dict[str, int | None], cache: GrowingCache, dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """[`causal_masks`] for a forward on a cache that grows, with the new tokens padded on the left.

    On an empty cache it is `real` as ones and zeros, of which a model makes its own masks with less memory than these take.
    """
    if cache.get_seq_length() == 0:
        return real.long()
    return causal_masks(real, windows, cache.held_columns(), dtype)


def additive(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """`(batch, queries, columns)` to `(batch, 1, queries, columns)`: 0 where visible, else the lowest number of `dtype`."""
    hidden = ~visible
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[:, None]
