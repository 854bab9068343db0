"""From rounds of any shape to compiled ones: caches, news and positions in tensors that last."""

import torch

from ..models.draft_cache import GrowingLayer, RowEntries
from ..models.drafting import DraftContext, News
from .buffers import Buffers, capacity_for, new_buffers
from .pieces import Standing
from .prompt import Unread


def moved_cache(cache: RowEntries, batch: int, num_more: int) -> tuple[Buffers, list[int]]:
    """The entries of a cache in buffers with room for `num_more`, each at its token's index; and how many each row has."""
    layers = cache.growing_layers()
    lengths = cache.row_lengths or [layers[0].get_seq_length()] * batch
    capacity = capacity_for(max(lengths) + num_more)
    return new_buffers([_laid_out(layer, lengths) for layer in layers], capacity), lengths


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


def moved_news(context: DraftContext, width: int) -> tuple[News, int]:
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
        places = order.to(features.device)[:, :, None].expand(-1, -1, features.shape[2])
        features = features.gather(1, places)
    news = News(context.new_ids.gather(1, order), context.new_positions.gather(1, order), held, features)
    lasting(news.ids, news.positions, news.counts, news.features)
    return news, max(counts)


def moved_standing(
    lengths: list[int], draft_lengths: list[int], unread: Unread, axis_shift: torch.LongTensor | None
) -> Standing:
    """Where the rows stand that have `lengths` entries, and the newest tokens to be read."""
    device = unread.ids.device
    standing = Standing(
        torch.tensor(lengths, device=device),
        torch.tensor(draft_lengths, device=device),
        packed(unread.ids),
        packed(unread.root_positions),
        torch.ones(len(lengths), dtype=torch.long, device=device),
        None if axis_shift is None else packed(axis_shift),
    )
    lasting(standing.lengths, standing.draft_lengths, standing.roots, standing.root_positions, standing.growing)
    return standing


def packed(values: torch.Tensor) -> torch.Tensor:
    """A copy with the strides that follow from its shape, on which compiled code depends."""
    return values.clone(memory_format=torch.contiguous_format)


def lasting(*tensors: torch.Tensor | None) -> None:
    """Say that tensors stay where they are: CUDA graphs change them in place."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cuda":
            torch._dynamo.mark_static_address(tensor)
