"""The texts of a batch: ids on the device, lengths and what is newest on the host."""

import torch


class TokenBuffer:
    """Batch items of token ids that grow by different amounts, in one buffer.

    New tokens are known on the host first, and wait there until somebody looks at the text.

    Args:
        input_ids: `(batch, length)`, the prompts, padding included.

    Attributes:
        lengths: of each item, what waits included.
        ids: `(batch, capacity)`, without what waits.
        device: where they are.
    """

    MIN_CAPACITY = 64

    def __init__(self, input_ids: torch.LongTensor) -> None:
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        # As plain `generate` returns them, whatever the prompts are.
        self.ids = input_ids.to(torch.long, copy=True)
        self.device = input_ids.device
        self.waiting: list[list[int]] = [[] for _ in self.lengths]

    def item(self, index: int) -> torch.LongTensor:
        """The text of an item, `(1, length)`."""
        self._write()
        return self.ids[index : index + 1, : self.lengths[index]]

    def append(self, new_tokens: list[list[int]]) -> None:
        """Append some tokens to each item."""
        for index, tokens in enumerate(new_tokens):
            self.waiting[index] += tokens
            self.lengths[index] += len(tokens)

    def remove(self, index: int, count: int) -> None:
        """Remove the last `count` tokens of an item, which were just appended."""
        if count:
            self.lengths[index] -= count
            # What is written already lies after the item's end, and is overwritten by what comes next.
            del self.waiting[index][-count:]

    def last(self, count: int) -> torch.LongTensor:
        """The last `count` tokens of every item, `(batch, count)`; what stands before a text that has fewer is meaningless."""
        self._write()
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            return self.ids[:, first - count : first]
        ends = torch.tensor(self.lengths, device=self.device)[:, None]
        places = ends - count + torch.arange(count, device=self.device)
        return self.ids.gather(1, places.clamp(min=0))

    def select_items(self, items: list[int]) -> None:
        """Keep only some items."""
        self.lengths = [self.lengths[item] for item in items]
        self.waiting = [self.waiting[item] for item in items]
        self.ids = self.ids[torch.tensor(items, device=self.device)]

    def _write(self) -> None:
        """Write what waits to the buffer."""
        most = max(map(len, self.waiting))
        if most == 0:
            return
        starts = [length - len(tokens) for length, tokens in zip(self.lengths, self.waiting, strict=True)]
        needed = max(starts) + most
        if needed > self.ids.shape[1]:
            grown = self.ids.new_zeros(self.ids.shape[0], max(2 * self.ids.shape[1], needed, self.MIN_CAPACITY))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        # What an item gets beyond its own lies after its end.
        filled = [tokens + [0] * (most - len(tokens)) for tokens in self.waiting]
        new_ids = torch.tensor(filled, device=self.device)
        first = starts[0]
        if all(start == first for start in starts):
            self.ids[:, first : first + most] = new_ids
        else:
            places = torch.tensor(starts, device=self.device)[:, None] + torch.arange(most, device=self.device)
            self.ids.scatter_(1, places, new_ids)
        self.waiting = [[] for _ in self.lengths]


def filling_gaps(gone: list[bool]) -> list[int]:
    """The items that are left, the last ones in the places of those that are gone, so that few have to be moved."""
    num_left = gone.count(False)
    last = [item for item in range(num_left, len(gone)) if not gone[item]]
    return [last.pop() if is_gone else place for place, is_gone in enumerate(gone[:num_left])]
