"""Key/value caches whose entries can be forgotten: rejected drafts of the target, masks and blocks of a drafter.

In a batch each item has its own length: item b's entries lie in columns 0 to `item_lengths[b]`, and what a forward appends goes
after the longest item, in the same columns for all items. [`ItemEntries.keep`] then moves what is kept to the end of its item, so
that no padding is left between two rounds, however unevenly the items grow. A layer with a window counts its columns, item by
item, from the first entry that it still stores.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass(frozen=True)
class HeldColumns:
    """Where a layer holds the committed text of each item.

    Attributes:
        num_columns: of the layer, before the forward that asks.
        held: how many of them hold entries, item by item; `None` if all do.
        dropped: for each item, how many of its first entries are no longer stored; `None` if all are.
    """

    num_columns: int
    held: list[int] | None = None
    dropped: list[int] | None = None

    def visible(self, within: torch.BoolTensor) -> torch.BoolTensor:
        """Add the columns of the committed text to a mask over the new ones, which stand after all of them.

        Args:
            within: `(batch, queries, new)`, which of the new columns a query sees.

        Returns:
            `(batch, queries, columns + new)`.
        """
        start, held = self.num_columns, self.held
        if held is None or min(held) == start:
            return torch.nn.functional.pad(within, (start, 0), value=True)
        past = torch.arange(start, device=within.device) < torch.tensor(held, device=within.device)[:, None]
        return torch.cat([past[:, None].expand(-1, within.shape[1], -1), within], dim=2)

    def token_indices(self, new_indices: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The index of each token in its text, which is what windows and chunks are measured in.

        Args:
            new_indices: `(batch, new)`, indices of the new tokens counted from the end of their text.

        Returns:
            `(batch, new)` for the new tokens and `(batch, columns + new)` for all columns.
        """
        batch, device = new_indices.shape[0], new_indices.device
        past = torch.arange(self.num_columns, device=device).expand(batch, -1)
        held = torch.tensor(self.held or [self.num_columns] * batch, device=device)[:, None]
        if self.dropped is not None:
            dropped = torch.tensor(self.dropped, device=device)[:, None]
            past, held = past + dropped, held + dropped
        return new_indices + held, torch.cat([past, new_indices + held], dim=1)


