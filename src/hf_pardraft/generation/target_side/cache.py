"""The target's key/value cache, which forgets rejected drafts; what comes in from an earlier call. See models/cache.py."""

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from ...models.cache import GrowingCache, GrowingLayer, HeldColumns
from .structure import RECURRENT_LAYER_TYPES, attended_layers, layer_types_of

# Keys and values `(1, heads, stored, head_dim)` of one item, for each layer that stores any.
Entries = list[tuple[torch.Tensor, torch.Tensor] | None]
Snapshot = list[tuple[LinearAttentionLayer, dict[int, torch.Tensor], dict[int, torch.Tensor]]]


class WindowedLayer(GrowingLayer):
    """A growing layer whose queries look back no further than `window` tokens: what lies before is dropped now and then.

    Not at once, since a rejected draft must be able to roll back, and since each time costs a copy.

    Args:
        window: as many tokens as a query sees, itself included.
        wanted: how many of the last entries somebody asks for in the end; `math.inf`: all, and none are dropped.
    """

    is_sliding = True

    def __init__(self, window: int, wanted: float = 0) -> None:
        super().__init__()
        self.kept = max(window - 1, wanted)
        # The most columns that last.
        self.limit = self.kept + window // self.SLACK

    def reserve(self, num_columns: int) -> int:
        return min(super().reserve(num_columns), max(self.limit - num_columns, 0))

    def drop_unseen(self, item_lengths: list[int]) -> None:
        """Drop what no query can see any more, and nobody asks for, in each batch item, if there are many such columns."""
        held = self.held(item_lengths)
        if max(held) > self.limit:
            count = [min(number, self.kept) for number in held]
            first = [number - kept for number, kept in zip(held, count, strict=True)]
            self._reallocate(first, count, self.limit)
            self.dropped = [length - kept for length, kept in zip(item_lengths, count, strict=True)]
            self.fit_to(item_lengths)


