"""The cache that a caller passes in: what is asked of it, and how it is filled for the caller's next call."""

import math
from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticSlidingWindowLayer,
)

from .cache import Entries
from .structure import RECURRENT_LAYER_TYPES

# What a model calls to store entries.
STORING = {"update", "update_conv_state", "update_recurrent_state", "update_indexer"}


def is_callers(cache: Cache) -> bool:
    """Whether the caller passed a cache in, and so keeps it: `generate` marks it."""
    return "_is_user_defined" in vars(cache)


def is_offloading(cache: Cache | None) -> bool:
    """Whether a caller's cache keeps its entries in host memory."""
    return isinstance(cache, Cache) and cache.offloading


def window_in(cache: Cache, index: int) -> int | None:
    """How many tokens a query of a layer meets in a caller's cache, itself included; `None`: all, as without a config."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.sliding_window
    return layer.max_cache_len if isinstance(layer, StaticSlidingWindowLayer) else None


def records_past(cache: Cache, index: int) -> bool:
    """Whether a layer of a caller's cache waits for a `crop` before it forgets anything: `activate_past_recording` was called."""
    return index < len(cache.layers) and cache.is_recording_past(index)


def kept_entries(cache: Cache, index: int) -> float:
    """How many of a text's last entries a layer of a caller's cache keeps; `math.inf`: all of them.

    Besides layers without a window those that record their past keep all, until the caller crops them.
    """
    window = window_in(cache, index)
    if window is None or records_past(cache, index):
        return math.inf
    return window if isinstance(cache.layers[index], StaticSlidingWindowLayer) else window - 1


def wanted_entries(cache: Cache | None, layer_types: Sequence[str]) -> dict[str, float]:
    """For each type of a target's layers, the most that one keeps, see [`kept_entries`]: those of a type have one mask.

    Recurrent layers keep all, if they record it, or nothing.

    Args:
        cache: the caller's, or the one that `generate` made.
        layer_types: of the target's layers.
    """
    wanted: dict[str, float] = {}
    for index, layer_type in enumerate(layer_types if cache is not None else ()):
        if layer_type in RECURRENT_LAYER_TYPES:
            kept = math.inf if records_past(cache, index) else 0
        else:
            kept = kept_entries(cache, index)
        wanted[layer_type] = max(wanted.get(layer_type, 0), kept)
    return wanted


def stores_otherwise(cache: Cache) -> bool:
    """Whether a cache, or a layer of it, stores entries in a way of a caller's own: evicts or rounds them, say."""
    kinds = {type(cache), *map(type, cache.layers), cache.layer_class_to_replicate} - {None}
    own = [base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith("transformers.")]
    return any(STORING & vars(each).keys() for each in (*own, cache, *cache.layers))


def check_cache(cache: Cache | None, batch: int, num_tokens: int, mask_length: int | None = None) -> None:
    """Raise a `ValueError` for a cache that can't be continued.

    Args:
        cache: as `generate` prepared it, or as the caller passed it in.
        batch, num_tokens: of the prompt, what is in the cache included.
        mask_length: columns of the attention mask, if that is known.
    """
    if not isinstance(cache, (DynamicCache, StaticCache)):
        found = "none" if cache is None else type(cache).__name__
        raise ValueError(
            f"drafting works with DynamicCache and StaticCache, got {found}: leave out "
            "cache_implementation and past_key_values, or pass one of these; a target that brings another cache of its own can't "
            "be drafted for"
        )
    if stores_otherwise(cache):
        raise ValueError(
            f"drafting keeps entries in a cache of its own, and this {type(cache).__name__} (or a layer of it) stores them in "
            "another way, with an update that is none of transformers': pass a DynamicCache or StaticCache as it is, or call "
            "generate without assistant_model"
        )
    length = int(cache.get_seq_length())
    if length == 0:
        return
    if mask_length not in (None, num_tokens):
        raise ValueError(
            f"input_ids has {num_tokens} columns and the attention_mask {mask_length}, so some of the text is in past_key_values "
            "only, and a drafter has to read it all: pass the whole text in input_ids"
        )
    items = next(
        (
            len(layer.keys)
            for layer in cache.layers
            if not isinstance(layer, LinearAttentionLayer) and layer.is_initialized
        ),
        batch,
    )
    if items != batch:
        raise ValueError(
            f"past_key_values holds a batch of {items} and input_ids one of {batch}: pass the cache of this batch"
        )
    if length >= num_tokens:
        raise ValueError(
            f"past_key_values holds {length} tokens and input_ids {num_tokens}, so there is nothing new to read: pass the whole "
            "text, with at least one token after what is in the cache"
        )


def export_entries(
    items: list[Entries], places: list[list[int]], cache: Cache, devices: list[torch.device | None]
) -> Cache:
    """Put entries into a caller's cache, so that it holds what plain `generate` would have left there.

    Args:
        items: for each item, its entries per layer, see [`TargetCache.entries_of`].
        places: for each item, where its entries stand in the caller's layout, padding counted.
        cache: a `DynamicCache` or `StaticCache`; what it held is replaced. One that offloads is left as after a forward:
            its first layer is where it is used next.
        devices: for each layer, where its entries are to go; `None`: where they are.
    """
    cache.reset()
    num_columns, first_is_in_place = max(item[-1] for item in places) + 1, False
    for index, layers in enumerate(zip(*items, strict=True)):
        if layers[0] is None:
            continue
        # A layer with a window has the last entries only.
        held = [item[len(item) - keys.shape[2] :] for item, (keys, _) in zip(places, layers, strict=True)]
        parts = []
        for per_item in zip(*layers, strict=True):
            first = per_item[0]
            laid_out = first.new_zeros(len(per_item), first.shape[1], num_columns, first.shape[3])
            for item, part in enumerate(per_item):
                laid_out[item, :, held[item]] = part[0]
            parts.append(laid_out if devices[index] is None else laid_out.to(devices[index]))
        if not cache.offloading:
            cache.update(*parts, index)
            forget_unrecorded(cache.layers[index], held)
            continue
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        cache.layers[index].prefetch()
        cache.layers[index].update(*parts)
        forget_unrecorded(cache.layers[index], held)
        if first_is_in_place:
            cache.offload(index, cache.only_non_sliding)
        stays_anyway = cache.is_sliding[index] and cache.only_non_sliding
        first_is_in_place = first_is_in_place or not stays_anyway
    return cache


def forget_unrecorded(layer: CacheLayerMixin, held: list[list[int]]) -> None:
    """Let a layer that records its past begin with the first column that is `held` of some item: no more was recorded."""
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.record_past:
        first = min(columns[0] for columns in held if columns)
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
