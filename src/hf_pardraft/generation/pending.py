"""What a drafter has yet to read: what was committed since its last draft."""

import torch

from ..models.inputs import DraftInputs


class PendingInputs:
    """Newly committed tokens and target states of several rounds, of a batch that items leave.

    A drafter may be left alone for many rounds. So an item that leaves is taken out of them only when they are read.
    """

    def __init__(self) -> None:
        # What was noted between two changes of the batch; and of each change, which items went on.
        self.parts: list[list[DraftInputs]] = [[]]
        self.kept: list[list[int]] = []

    def add(self, inputs: DraftInputs) -> None:
        """Note what a round has committed."""
        self.parts[-1].append(inputs)

    def select_items(self, items: list[int]) -> None:
        """Go on with only some items of the batch."""
        self.kept.append(items)
        self.parts.append([])

    @property
    def num_tokens(self) -> int:
        """How many tokens of an item there are, at most."""
        return sum(inputs.new_ids.shape[1] for part in self.parts for inputs in part)

    @property
    def has_features(self) -> bool:
        """Whether there are target states."""
        return any(inputs.features is not None for part in self.parts for inputs in part)

    def take(self) -> DraftInputs:
        """All of it, after which there is none."""
        *earlier, found = self.parts
        items: list[int] | None = None
        for part, kept in zip(reversed(earlier), reversed(self.kept), strict=True):
            items = kept if items is None else [kept[item] for item in items]
            if part:
                found = [items_of(joined(part), items), *found]
        self.parts, self.kept = [[]], []
        return joined(found)


def joined(contexts: list[DraftInputs]) -> DraftInputs:
    """Several rounds' pending tokens as one. Items stay padded on the left, so padding between the parts moves to the front."""
    if len(contexts) == 1:
        return contexts[0]
    ids, positions, counts = _joined_columns(
        [(context.new_ids, context.new_positions) for context in contexts], [context.new_counts for context in contexts]
    )
    result = DraftInputs(ids, positions, new_counts=counts)
    read = [context for context in contexts if context.features is not None]
    if read:
        result.features, result.feature_positions, result.feature_counts = _joined_columns(
            [(context.features, context.feature_positions) for context in read],
            [context.feature_counts for context in read],
        )
    return result


def _joined_columns(
    parts: list[tuple[torch.Tensor, torch.Tensor]], counts: list[list[int] | None]
) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    """Join pairs of `(batch, columns, ...)` tensors along their columns, real ones last; and how many of them are real."""
    first, second = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    if all(count is None for count in counts):
        return first, second, None
    batch, widths = first.shape[0], [part[0].shape[1] for part in parts]
    order, totals = [], []
    for item in range(batch):
        real, padding, start = [], [], 0
        for width, count in zip(widths, counts, strict=True):
            boundary = start + width - (width if count is None else count[item])
            padding += range(start, boundary)
            real += range(boundary, start + width)
            start += width
        order.append(padding + real)
        totals.append(len(real))
    widest = max(totals)
    order = torch.tensor(order, device=first.device)[:, -widest:]
    items = torch.arange(batch, device=first.device)[:, None]
    return first[items, order], second[items.to(second.device), order.to(second.device)], totals


def items_of(context: DraftInputs, items: list[int]) -> DraftInputs:
    """Only some items of what was observed, without the columns that are padding in all of them."""
    ids, positions, counts = _items_of_columns(context.new_ids, context.new_positions, context.new_counts, items)
    result = DraftInputs(ids, positions, new_counts=counts)
    if context.features is not None:
        result.features, result.feature_positions, result.feature_counts = _items_of_columns(
            context.features, context.feature_positions, context.feature_counts, items
        )
    return result


def _items_of_columns(
    first: torch.Tensor, second: torch.Tensor, counts: list[int] | None, items: list[int]
) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    """Some items of a pair of `(batch, columns, ...)` tensors, and how many columns of each are real, `None` if all are."""
    kept = [first.shape[1]] * len(items) if counts is None else [counts[item] for item in items]
    # An item that is left alone is drafted without a mask, so nothing may hide after one.
    first, second = (
        tensor[torch.tensor(items, device=tensor.device), tensor.shape[1] - max(kept) :] for tensor in (first, second)
    )
    return first, second, None if min(kept) == max(kept) else kept
