"""Rows that are over: their texts and cache entries, and what becomes of them when the whole batch is over."""

import torch
from transformers import Cache

from .cache import Entries, TargetCache, export_entries, without_last
from .sequences import stack_padded


class FinishedRows:
    """Collects rows in the order in which they finish; they come out in the caller's.

    Args:
        padding: the token that shorter texts are filled up with.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding
        self.texts: dict[int, torch.LongTensor] = {}
        self.entries: dict[int, Entries] = {}

    def add(self, row: int, text: torch.LongTensor, entries: Entries | None) -> None:
        """Note a row's text `(1, length)`, and its cache entries if anybody will see them."""
        self.texts[row] = text.clone()
        if entries is not None:
            self.entries[row] = entries

    def text(self, length: int) -> torch.LongTensor:
        """All rows, `(batch, longest)`, cut to `length` and padded on the right."""
        return stack_padded([self.texts[row][:, :length] for row in sorted(self.texts)], self.padding)

    def missing(self, prompt_length: int, length: int) -> list[list[int]]:
        """For each row, the tokens that plain `generate` reads after the row is over: its last, and padding.

        Args:
            prompt_length: columns of the prompt.
            length: where texts are cut, see [`text`]; of its last token nothing is read.
        """
        read = self.text(length)[:, prompt_length:-1].tolist()
        return [read[row][self.texts[row].shape[1] - prompt_length - 1 :] for row in range(len(read))]

    def fill(self, cache: Cache, own: TargetCache, columns: list[list[int]], prompt_length: int, length: int) -> Cache:
        """Make of a caller's cache what plain `generate` leaves there: the entries of all columns but the last.

        Args:
            cache: the caller's.
            own: where recurrent layers have their state.
            columns: for each row, where in the prompt its tokens stand.
            prompt_length: columns of the prompt.
            length: where texts are cut, see [`text`].
        """
        places, entries = [], []
        for row in sorted(self.texts):
            places.append([*columns[row], *range(prompt_length, length)][:-1])
            entries.append(without_last(self.entries[row], self.texts[row].shape[1] - length))
        filled = export_entries(entries, places, cache)
        own.export_recurrent_to(filled)
        return filled
