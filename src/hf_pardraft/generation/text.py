"""The text of every row: ids on the device, lengths on the host."""

import torch


class Texts:
    """Rows of token ids that grow by different amounts, in one buffer.

    Args:
        input_ids: `(batch, length)`, the prompts, padding included.
    """

    MIN_CAPACITY = 64

    def __init__(self, input_ids: torch.LongTensor) -> None:
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        self.ids = input_ids.clone()

    def row(self, index: int) -> torch.LongTensor:
        """The text of a row, `(1, length)`."""
        return self.ids[index : index + 1, : self.lengths[index]]

    def append(self, tokens: torch.LongTensor, counts: list[int]) -> None:
        """Append the first `counts[b]` of `tokens (batch, most)` to row b."""
        most = max(counts)
        needed = max(self.lengths) + most
        if needed > self.ids.shape[1]:
            grown = self.ids.new_zeros(self.ids.shape[0], max(2 * self.ids.shape[1], needed, self.MIN_CAPACITY))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            self.ids[:, first : first + most] = tokens[:, :most]
        else:
            # What a row gets beyond its count lies behind its end, and is overwritten by what comes next.
            starts = torch.tensor(self.lengths, device=self.ids.device)[:, None]
            self.ids.scatter_(1, starts + torch.arange(most, device=self.ids.device), tokens[:, :most])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def last(self, count: int) -> torch.LongTensor:
        """The last `count` tokens of every row, `(batch, count)`; what stands before a text that has fewer is meaningless."""
        first = self.lengths[0]
        if all(length == first for length in self.lengths):
            return self.ids[:, first - count : first]
        ends = torch.tensor(self.lengths, device=self.ids.device)[:, None]
        places = ends - count + torch.arange(count, device=self.ids.device)
        return self.ids.gather(1, places.clamp(min=0))

    def select_rows(self, rows: list[int]) -> None:
        """Keep only some rows."""
        self.lengths = [self.lengths[row] for row in rows]
        self.ids = self.ids[torch.tensor(rows, device=self.ids.device)]


def stack_padded(rows: list[torch.LongTensor], padding: int) -> torch.LongTensor:
    """Rows of `(1, length)` as `(batch, longest)`, padded on the right as plain `generate` pads them."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=padding) for row in rows])
