"""Texts that are written together: as soon as some are at their ends, others take their places."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from .joined_cache import JoinedCache, holds

# Prompts are read in groups of about so many tokens: more at once are not read sooner, but take memory.
TOKENS_AT_ONCE = 512
# A batch goes on until this share of its items is at an end: each stop costs some milliseconds, and ended items their steps.
SHARE_ENDED = 1 / 16
# The same where a batch that goes on has to read its texts again, and the size below which that doesn't pay.
SHARE_ENDED_REREAD = 1 / 2
FEW_ITEMS = 4
# A beginning of fewer tokens that prompts have in common is read with each of them.
FEWEST_SHARED = 8


@dataclass(eq=False)
class Item:
    """A text that is being written.

    Attributes:
        row: whose text it is.
        prompt: tokens that it goes on from.
        room: most tokens that may be written.
        seed: of what it draws.
        written: tokens so far, with the one that ends the text.
        generator: of what it draws, which goes on where it is.
    """

    row: Any
    prompt: list[int]
    room: int
    seed: int
    written: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.written


class EnoughEnded(StoppingCriteria):
    """Ends items at tokens that end a text, or where other criteria say so, and all of them once enough are at their ends.

    Args:
        end_ids: tokens that end a text.
        enough: how many items.
        others: criteria of single items.
        device: of the batch.
    """

    def __init__(self, end_ids: set[int], enough: int, others: StoppingCriteriaList, device: torch.device) -> None:
        self.end_ids, self.enough, self.others = torch.tensor(sorted(end_ids), device=device), enough, others
        self._ended: torch.BoolTensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        ended = torch.isin(input_ids[:, -1], self.end_ids)
        if self.others:
            ended = ended | self.others(input_ids, scores)
        self._ended = ended if self._ended is None else self._ended | ended
        return self._ended | (self._ended.sum() >= self.enough)


# Writes on: items, most new tokens, how many ended items are enough, the items' cache (`None`: they are read anew), and how many
# of their first tokens that holds before their padding. Returns the new tokens of each item.
Generate = Callable[[list[Item], int, int, Any, int], list[list[int]]]


class RefilledBatch:
    """A batch whose ended items are replaced.

    Where a target's cache can't be put together of several ones, a batch that goes on with other items reads all again.

    Args:
        generate: writes on.
        is_ended: whether an item is at its end.
        most_items: of the batch.
        joins_caches: whether the target's cache holds entries per token only.
        shares_beginnings: whether these may be apart, so that what prompts begin with is read once.
        refills: if not, other items come in when all are at their ends.

    Attributes:
        items: that are being written.
    """

    def __init__(
        self,
        generate: Generate,
        is_ended: Callable[[Item], bool],
        most_items: int,
        joins_caches: bool = True,
        shares_beginnings: bool = True,
        refills: bool = True,
    ) -> None:
        self.generate, self.is_ended = generate, is_ended
        self.most_items, self.joins_caches, self.refills = most_items, joins_caches and refills, refills
        self.items: list[Item] = []
        self.cache: JoinedCache | None = None
        self.shares_beginnings = shares_beginnings
        self.beginning: tuple[list[int], DynamicCache] = ([], DynamicCache())

    def refill(self, waiting: list[Item]) -> None:
        """Take in items from those that are `waiting`, as many as there is room for, the longest first."""
        if self.items and not self.refills:
            return
        waiting.sort(key=lambda item: (len(item.prompt), item.prompt))
        newcomers = [waiting.pop() for _ in range(min(self.most_items - len(self.items), len(waiting)))]
        while newcomers:
            # They are sorted, so little of a group is padding.
            size = max(1, TOKENS_AT_ONCE // len(newcomers[0].prompt))
            group, newcomers = newcomers[:size], newcomers[size:]
            self._read(group)

    def write_on(self) -> list[Item]:
        """Write until some items are at their ends; these leave the batch."""
        if not any(self.is_ended(item) for item in self.items):
            most = min(item.room - len(item.written) for item in self.items)
            self._add(self.items, self.generate(self.items, most, self._enough(), self._trimmed_cache(), 0))
        return self._without_ended()

    def _read(self, group: list[Item]) -> None:
        """Read prompts, and write their first tokens."""
        if not self.joins_caches:
            self.items += group
            return
        num_shared = self._num_shared(group)
        cache, lengths = self._beginning_of(group, num_shared), [len(item.prompt) for item in group]
        self._add(group, self.generate(group, 1, len(group), cache, num_shared))
        if not holds(cache, len(group), max(lengths)):
            self.joins_caches, self.cache = False, None
        elif self.cache is None:
            self.cache = JoinedCache(cache, self.most_items, lengths, num_shared)
        else:
            self._trimmed_cache()
            self.cache.append(cache, lengths, num_shared)
        self.items += group

    def _num_shared(self, group: list[Item]) -> int:
        """How many tokens that the prompts of a group begin with are not read for each of them; they are read now if need be."""
        if not self.shares_beginnings:
            return 0
        # Of each prompt a token has to be read.
        ids = common_beginning([item.prompt[:-1] for item in group])
        known = len(common_beginning([ids, self.beginning[0]]))
        if len(ids) > 2 * known and len(ids) >= FEWEST_SHARED and len(group) > 1:
            self.beginning = (ids, DynamicCache())
            self.generate([Item(None, ids, 1, 0)], 1, 1, self.beginning[1], 0)
            known = len(ids) if holds(self.beginning[1], 1, len(ids)) else 0
        return known if known >= FEWEST_SHARED else 0

    def _beginning_of(self, group: list[Item], num_shared: int) -> DynamicCache:
        """A cache of a group that holds what its prompts begin with."""
        cache = DynamicCache()
        if num_shared:
            for index, layer in enumerate(self.beginning[1].layers):
                keys, values = (
                    part[:, :, :num_shared].expand(len(group), -1, -1, -1) for part in (layer.keys, layer.values)
                )
                cache.update(keys, values, index)
        return cache

    def _trimmed_cache(self) -> JoinedCache | None:
        """The cache, without columns that no item uses."""
        if self.cache is not None and self.items:
            # The last token has been written, and not read.
            self.cache.keep_columns(max(len(item.prompt) + len(item.written) for item in self.items) - 1)
        return self.cache

    def _enough(self) -> int:
        size = len(self.items)
        if not self.refills or (not self.joins_caches and size <= FEW_ITEMS):
            return size
        return max(1, int(size * (SHARE_ENDED if self.joins_caches else SHARE_ENDED_REREAD)))

    def _add(self, items: list[Item], new: list[list[int]]) -> None:
        for item, ids in zip(items, new, strict=True):
            item.written += ids

    def _without_ended(self) -> list[Item]:
        ended = []
        for place in reversed(range(len(self.items))):
            if self.is_ended(self.items[place]):
                ended.append(self.items[place])
                last = self.items.pop()
                if place < len(self.items):
                    self.items[place] = last
                if self.cache is not None:
                    self.cache.remove(place)
        return ended


def common_beginning(texts: list[list[int]]) -> list[int]:
    """The tokens that all texts begin with."""
    return [tokens[0] for tokens in takewhile(lambda tokens: len({*tokens}) == 1, zip(*texts, strict=False))]
