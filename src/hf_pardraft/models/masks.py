"""Attention masks for items of different lengths and for trees: which columns of a cache a query may see."""

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from .cache import HeldColumns


def visible_columns(columns: HeldColumns, within: torch.BoolTensor) -> torch.BoolTensor:
    """Add the columns of the committed text to a mask over the new ones.

    Args:
        columns: where the committed text is.
        within: `(batch, queries, new)`, which of the new columns a query sees.

    Returns:
        `(batch, queries, columns + new)`.
    """
    start, held = columns.num_columns, columns.held
    if held is None or min(held) == start:
        return torch.nn.functional.pad(within, (start, 0), value=True)
    past = torch.arange(start, device=within.device) < torch.tensor(held, device=within.device)[:, None]
    return torch.cat([past[:, None].expand(-1, within.shape[1], -1), within], dim=2)


def token_indices(columns: HeldColumns, new_indices: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The index of each token in its text, which is what windows and chunks are measured in.

    Args:
        columns: where the committed text is.
        new_indices: `(batch, new)`, indices of the new tokens counted from the end of their text.

    Returns:
        `(batch, new)` for the new tokens and `(batch, columns + new)` for all columns.
    """
    batch, device = new_indices.shape[0], new_indices.device
    past = torch.arange(columns.num_columns, device=device).expand(batch, -1)
    held = torch.tensor(columns.held or [columns.num_columns] * batch, device=device)[:, None]
    if columns.dropped is not None:
        dropped = torch.tensor(columns.dropped, device=device)[:, None]
        past, held = past + dropped, held + dropped
    return new_indices + held, torch.cat([past, new_indices + held], dim=1)


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
    columns: HeldColumns | dict[str, HeldColumns],
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks of `(batch, 1, queries, columns + new)` to add to attention scores, as transformers' models take them.

    Args:
        within: `(batch, queries, new)`, which of the new columns a query sees; the last ones are the queries' own.
        new_indices: `(batch, new)`, see [`token_indices`].
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
        seen = visible_columns(held, within)
        if size is not None:
            new, places = token_indices(held, new_indices)
            seen = seen & in_reach(layer_type, size, new[:, -within.shape[1] :], places)
        masks[layer_type] = additive(seen, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def causal_masks(
    real: torch.BoolTensor,
    windows: dict[str, int | None],
    columns: HeldColumns | dict[str, HeldColumns],
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks for items padded on the left: each sees its own committed text, and is causal after it.

    Args:
        real: `(batch, new)`, which of the new columns are no padding.
        windows, columns, dtype: as in [`additive_masks`], whose masks these are.
    """
    # Padding sees itself, since a query that sees nothing gives NaN in some attention implementations.
    own = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
    within = (own.new_ones(own.shape).tril() & real[:, None]) | own
    return additive_masks(within, real.cumsum(dim=1) - 1, windows, columns, dtype)


def additive(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """`(batch, queries, columns)` to `(batch, 1, queries, columns)`: 0 where visible, else the lowest number of `dtype`."""
    hidden = ~visible
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[:, None]


def buffer_columns(
    within: torch.BoolTensor, new_indices: torch.LongTensor, lengths: torch.LongTensor, capacity: int
) -> tuple[torch.BoolTensor, torch.LongTensor]:
    """What the queries of a forward see of a whole buffer whose items hold `lengths` entries, and what stands where.

    What is new stands right after each item's entries, and what lies after that is nobody's. All shapes follow from those of
    the arguments, none from the lengths.

    Args:
        within: `(batch or 1, queries, new)`, which of the new columns a query sees.
        new_indices: `(batch or 1, new)`, indices of the new tokens counted from the end of their text.
        lengths: `(batch,)`.
        capacity: columns of the buffer.

    Returns:
        `(batch, queries, capacity)`, and `(batch, capacity)`: the index of each column's token, counted from the end of its text.
    """
    (batch,), (_, queries, num_new) = lengths.shape, within.shape
    after = torch.arange(capacity, device=lengths.device) - lengths[:, None]
    is_new = (after >= 0) & (after < num_new)
    place = after.clamp(0, num_new - 1)
    own = within.expand(batch, -1, -1).gather(2, place[:, None].expand(-1, queries, -1))
    seen = torch.where(is_new[:, None], own, (after < 0)[:, None])
    return seen, torch.where(is_new, new_indices.expand(batch, -1).gather(1, place), after)


def buffer_masks(
    within: torch.BoolTensor,
    new_indices: torch.LongTensor,
    windows: dict[str, int | None],
    lengths: torch.LongTensor,
    capacity: int,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """[`additive_masks`] over a whole buffer, `(batch, 1, queries, capacity)`; arguments as in [`buffer_columns`].

    The last of the new tokens are the queries.
    """
    seen, places = buffer_columns(within, new_indices, lengths, capacity)
    ends = lengths[:, None]
    queries, places = new_indices[:, -within.shape[1] :] + ends, places + ends
    masks = {}
    for layer_type, size in windows.items():
        visible = seen if size is None else seen & in_reach(layer_type, size, queries, places)
        masks[layer_type] = additive(visible, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))
