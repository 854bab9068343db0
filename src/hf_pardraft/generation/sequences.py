"""The text of every row: ids on the device, lengths and what is newest on the host."""

import torch


class Texts:
    """Rows of token ids that grow by different amounts, in one buffer.

    New tokens are known on the host first, and wait there until somebody looks at the text.

    Args:
        input_ids: `(batch, length)`, the prompts, padding included.

    Attributes:
        lengths: of each row, what waits included.
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

    def row(self, index: int) -> torch.LongTensor:
        """The text of a row, `(1, length)`."""
        self._write()
        return self.ids[index : index + 1, : self.lengths[index]]

    def append(self, new_tokens: list[list[int]]) -> None:
        """Append some tokens to each row."""
        for index, tokens in enumerate(new_tokens):
            self.waiting[index] += tokens
            self.lengths[index] += len(tokens)

    def remove(self, index: int, count: int) -> None:
        """Remove the last `count` tokens of a row, which were just appended."""
        if count:
            self.lengths[index] -= count
            # What is written already lies behind the row's end, and is overwritten by what comes next.
            del self.waiting[index][-count:]

    def last(self, count: int) -> torch.LongTensor:
        """The last `count` tokens of every row, `(batch, count)`; what stands before a text that has fewer is meaningless."""
        self._write()
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            return self.ids[:, first - count : first]
        ends = torch.tensor(self.lengths, device=self.device)[:, None]
        places = ends - count + torch.arange(count, device=self.device)
        return self.ids.gather(1, places.clamp(min=0))

    def select_rows(self, rows: list[int]) -> None:
        """Keep only some rows."""
        self.lengths = [self.lengths[row] for row in rows]
        self.waiting = [self.waiting[row] for row in rows]
        self.ids = self.ids[torch.tensor(rows, device=self.device)]

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
        # What a row gets beyond its own lies behind its end.
        filled = [tokens + [0] * (most - len(tokens)) for tokens in self.waiting]
        new_ids = torch.tensor(filled, device=self.device)
        first = starts[0]
        if all(start == first for start in starts):
            self.ids[:, first : first + most] = new_ids
        else:
            places = torch.tensor(starts, device=self.device)[:, None] + torch.arange(most, device=self.device)
            self.ids.scatter_(1, places, new_ids)
        self.waiting = [[] for _ in self.lengths]


def stack_padded(rows: list[torch.LongTensor], padding: int) -> torch.LongTensor:
    """Rows of `(1, length)` as `(batch, longest)`, padded on the right as plain `generate` pads them."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=padding) for row in rows])
