"""The target's key/value cache: what comes in from an earlier call, and what is handed back. See models/draft_cache.py."""

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import get_layer_types_and_kwargs

from ..models.draft_cache import GrowingCache

ROLLBACK_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class TargetCache(GrowingCache):
    """Entries of the committed text, then those of the tree that is being verified."""

    def import_from(self, cache: Cache, real: torch.BoolTensor) -> None:
        """Take over the entries that an earlier call left in `cache`.

        Args:
            cache: of one sequence.
            real: `(columns,)`, which of its columns are no padding.
        """
        for index, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                continue
            stored = stored_entries(layer)
            # Layers with a window may have forgotten the oldest columns, which nobody will look at any more.
            missing = len(real) - stored
            kept = real.to(layer.keys.device)
            self.update(
                *(
                    torch.nn.functional.pad(part[:, :, :stored], (0, 0, missing, 0))[:, :, kept]
                    for part in (layer.keys, layer.values)
                ),
                index,
            )

    def entries_of(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values `(1, heads, length, head_dim)` of one row, per layer."""
        length = self.row_lengths[row]
        return [
            tuple(part[row : row + 1, :, :length].clone() for part in (layer.keys, layer.values))
            if layer.is_initialized
            else None
            for layer in self.layers
        ]


def export_entries(
    rows: list[list[tuple[torch.Tensor, torch.Tensor] | None]], places: list[list[int]], cache: Cache
) -> Cache:
    """Put entries into a caller's cache, so that it holds what plain `generate` would have left there.

    Args:
        rows: for each row, its entries per layer, see [`TargetCache.entries_of`].
        places: for each row, where its entries stand in the caller's layout, padding counted.
        cache: a `DynamicCache` or `StaticCache`; what it held is replaced.
    """
    cache.reset()
    num_columns = max(row[-1] for row in places) + 1
    for index, layers in enumerate(zip(*rows, strict=True)):
        if layers[0] is None:
            continue
        parts = []
        for per_row in zip(*layers, strict=True):
            first = per_row[0]
            laid_out = first.new_zeros(len(per_row), first.shape[1], num_columns, first.shape[3])
            for row, part in enumerate(per_row):
                laid_out[row, :, places[row]] = part[0, :, : len(places[row])]
            parts.append(laid_out)
        cache.update(*parts, index)
    return cache


def check_can_roll_back(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if a target with this text config keeps state that a rejected draft can't be removed from."""
    layer_types, _ = get_layer_types_and_kwargs(config)
    others = sorted(set(layer_types) - ROLLBACK_LAYER_TYPES)
    if others:
        raise ValueError(
            f"this target has layers of type {', '.join(others)}; drafting works with {', '.join(sorted(ROLLBACK_LAYER_TYPES))} "
            "layers, whose cache can forget a rejected token. Call generate without assistant_model"
        )


def check_cache(cache: Cache | None, batch: int, num_tokens: int) -> None:
    """Raise a `ValueError` for a cache that can't be continued.

    Args:
        cache: as `generate` prepared it, or as the caller passed it in.
        batch, num_tokens: of the prompt, what is in the cache included.
    """
    if not isinstance(cache, (DynamicCache, StaticCache)) or cache.offloading:
        raise ValueError(
            f"drafting works with DynamicCache and StaticCache, not offloaded, got {type(cache).__name__}: leave out "
            "cache_implementation and past_key_values, or pass one of these"
        )
    length = int(cache.get_seq_length())
    if length == 0:
        return
    if batch > 1:
        raise ValueError(
            f"past_key_values holds {length} tokens of an earlier call, and drafting continues one sequence at a time, got a "
            f"batch of {batch}: leave it out (the whole text in input_ids is read again)"
        )
    if length >= num_tokens:
        raise ValueError(
            f"past_key_values holds {length} tokens and input_ids {num_tokens}, so there is nothing new to read: pass the whole "
            "text, with at least one token behind what is in the cache"
        )


def stored_entries(layer) -> int:
    """How many tokens a layer of a caller's cache still has."""
    if not layer.is_initialized:
        return 0
    return min(int(layer.get_seq_length()), layer.keys.shape[-2])