@dataclass(frozen=True)
class StaticColumns:
    """[`HeldColumns`] of a static KV cache: each token stands at its index, new ones right after the text, nobody's after that.

    All shapes follow from those of the arguments and the capacity, none from the lengths.

    Attributes:
        lengths: `(batch,)`, of the committed texts.
        capacity: columns of the cache.
    """

    lengths: torch.LongTensor
    capacity: int

    def after_text(self) -> torch.LongTensor:
        """`(batch, capacity)`, how far after the committed text each column stands; below 0 in it."""
        return torch.arange(self.capacity, device=self.lengths.device) - self.lengths[:, None]

    def visible(self, within: torch.BoolTensor) -> torch.BoolTensor:
        """As [`HeldColumns.visible`], `(batch, queries, capacity)`; `within` may be `(1, queries, new)`."""
        after, (_, queries, num_new) = self.after_text(), within.shape
        place = after.clamp(0, num_new - 1)
        own = within.expand(len(after), -1, -1).gather(2, place[:, None].expand(-1, queries, -1))
        return torch.where(((after >= 0) & (after < num_new))[:, None], own, (after < 0)[:, None])

    def token_indices(self, new_indices: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """As [`HeldColumns.token_indices`], `(batch, capacity)` for all columns; `new_indices` may be `(1, new)`."""
        after, num_new, ends = self.after_text(), new_indices.shape[1], self.lengths[:, None]
        new = new_indices.expand(len(after), -1).gather(1, after.clamp(0, num_new - 1))
        return new_indices + ends, torch.where((after >= 0) & (after < num_new), new, after) + ends


class GrowingLayer(DynamicLayer):
    """A cache layer that writes into a pre-allocated buffer, and enlarges it when it is full.

    To transformers it is a `DynamicLayer`: `keys` and `values` are views of shape `(batch, heads, columns, head_dim)`.

    Attributes:
        num_columns: how many columns are in use.
        dropped: for each item, how many of its first entries are no longer stored; `None` if all are.
        ahead: how much longer the longest item is than `num_columns`.
    """

    # A fifth more than is needed keeps copies rare, and memory close to that of a cache that is exactly full.
    SLACK = 5
    MIN_SLACK = 8

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_columns = self.ahead = 0
        self.dropped: list[int] | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        return self.key_buffer.narrow(2, 0, self.num_columns) if self.is_initialized else None

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._replace("key_buffer", keys)

    @property
    def values(self) -> torch.Tensor | None:
        return self.value_buffer.narrow(2, 0, self.num_columns) if self.is_initialized else None

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._replace("value_buffer", values)

    def _replace(self, name: str, entries: torch.Tensor | None) -> None:
        """What transformers' own methods do to a layer's entries (repeat them for beams, say) makes a buffer of its own."""
        if entries is not None:
            setattr(self, name, entries)
            self.num_columns = entries.shape[2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_buffer = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.value_buffer = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, new, head_dim)` entries; return all entries that are stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.num_columns, self.num_columns + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            # What is appended to a long text is mostly a draft, and forgotten again.
            self._reallocate([0] * len(key_states), [start] * len(key_states), end + self.reserve(start or end))
        self.key_buffer.narrow(2, start, end - start).copy_(key_states)
        self.value_buffer.narrow(2, start, end - start).copy_(value_states)
        self.num_columns = end
        return self.keys, self.values

    def reserve(self, num_columns: int) -> int:
        """How many more columns to make room for, where `num_columns` have to last."""
        return max(num_columns // self.SLACK, self.MIN_SLACK)

    def get_seq_length(self) -> int:
        return self.num_columns + self.ahead

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next forward's queries meet, and the index of the first. Of one item, or before any is dropped."""
        return self.num_columns + query_length, self.ahead

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (transformers' sign convention)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if tokens_to_remove and self.is_initialized:
            self.num_columns += tokens_to_remove

    def move(self, items: torch.LongTensor, columns: torch.LongTensor) -> None:
        """Copy columns of `items (items, 1)` to other columns of theirs; from and to where in `columns (2, items, n)`."""
        source, destination = columns
        self.key_buffer[items, :, destination] = self.key_buffer[items, :, source]
        self.value_buffer[items, :, destination] = self.value_buffer[items, :, source]

    def move_to(self, start: int, source: torch.LongTensor) -> None:
        """Copy the columns `source (n,)` to the columns from `start` on: what `move` does for one item, in less time."""
        for buffer in (self.key_buffer, self.value_buffer):
            buffer.narrow(2, start, len(source)).copy_(buffer.index_select(2, source))

    def select_items(self, items: torch.LongTensor, item_lengths: list[int]) -> None:
        """Go on with only some items of the batch, which have `item_lengths`; mostly only those are copied that fill gaps."""
        if self.dropped is not None:
            self.dropped = [self.dropped[item] for item in items.tolist()]
        gaps = [place for place, item in enumerate(items.tolist()) if item != place]
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[gaps] = buffer[items[gaps].to(self.device)]
        self.key_buffer, self.value_buffer = self.key_buffer[: len(items)], self.value_buffer[: len(items)]
        self.fit_to(item_lengths)
        # Memory that is far more than they need is given back.
        capacity = self.num_columns + self.reserve(self.num_columns)
        is_half_empty = 2 * self.key_buffer.nbytes <= self.key_buffer.untyped_storage().nbytes()
        if is_half_empty or self.key_buffer.shape[2] > capacity + self.MIN_SLACK:
            self._reallocate([0] * len(items), [self.num_columns] * len(items), capacity)

    def held_columns(self, item_lengths: list[int] | None) -> HeldColumns:
        """Where items of these lengths lie; `None` before any item was shortened."""
        held = None if item_lengths is None else self.held(item_lengths)
        return HeldColumns(self.num_columns, held, self.dropped)

    def held(self, item_lengths: list[int]) -> list[int]:
        """How many entries of each item are stored."""
        if self.dropped is None:
            return item_lengths
        return [length - dropped for length, dropped in zip(item_lengths, self.dropped, strict=True)]

    def fit_to(self, item_lengths: list[int]) -> None:
        """Forget the columns beyond items of these lengths; nothing is copied."""
        self.num_columns = max(self.held(item_lengths))
        self.ahead = max(item_lengths) - self.num_columns

    def drop_unseen(self, item_lengths: list[int]) -> None:
        """Drop what no query can see any more; without a window that is nothing."""

    def _reallocate(self, first: list[int], count: list[int], capacity: int) -> None:
        """Move, in each item, `count` columns from `first` on to the front of buffers of another size."""
        self.key_buffer = _moved(self.key_buffer, first, count, capacity)
        self.value_buffer = _moved(self.value_buffer, first, count, capacity)


def _moved(buffer: torch.Tensor, first: list[int], count: list[int], capacity: int) -> torch.Tensor:
    """A buffer of `(batch, heads, capacity, head_dim)` whose items start with `count` columns of `buffer` from `first` on."""
    shape = (*buffer.shape[:2], capacity, buffer.shape[-1])
    if min(first) == max(first):
        other = buffer.new_empty(shape)
        other[:, :, : max(count)] = buffer[:, :, first[0] : first[0] + max(count)]
        return other
    # A column that holds nothing is masked, but must be finite.
    other = buffer.new_zeros(shape)
    for item, (start, number) in enumerate(zip(first, count, strict=True)):
        other[item, :, :number] = buffer[item, :, start : start + number]
    return other


def _move_indices(start: int, before: list[int], kept: list[list[int]]) -> tuple[torch.LongTensor, ...]:
    """Arguments of [`GrowingLayer.move`] or, in a batch of one, [`GrowingLayer.move_to`]; none if nothing has to move.

    Args:
        start: the column that `kept` are counted from.
        before: how many columns each item had.
        kept: see [`ItemEntries.keep`].
    """
    moving = [
        item
        for item, columns in enumerate(kept)
        if columns and (before[item] != start or columns[-1] != len(columns) - 1)
    ]
    if not moving:
        return ()
    source = [[start + column for column in kept[item]] for item in moving]
    if len(kept) == 1:
        return (torch.tensor(source[0], device="cpu"),)
    # An item that keeps less than another copies its last column more often, to columns that hold nothing.
    count = max(map(len, source))
    source = [columns + columns[-1:] * (count - len(columns)) for columns in source]
    destination = [list(range(before[item], before[item] + count)) for item in moving]
    return torch.tensor(moving, device="cpu")[:, None], torch.tensor([source, destination], device="cpu")


class ItemEntries:
    """What a cache of [`GrowingLayer`] needs to hold items of different lengths; a mixin of `Cache` classes.

    Attributes:
        item_lengths: how many entries each item has; `None` before the first `keep`.
    """

    item_lengths: list[int] | None = None

    def keep(self, start: int, kept: list[list[int]]) -> None:
        """Of the columns from `start` on, keep some in each item, and forget the rest.

        Args:
            start: the length of the cache before the forward that appended them.
            kept: for each item of the batch, the columns to keep, counted from `start`, ascending. What is in place
                already (a chain's accepted part, say) is not copied.
        """
        before = self.item_lengths or [start] * len(kept)
        self.item_lengths = [length + len(columns) for length, columns in zip(before, kept, strict=True)]
        indices: dict[tuple, tuple[torch.Tensor, ...]] = {}
        for layer in self.growing_layers():
            held = layer.held(before)
            layout = (layer.device, layer.ahead, tuple(held))
            if layout not in indices:
                moves = _move_indices(start - layer.ahead, held, kept)
                indices[layout] = tuple(index.to(layer.device) for index in moves)
            if indices[layout] and len(kept) == 1:
                layer.move_to(held[0], *indices[layout])
            elif indices[layout]:
                layer.move(*indices[layout])
            layer.fit_to(self.item_lengths)
            layer.drop_unseen(self.item_lengths)

    def forget_from(self, start: int) -> None:
        """Forget the columns from `start` on, in all items."""
        self.item_lengths = [min(length, start) for length in self.item_lengths or [start]]
        for layer in self.growing_layers():
            layer.crop(start - layer.get_seq_length())

    def select_items(self, items: list[int]) -> None:
        """Keep only some items of the batch, and forget the columns that none of them uses."""
        layers = self.growing_layers()
        if not layers:
            return
        all_lengths = self.item_lengths or [layers[0].get_seq_length()] * len(layers[0].keys)
        lengths = [all_lengths[item] for item in items]
        for layer in layers:
            layer.select_items(torch.tensor(items, device="cpu"), lengths)
        self.item_lengths = self.item_lengths and lengths

    def held_columns(self) -> HeldColumns:
        """Where the first layer holds the committed text; the same in all layers without a window."""
        layers = self.growing_layers()
        return layers[0].held_columns(self.item_lengths) if layers else HeldColumns(0)

    def growing_layers(self) -> list[GrowingLayer]:
        """The layers that hold entries per token; a target may have others."""
        return [layer for layer in self.layers if isinstance(layer, GrowingLayer) and layer.is_initialized]


class GrowingCache(ItemEntries, Cache):
    """A cache of [`GrowingLayer`], one per model layer."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
