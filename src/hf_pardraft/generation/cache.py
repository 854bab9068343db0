"""The target's key/value cache: appends a round's tree, keeps one path of it, and hands the result over."""

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from ..models.drafting import GrowingCache

ROLLBACK_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class TargetCache(GrowingCache):
    """Entries of the committed text, then those of the tree that is being verified."""

    def keep_path(self, num_committed: int, nodes: list[int]) -> None:
        """Drop the tree but for one path.

        Args:
            num_committed: entries before the tree: all that was committed, the root included.
            nodes: the nodes to keep (0-based, ascending); their entries move up behind the committed ones. Those of a
                chain are in place already, and nothing is copied.
        """
        end = num_committed + len(nodes)
        in_place = nodes == list(range(len(nodes)))
        for layer in self.layers:
            if not in_place:
                source = torch.tensor(nodes, device=layer.keys.device) + num_committed
                layer.key_buffer[:, :, num_committed:end] = layer.keys.index_select(2, source)
                layer.value_buffer[:, :, num_committed:end] = layer.values.index_select(2, source)
            layer.crop(end - layer.get_seq_length())

    def export_to(self, cache: Cache) -> Cache:
        """Fill an empty `DynamicCache`, so that the caller gets back the kind of cache that plain `generate` returns."""
        for index, layer in enumerate(self.layers):
            cache.update(layer.keys, layer.values, index)
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