class HostLayer(GrowingLayer):
    """A growing layer in host memory: a forward gets a copy of it on its own device, and leaves only what is new.

    Attributes:
        used_on: the device of the latest forward.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(*(states[:, :, :0].cpu() for states in (key_states, value_states)))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.used_on = key_states.device
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys.to(self.used_on), values.to(self.used_on)


class TargetCache(GrowingCache):
    """Entries of the committed text, then those of the tree that is being verified.

    Args:
        config: the target's text config.
        on_host: whether layers that keep all are in host memory, as those of transformers' offloaded caches are.
        wanted: by layer type, how many of the last entries are asked for in the end, see [`WindowedLayer`]; `math.inf`: recurrent
            layers record their past.
    """

    def __init__(
        self, config: PreTrainedConfig, on_host: bool = False, wanted: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.layer_types, layer_kwargs = layer_types_of(config)
        self.sources = attended_layers(config)
        self.layers = [
            new_layer(layer_type, kwargs, on_host, wanted.get(layer_type, 0))
            for layer_type, kwargs in zip(self.layer_types, layer_kwargs, strict=True)
        ]

    def held_columns(self) -> dict[str, HeldColumns]:
        """Where the layers of each type hold the committed text: they may have different windows."""
        return {
            layer_type: layer.held_columns(self.item_lengths)
            for layer_type, layer in zip(self.layer_types, self.layers, strict=True)
            if isinstance(layer, GrowingLayer) and layer.is_initialized
        }

    @property
    def is_even(self) -> bool:
        """Whether all items are known to have one length, and to be held in the same columns.

        A layer with a window that has dropped more of one item than of another does not, even once they are as long again.
        """
        lengths = [self.item_lengths, *(layer.dropped for layer in self.growing_layers())]
        return self.item_lengths is not None and all(min(items) == max(items) for items in lengths if items)

    def dropped(self, item: int) -> list[int]:
        """For each layer, how many of an item's first entries it no longer attends to."""
        layers = (self.layers[source] for source in self.sources)
        dropped = (layer.dropped if isinstance(layer, GrowingLayer) else None for layer in layers)
        return [0 if items is None else items[item] for items in dropped]

    def snapshot(self) -> Snapshot:
        """A copy of what the recurrent layers hold. One that records its past puts new tensors in the place of the old ones."""
        return [
            (layer, _copied(layer.conv_states, is_replaced=layer.record_past), _copied(layer.recurrent_states))
            for layer in self.layers
            if isinstance(layer, LinearAttentionLayer)
        ]

    def restore(self, snapshot: Snapshot) -> None:
        """Put the recurrent layers back to an earlier state; the snapshot is used up."""
        for layer, conv_states, recurrent_states in snapshot:
            layer.conv_states.update(conv_states)
            layer.recurrent_states.update(recurrent_states)

    def import_from(self, cache: Cache, real: torch.BoolTensor) -> None:
        """Take over the entries that an earlier call left in `cache`.

        Args:
            cache: a caller's, whose items have padding of their own.
            real: `(batch, columns)`, which of its columns are no padding.
        """
        lengths = real.sum(dim=1).tolist()
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LinearAttentionLayer):
                # Copied: the states of a caller's cache are changed when this one's are handed back, not before.
                self.layers[index] = copy.deepcopy(layer)
                continue
            # A layer that shares another's entries has none.
            if self.layer_types[index] == "dummy" or not layer.is_initialized:
                continue
            stored = stored_entries(layer)
            # Layers with a window may have forgotten the oldest columns, which nobody will look at any more.
            first = real.shape[1] - stored
            own, held = self.layers[index], real[:, first:]
            order = held.long().argsort(dim=1, descending=True, stable=True)[:, : int(held.sum(dim=1).max())]
            places = order[:, None, :, None].to(layer.keys.device)
            entries = (
                states.gather(2, places.expand(-1, states.shape[1], -1, states.shape[3]))
                for states in (layer.keys, layer.values)
            )
            self.update(*entries, index)
            dropped = real[:, :first].sum(dim=1).tolist()
            own.dropped = dropped if any(dropped) else None
            own.fit_to(lengths)
        self.item_lengths = lengths

    def hold(self, items: list[Entries], lengths: list[int]) -> None:
        """Take the entries of items of `lengths` tokens, as [`entries_of`] gave them, into an empty cache."""
        for index, entries in enumerate(zip(*items, strict=True)):
            if entries[0] is None:
                continue
            held = [keys.shape[2] for keys, _ in entries]
            for_all = (
                torch.cat([torch.nn.functional.pad(part, (0, 0, 0, max(held) - part.shape[2])) for part in parts])
                for parts in zip(*entries, strict=True)
            )
            self.update(*for_all, index)
            dropped = [length - number for length, number in zip(lengths, held, strict=True)]
            self.layers[index].dropped = dropped if any(dropped) else None
            self.layers[index].fit_to(lengths)
        self.item_lengths = lengths

    def entries_of(self, item: int) -> Entries:
        """Copies of the last entries of one item, mostly of all of them."""
        entries: Entries = []
        for layer in self.layers:
            if isinstance(layer, GrowingLayer) and layer.is_initialized:
                kept = slice(item, item + 1), slice(None), slice(layer.held(self.item_lengths)[item])
                entries.append((layer.keys[kept].clone(), layer.values[kept].clone()))
            else:
                entries.append(None)
        return entries

    def devices(self) -> list[torch.device | None]:
        """For each layer, where its entries are used; `None` where they are."""
        return [layer.used_on if isinstance(layer, HostLayer) else None for layer in self.layers]

    def export_recurrent_to(self, cache: Cache) -> None:
        """Hand the recurrent layers over to a caller's cache."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionLayer):
                cache.layers[index] = layer


def new_layer(
    layer_type: str, kwargs: dict, on_host: bool = False, wanted: float = 0
) -> GrowingLayer | LinearAttentionLayer | DummyLayer:
    """An empty layer of the kind that a layer type needs."""
    if layer_type == "dummy":
        return DummyLayer()
    if layer_type in RECURRENT_LAYER_TYPES:
        layer = LinearAttentionLayer(**kwargs)
        if wanted == math.inf:
            layer.activate_past_recording()
        return layer
    window = kwargs.get("sliding_window")
    if window is not None and not (on_host and wanted == math.inf):
        return WindowedLayer(window, wanted)
    return HostLayer() if on_host else GrowingLayer()


def _copied(states: dict[int, torch.Tensor | None], is_replaced: bool = False) -> dict[int, torch.Tensor]:
    return {index: state if is_replaced else state.clone() for index, state in states.items() if state is not None}


def without_last(entries: Entries, count: int) -> Entries:
    """The entries of an item without those of its last `count` tokens."""
    return [
        layer and tuple(part[:, :, : max(part.shape[2] - count, 0)] for part in layer) if count > 0 else layer
        for layer in entries
    ]


def stored_entries(layer) -> int:
    """How many tokens a layer of a caller's cache still has."""
    if not layer.is_initialized:
        return 0
    return min(int(layer.get_seq_length()), layer.keys.shape[-2])
