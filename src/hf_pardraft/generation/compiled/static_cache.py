"""Key/value buffers of a fixed capacity, for compiled forwards: nothing in them depends on how much of them is in use."""

from collections.abc import Sequence

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..cache import Entries
from .tensor_pool import LastingTensors

# Columns of the smallest buffer; larger ones are twice as large.
SMALLEST = 256


def capacity_for(num_columns: int) -> int:
    """The smallest capacity that has room for `num_columns`. Few different ones: on CUDA each has graphs of its own."""
    capacity = SMALLEST
    while capacity < num_columns:
        capacity *= 2
    return capacity


class BufferLayer(CacheLayerMixin):
    """The keys and values of one layer, `(batch, heads, capacity, head_dim)`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, columns: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put `(batch, heads, new, head_dim)` entries into the columns `(batch, new)`; returns the whole buffers."""
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        self.keys[rows, :, columns] = key_states.transpose(1, 2)
        self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys, self.values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("the columns are known to the cache: call Buffers.update")

    def move(self, sources: torch.LongTensor, columns: torch.LongTensor) -> None:
        """Copy the entries in the columns `sources (batch, n)` to `columns (batch, n)`."""
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        self.keys[rows, :, columns] = self.keys[rows, :, sources]
        self.values[rows, :, columns] = self.values[rows, :, sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class Buffers(Cache):
    """A cache of [`BufferLayer`].

    Attributes:
        columns: `(batch, new)`, where the entries of the next forward go. Rows have different lengths, so each has its own.
    """

    def __init__(self, layers: list[BufferLayer]) -> None:
        super().__init__(layers=layers)
        self.columns: torch.LongTensor | None = None

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.shape[2]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[layer_idx].write(key_states, value_states, self.columns)

    def entries_of(self, row: int, length: int) -> Entries:
        """The first `length` entries of one row, copied."""
        return [
            (layer.keys[row : row + 1, :, :length].clone(), layer.values[row : row + 1, :, :length].clone())
            for layer in self.layers
        ]


def new_buffers(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int, tensors: LastingTensors, role: str
) -> Buffers:
    """Buffers that begin with given entries.

    Args:
        layers: `(batch, heads, columns, head_dim)` keys and values of each layer.
        capacity: columns.
        tensors: where they come from.
        role: whose buffers they are.
    """
    return Buffers(
        [
            BufferLayer(
                _buffer(f"{role} keys {index}", keys, capacity, tensors),
                _buffer(f"{role} values {index}", values, capacity, tensors),
            )
            for index, (keys, values) in enumerate(layers)
        ]
    )


def with_room(buffers: Buffers, num_columns: int, tensors: LastingTensors, role: str) -> Buffers:
    """The same buffers, or larger ones with the same entries if they have fewer than `num_columns` columns."""
    if buffers.capacity >= num_columns:
        return buffers
    layers = [(layer.keys, layer.values) for layer in buffers.layers]
    return new_buffers(layers, capacity_for(num_columns), tensors, role)


def _buffer(name: str, entries: torch.Tensor, capacity: int, tensors: LastingTensors) -> torch.Tensor:
    # What holds nothing is masked, but must be finite.
    buffer = tensors.zeros(name, (*entries.shape[:2], capacity, entries.shape[3]), entries)
    buffer[:, :, : entries.shape[2]] = entries
    torch._dynamo.maybe_mark_dynamic(buffer, 2)
    return buffer
