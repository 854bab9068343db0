"""A cache whose batch items come and go: the entries of all items end at the same column."""

import inspect
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from ..generation.packing.token_attention import can_lie_side_by_side
from ..generation.target_side.rope import rope_changes

# Layers that see all entries, of which there is one per token. Those with a window are told by their masks what is in it, and
# keep the rest.
SEE_ALL = {"full_attention"}
ENTRIES_PER_TOKEN = {*SEE_ALL, "sliding_attention"}
# Columns for new entries, when there have to be more: all are copied then, and that is to cost less than the steps.
MORE_COLUMNS = 128
# Columns before the first and after the last that are never used: code that is compiled for a part of a buffer is neither for the
# whole nor for its beginning, since torch takes the numbers 0 and 1 for themselves.
UNUSED_BEFORE, UNUSED_AFTER = 2, 1


class JoinedLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room on the right, and on the left of texts that have got shorter.

    To transformers it is a `DynamicLayer` of a batch that is padded on the left.

    Args:
        most_items: that there will be.
        keys, values, lengths, num_shared: of the first items, see [`append`].
    """

    def __init__(
        self, most_items: int, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], num_shared: int
    ) -> None:
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device
        self.num_items = self.start = self.end = 0
        self.buffers = [_zeros(entries, most_items, 0, which) for which, entries in enumerate((keys, values))]
        self.append(keys, values, lengths, num_shared)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._used(0) if self.is_initialized else None

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        """`DynamicLayer` sets it to `None` at first."""

    @property
    def values(self) -> torch.Tensor | None:
        return self._used(1) if self.is_initialized else None

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        """See `keys`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `(items, heads, new, head_dim)` entries to all items; returns all that are stored."""
        num_new = key_states.shape[2]
        self._open(num_new)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.num_items, :, self.end - num_new : self.end] = new
        return self.keys, self.values

    def opened(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that are stored, and a column more, which is to be written; to compiled code they are tensors of their own."""
        self._open(1)
        return tuple(
            view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
            for view in (self.keys, self.values)
        )

    def _open(self, num_new: int) -> None:
        self._make_room(self.end - self.start, num_new)
        self.end += num_new

    def append(self, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], num_shared: int) -> None:
        """Add items.

        Args:
            keys, values: `(items, heads, columns, head_dim)` entries, which end at the last column.
            lengths: how many entries each item has.
            num_shared: how many of them are in the first columns, before an item's padding.
        """
        num_before, columns = self.num_items, keys.shape[2]
        self._make_room(max(columns, self.end - self.start), 0)
        self.num_items += len(lengths)
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[num_before : self.num_items, :, self.end - columns : self.end] = new
            for item, length in enumerate(lengths if num_shared else []):
                first = self.end - length
                buffer[num_before + item, :, first : first + num_shared] = new[item, :, :num_shared]
        self.start = min(self.start, self.end - columns)

    def remove(self, item: int) -> None:
        """Remove an item; the last one takes its place."""
        self.num_items -= 1
        if item != self.num_items:
            for buffer in self.buffers:
                buffer[item, :, self.start : self.end] = buffer[self.num_items, :, self.start : self.end]

    def keep_columns(self, count: int) -> None:
        """Keep the last columns only; nothing is copied."""
        self.start = self.end - count

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (transformers' sign convention)."""
        self.end += tokens_to_remove

    def _used(self, which: int) -> torch.Tensor:
        return self.buffers[which][: self.num_items, :, self.start : self.end]

    def _make_room(self, num_before: int, num_after: int) -> None:
        """Move the entries such that the last one has room for `num_before` columns up to it, and `num_after` after it."""
        end = UNUSED_BEFORE + num_before
        if self.end >= end and self.end + num_after + UNUSED_AFTER <= self.buffers[0].shape[2]:
            return
        columns = end + max(num_after, MORE_COLUMNS) + UNUSED_AFTER
        for which, buffer in enumerate(self.buffers):
            used = self._used(which)
            fits = columns <= buffer.shape[2]
            new = buffer if fits else _zeros(buffer, buffer.shape[0], columns, which)
            new[: self.num_items, :, end - used.shape[2] : end] = used.clone() if fits else used
            self.buffers[which] = new
        self.start, self.end = end - (self.end - self.start), end


def _zeros(entries: torch.Tensor, num_items: int, num_columns: int, which: int) -> torch.Tensor:
    """A buffer `(items, heads, columns, head_dim)` for keys (0) or values (1).

    What holds nothing is masked, but must be finite.
    """
    heads, size = entries.shape[1], entries.shape[3]
    if which == 0 and can_lie_side_by_side(entries):
        return entries.new_zeros(num_items, heads, size, num_columns).transpose(2, 3)
    return entries.new_zeros(num_items, heads, num_columns, size)


class JoinedCache(Cache):
    """A cache of [`JoinedLayer`].

    Args:
        cache: of the first items.
        most_items: that there will be.
        lengths, num_shared: of the first items, see [`append`].
    """

    def __init__(self, cache: DynamicCache, most_items: int, lengths: list[int], num_shared: int) -> None:
        layers = [JoinedLayer(most_items, layer.keys, layer.values, lengths, num_shared) for layer in cache.layers]
        super().__init__(layers=layers)

    def append(self, cache: DynamicCache, lengths: list[int], num_shared: int) -> None:
        """Add the items of another cache, which have entries of `lengths`, `num_shared` of them before their padding."""
        for layer, other in zip(self.layers, cache.layers, strict=True):
            layer.append(other.keys, other.values, lengths, num_shared)

    def opened(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer with a column more, see [`JoinedLayer.opened`]."""
        return [layer.opened() for layer in self.layers]

    def stored(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer."""
        return [(layer.keys, layer.values) for layer in self.layers]

    def remove(self, item: int) -> None:
        """Remove an item; the last one takes its place."""
        for layer in self.layers:
            layer.remove(item)

    def keep_columns(self, count: int) -> None:
        """Keep the last columns only."""
        for layer in self.layers:
            layer.keep_columns(count)


def has_entries_per_token(target: PreTrainedModel) -> bool:
    """Whether all that a target remembers of a text are keys and values per token, which don't depend on the rest of its batch.

    Those of one with an encoder, or of several media, are of other kinds, too.
    """
    config = target.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return False
    # Without positions they are counted from a batch's first column. `generate` makes them for a forward that names them itself.
    takes_both = {"position_ids", "past_key_values"} <= inspect.signature(target.forward).parameters.keys()
    # Frequencies that change are chosen by the longest text of a forward.
    layer_types, _ = get_layer_types_and_kwargs(config)
    return takes_both and not rope_changes(config).any and set(layer_types) <= ENTRIES_PER_TOKEN


def may_have_gaps(target: PreTrainedModel) -> bool:
    """Whether the columns between two tokens mean nothing to a target whose cache [`has_entries_per_token`]; no other may."""
    if not has_entries_per_token(target):
        return False
    # GPT-Neo's windows of columns have names of their own.
    has_windows = "local" in str(getattr(target.config, "attention_layers", None))
    return set(get_layer_types_and_kwargs(target.config)[0]) <= SEE_ALL and not has_windows


def holds(cache: DynamicCache, num_items: int, num_columns: int) -> bool:
    """Whether a forward has left one entry in each layer for each column of its batch, and nothing else."""
    shapes = [
        entries.shape
        for layer in cache.layers
        for entries in (layer.keys, layer.values)
        if type(layer) is DynamicLayer and entries is not None
    ]
    expected = (num_items, num_columns)
    return len(shapes) == 2 * len(cache.layers) > 0 and all(
        len(shape) == 4 and (shape[0], shape[2]) == expected for shape in shapes
    )
