"""The static KV cache of compiled forwards, and what else has one shape in all rounds: nothing depends on how much is in use."""

from collections.abc import Sequence

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ...models.cache import GrowingLayer, ItemEntries
from ...models.inputs import DraftInputs, StaticDraftInputs, take_positions
from ..target_side.cache import Entries

# Columns of the smallest cache; larger ones are twice as large.
SMALLEST = 256


def capacity_for(num_columns: int) -> int:
    """The smallest capacity that has room for `num_columns`. Few different ones: on CUDA each has graphs of its own."""
    capacity = SMALLEST
    while capacity < num_columns:
        capacity *= 2
    return capacity


class StaticKVLayer(CacheLayerMixin):
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
        """Put `(batch, heads, new, head_dim)` entries into the columns `(batch, new)`; returns all columns."""
        items = torch.arange(len(columns), device=columns.device)[:, None]
        self.keys[items, :, columns] = key_states.transpose(1, 2)
        self.values[items, :, columns] = value_states.transpose(1, 2)
        return self.keys, self.values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("the columns are known to the cache: call StaticKVCache.update")

    def move(self, sources: torch.LongTensor, columns: torch.LongTensor) -> None:
        """Copy the entries in the columns `sources (batch, n)` to `columns (batch, n)`."""
        items = torch.arange(len(columns), device=columns.device)[:, None]
        self.keys[items, :, columns] = self.keys[items, :, sources]
        self.values[items, :, columns] = self.values[items, :, sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class StaticKVCache(Cache):
    """A cache of [`StaticKVLayer`].

    Attributes:
        columns: `(batch, new)`, where the entries of the next forward go. Batch items have different lengths, so each its own.
    """

    def __init__(self, layers: list[StaticKVLayer]) -> None:
        super().__init__(layers=layers)
        self.columns: torch.LongTensor | None = None

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.shape[2]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[layer_idx].write(key_states, value_states, self.columns)

    def entries_of(self, item: int, length: int) -> Entries:
        """The first `length` entries of one item, copied."""
        return [
            (layer.keys[item : item + 1, :, :length].clone(), layer.values[item : item + 1, :, :length].clone())
            for layer in self.layers
        ]


def new_static_cache(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int) -> StaticKVCache:
    """A static KV cache that begins with given entries.

    Args:
        layers: `(batch, heads, columns, head_dim)` keys and values of each layer.
        capacity: columns.
    """
    return StaticKVCache([StaticKVLayer(*(_filled(entries, capacity) for entries in layer)) for layer in layers])


def with_room(cache: StaticKVCache, num_columns: int) -> StaticKVCache:
    """The same cache, or a larger one with the same entries if it has fewer than `num_columns` columns."""
    if cache.capacity >= num_columns:
        return cache
    return new_static_cache([(layer.keys, layer.values) for layer in cache.layers], capacity_for(num_columns))


def _filled(entries: torch.Tensor, capacity: int) -> torch.Tensor:
    # What holds nothing is masked, but must be finite.
    tensor = entries.new_zeros(*entries.shape[:2], capacity, entries.shape[3])
    tensor[:, :, : entries.shape[2]] = entries
    torch._dynamo.maybe_mark_dynamic(tensor, 2)
    return static(tensor)


def static(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that compiled steps change in place, told to torch as transformers' `StaticCache` does, for CUDA graphs."""
    if tensor.device.type != "cpu":
        # Another call's lie elsewhere, and graphs are recorded again. Guarded, as before torch 2.10, all would be compiled again.
        torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


def to_static_cache(cache: ItemEntries, batch: int, num_more: int) -> tuple[StaticKVCache, list[int]]:
    """The entries of a cache, each at its token's index, with room for `num_more`; and how many each batch item has."""
    layers = cache.growing_layers()
    lengths = cache.item_lengths or [layers[0].get_seq_length()] * batch
    capacity = capacity_for(max(lengths) + num_more)
    return new_static_cache([_laid_out(layer, lengths) for layer in layers], capacity), lengths


def _laid_out(layer: GrowingLayer, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, `(batch, heads, longest, head_dim)`; zeros where it has dropped its first entries."""
    if layer.dropped is None:
        return layer.keys, layer.values
    parts = []
    for entries in (layer.keys, layer.values):
        laid_out = entries.new_zeros(*entries.shape[:2], max(lengths), entries.shape[3])
        for item, (length, held) in enumerate(zip(lengths, layer.held(lengths), strict=True)):
            laid_out[item, :, length - held : length] = entries[item, :, :held]
        parts.append(laid_out)
    return tuple(parts)


def to_static_inputs(context: DraftInputs, width: int) -> tuple[StaticDraftInputs, int]:
    """The drafter's pending tokens, padded on the right to `width`; and how many the batch item with most has."""
    batch, most = context.new_ids.shape
    counts = context.new_counts or [most] * batch
    device = context.new_ids.device
    held = torch.tensor(counts, device=device)
    # What is real is on the right, and comes to the left.
    order = (torch.arange(width, device=device) + most - held[:, None]).clamp(max=most - 1)
    features = context.features
    if features is not None:
        # They end beside the anchor, and may begin later than the tokens.
        missing = most - features.shape[1]
        features = torch.nn.functional.pad(features, (0, 0, missing, 0)) if missing > 0 else features[:, -most:]
        features = take_positions(features, order)
    tensors = (context.new_ids.gather(1, order), context.new_positions.gather(1, order), held, features)
    inputs = StaticDraftInputs(*(None if tensor is None else static(contiguous_copy(tensor)) for tensor in tensors))
    return inputs, max(counts)


def contiguous_copy(values: torch.Tensor) -> torch.Tensor:
    """A copy with the strides that follow from its shape, on which compiled code depends."""
    return values.clone(memory_format=torch.contiguous_format)
