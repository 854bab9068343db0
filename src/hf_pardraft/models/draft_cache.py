"""A key/value cache that appends in place, forgets what was rejected, and holds rows of different lengths.

Entries lie in columns. Those of row b fill its columns 0 to `row_lengths[b]`, one per token, so a column is also a token's
index in its row; columns beyond are dead, and masked. A forward appends its columns behind the longest row, and `keep` then
moves the ones that stay to the end of each row.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """A cache layer that writes into a pre-allocated buffer, and enlarges it when it is full.

    To transformers it is a `DynamicLayer`: `keys` and `values` are views of shape `(batch, heads, length, head_dim)`. It
    keeps the whole past for sliding-window layers too, since a rejected draft must be able to roll back; the window is
    then the attention mask's business.
    """

    # A fifth more than is needed keeps copies rare, and memory close to that of a cache that is exactly full.
    SLACK = 5
    MIN_SLACK = 16

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.length = 0
        self.key_buffer = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.value_buffer = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(batch, heads, new, head_dim)` entries; return all entries."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self._grow(end)
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self._set_length(end)
        return self.keys, self.values

    def _grow(self, needed: int) -> None:
        # What is appended to a long text is mostly a draft, and forgotten again.
        lasting = self.length or needed
        capacity = needed + max(lasting // self.SLACK, self.MIN_SLACK)
        self.key_buffer = _enlarged(self.key_buffer, capacity, self.length)
        self.value_buffer = _enlarged(self.value_buffer, capacity, self.length)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.keys = self.key_buffer[:, :, :length]
        self.values = self.value_buffer[:, :, :length]

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` entries (transformers' sign convention); nothing is copied."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of entries to forget, got {tokens_to_remove}")
        if tokens_to_remove and self.is_initialized:
            self._set_length(self.length + tokens_to_remove)

    def move(self, rows: torch.LongTensor, source: torch.LongTensor, destination: torch.LongTensor) -> None:
        """Copy the columns `source` of `rows` to their columns `destination`; `(rows, 1)`, `(rows, n)` and `(rows, n)`."""
        self.key_buffer[rows, :, destination] = self.key_buffer[rows, :, source]
        self.value_buffer[rows, :, destination] = self.value_buffer[rows, :, source]

    def select_rows(self, rows: torch.LongTensor) -> None:
        """Keep only some rows of the batch."""
        self.key_buffer = self.key_buffer.index_select(0, rows)
        self.value_buffer = self.value_buffer.index_select(0, rows)
        self._set_length(self.length)


def _enlarged(buffer: torch.Tensor, capacity: int, length: int) -> torch.Tensor:
    """A buffer of `(batch, heads, capacity, head_dim)` that starts with the first `length` entries of `buffer`."""
    larger = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[-1])
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


class RowEntries:
    """What a cache of [`GrowingLayer`] needs to hold rows of different lengths; a mixin of `Cache` classes.

    Attributes:
        row_lengths: how many entries each row has; `None` before the first `keep`.
    """

    row_lengths: list[int] | None = None

    def keep(self, start: int, rows: list[list[int]]) -> None:
        """Of the columns from `start` on, keep some in each row, and forget the rest.

        Args:
            start: the number of columns before the forward that appended them.
            rows: for each row of the batch, the columns to keep, counted from `start`, ascending. What is in place
                already (a chain's accepted part, say) is not copied.
        """
        before = self.row_lengths or [start] * len(rows)
        self.row_lengths = [length + len(columns) for length, columns in zip(before, rows, strict=True)]
        end = max(self.row_lengths)
        # Rows without a move of their own write one of their dead columns onto itself or another dead one.
        moving = [
            row
            for row, columns in enumerate(rows)
            if columns and (before[row] != start or columns[-1] != len(columns) - 1)
        ]
        count = max((len(rows[row]) for row in moving), default=0)
        if count:
            source = [[start + column for column in rows[row]] for row in moving]
            source = [columns + columns[-1:] * (count - len(columns)) for columns in source]
            destination = [list(range(before[row], before[row] + count)) for row in moving]
            indices = torch.tensor([source, destination])
            moving = torch.tensor(moving)[:, None]
        by_device: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        for layer in self.growing_layers():
            if count:
                if layer.device not in by_device:
                    by_device[layer.device] = (moving.to(layer.device), *indices.to(layer.device))
                layer.move(*by_device[layer.device])
            layer.crop(end - layer.get_seq_length())

    def forget_from(self, start: int) -> None:
        """Forget the columns from `start` on, in all rows."""
        self.row_lengths = [min(length, start) for length in self.row_lengths or [start]]
        for layer in self.growing_layers():
            layer.crop(start - layer.get_seq_length())

    def select_rows(self, rows: list[int]) -> None:
        """Keep only some rows of the batch, and forget the columns that none of them uses."""
        if self.row_lengths is not None:
            self.row_lengths = [self.row_lengths[row] for row in rows]
        index = torch.tensor(rows)
        for layer in self.growing_layers():
            layer.select_rows(index.to(layer.device))
            if self.row_lengths is not None:
                layer.crop(max(self.row_lengths) - layer.get_seq_length())

    def growing_layers(self) -> list[GrowingLayer]:
        """The layers that hold entries per token; a target may have others."""
        return [layer for layer in self.layers if isinstance(layer, GrowingLayer) and layer.is_initialized]


class GrowingCache(RowEntries, Cache):
    """A cache of [`GrowingLayer`], one per model layer."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=GrowingLayer)
