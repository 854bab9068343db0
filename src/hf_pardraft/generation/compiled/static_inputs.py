"""From rounds of any shape to compiled ones: caches, news and positions in tensors that last."""

import torch

from ...models.cache import GrowingLayer, RowEntries
from ...models.inputs import DraftInputs, StaticDraftInputs, take_rows
from ..pending import Unread
from .static_cache import Buffers, capacity_for, new_buffers
from .steps import Standing
from .tensor_pool import LastingTensors


def moved_cache(
    cache: RowEntries, batch: int, num_more: int, tensors: LastingTensors, role: str
) -> tuple[Buffers, list[int]]:
    """The entries of a cache in buffers with room for `num_more`, each at its token's index; and how many each row has."""
    layers = cache.growing_layers()
    lengths = cache.row_lengths or [layers[0].get_seq_length()] * batch
    capacity = capacity_for(max(lengths) + num_more)
    return new_buffers([_laid_out(layer, lengths) for layer in layers], capacity, tensors, role), lengths


def _laid_out(layer: GrowingLayer, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, `(batch, heads, longest, head_dim)`; zeros where it has dropped its first entries."""
    if layer.dropped is None:
        return layer.keys, layer.values
    parts = []
    for entries in (layer.keys, layer.values):
        laid_out = entries.new_zeros(*entries.shape[:2], max(lengths), entries.shape[3])
        for row, (length, held) in enumerate(zip(lengths, layer.held(lengths), strict=True)):
            laid_out[row, :, length - held : length] = entries[row, :, :held]
        parts.append(laid_out)
    return tuple(parts)


def moved_news(context: DraftInputs, width: int, tensors: LastingTensors) -> tuple[StaticDraftInputs, int]:
    """What the drafter has not read yet, padded on the right to `width`; and how much that is in the longest row."""
    batch, most = context.new_ids.shape
    counts = context.new_counts or [most] * batch
    device = context.new_ids.device
    held = torch.tensor(counts, device=device)
    # What is real is on the right, and comes to the left.
    order = (torch.arange(width, device=device) + most - held[:, None]).clamp(max=most - 1)
    features = context.features
    if features is not None:
        # They end beside the newest token, and may begin later than the tokens.
        missing = most - features.shape[1]
        features = torch.nn.functional.pad(features, (0, 0, missing, 0)) if missing > 0 else features[:, -most:]
        features = take_rows(features, order)
    news = StaticDraftInputs(
        tensors.copy("news: ids", context.new_ids.gather(1, order)),
        tensors.copy("news: positions", context.new_positions.gather(1, order)),
        tensors.copy("news: counts", held),
        None if features is None else tensors.copy("news: features", features),
    )
    return news, max(counts)


def moved_standing(
    lengths: list[int],
    draft_lengths: list[int],
    unread: Unread,
    axis_shift: torch.LongTensor | None,
    tensors: LastingTensors,
) -> Standing:
    """Where the rows stand that have `lengths` entries, and the newest tokens to be read."""
    device = unread.ids.device
    return Standing(
        tensors.copy("lengths", torch.tensor(lengths, device=device)),
        tensors.copy("draft lengths", torch.tensor(draft_lengths, device=device)),
        tensors.copy("roots", unread.ids),
        tensors.copy("root positions", unread.root_positions),
        tensors.copy("growing", torch.ones(len(lengths), dtype=torch.long, device=device)),
        None if axis_shift is None else packed(axis_shift),
    )


def packed(values: torch.Tensor) -> torch.Tensor:
    """A copy with the strides that follow from its shape, on which compiled code depends."""
    return values.clone(memory_format=torch.contiguous_format)
