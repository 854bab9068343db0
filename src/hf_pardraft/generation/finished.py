"""Batch items whose texts are over: what a call returns of them, and what it leaves in the caller's cache."""

import torch
from transformers import Cache

from .target_side.cache import Entries, TargetCache, without_last
from .target_side.callers_cache import export_entries


class FinishedItems:
    """Collects items in the order in which they finish; they come out in the caller's.

    Args:
        padding: the token that shorter texts are filled up with.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding
        self.texts: dict[int, torch.LongTensor] = {}
        self.entries: dict[int, Entries] = {}

    def add(self, item: int, text: torch.LongTensor, entries: Entries | None) -> None:
        """Note an item's text `(1, length)`, and its cache entries if anybody will see them."""
        self.texts[item] = text.clone()
        if entries is not None:
            self.entries[item] = entries

    def text(self, length: int) -> torch.LongTensor:
        """All items, `(batch, longest)`, cut to `length` and padded on the right."""
        return stack_padded([self.texts[item][:, :length] for item in sorted(self.texts)], self.padding)

    def missing(self, prompt_length: int, length: int) -> list[list[int]]:
        """For each item, the tokens that plain `generate` reads after the item is over: its last, and padding.

        Args:
            prompt_length: columns of the prompt.
            length: where texts are cut, see [`text`]; of its last token nothing is read.
        """
        read = self.text(length)[:, prompt_length:-1].tolist()
        return [read[item][self.texts[item].shape[1] - prompt_length - 1 :] for item in range(len(read))]

    def lengths_read(self, columns: list[list[int]], prompt_length: int) -> list[int]:
        """How many tokens of each item the target has read: all but its last; arguments as in [`fill`]."""
        return [len(columns[item]) + self.texts[item].shape[1] - prompt_length - 1 for item in range(len(columns))]

    def fill(self, cache: Cache, own: TargetCache, columns: list[list[int]], prompt_length: int, length: int) -> Cache:
        """Make of a caller's cache what plain `generate` leaves there: the entries of all columns but the last.

        Args:
            cache: the caller's.
            own: where recurrent layers have their state.
            columns: for each item, where in the prompt its tokens stand.
            prompt_length: columns of the prompt.
            length: where texts are cut, see [`text`].
        """
        places, entries = [], []
        for item in sorted(self.texts):
            places.append([*columns[item], *range(prompt_length, length)][:-1])
            entries.append(without_last(self.entries[item], self.texts[item].shape[1] - length))
        filled = export_entries(entries, places, cache, own.devices())
        own.export_recurrent_to(filled)
        return filled


def stack_padded(items: list[torch.LongTensor], padding: int) -> torch.LongTensor:
    """Batch items of `(1, length)` as `(batch, longest)`, padded on the right as plain `generate` pads them."""
    longest = max(item.shape[1] for item in items)
    return torch.cat([torch.nn.functional.pad(item, (0, longest - item.shape[1]), value=padding) for item in items])
