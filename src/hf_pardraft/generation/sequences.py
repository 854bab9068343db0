"""The text of every item: ids on the device, lengths and what is newest on the host."""

from collections.abc import Callable

import torch
from transformers import Cache, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from .target_side.cache import Entries, TargetCache, export_entries, without_last


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


def stack_padded(items: list[torch.LongTensor], padding: int) -> torch.LongTensor:
    """Batch items of `(1, length)` as `(batch, longest)`, padded on the right as plain `generate` pads them."""
    longest = max(item.shape[1] for item in items)
    return torch.cat([torch.nn.functional.pad(item, (0, longest - item.shape[1]), value=padding) for item in items])


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


class StopChecks:
    """Finds where, inside a run of new tokens, generation is over.

    End of text and length are looked up on the host, where the new tokens are known already. Any other criterion is asked
    once per token, with the text up to that token, exactly as plain `generate` asks it.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int = 1) -> None:
        lengths = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
        known = {id(criterion) for criterion in lengths + ends}
        self.others = StoppingCriteriaList(criterion for criterion in criteria if id(criterion) not in known)
        self.length_criteria = lengths
        self.max_length = min((criterion.max_length for criterion in lengths), default=None)
        self.eos_token_ids = {token for criterion in ends for token in criterion.eos_token_id.flatten().tolist()}
        self.end_of_item: list[int | None] = [None] * batch

    def room(self, length: int, depth: int) -> int:
        """How many tokens are worth drafting after a text of `length` tokens: a round commits one more than it drafts."""
        return depth if self.max_length is None else max(0, min(depth, self.max_length - length - 1))

    def cut(
        self,
        item: int,
        length: int,
        new_tokens: list[int],
        text: Callable[[], torch.LongTensor],
        scores: Callable[[], tuple[torch.Tensor, ...] | None],
    ) -> int:
        """Where to cut a run of new tokens.

        Args:
            item: which item of the caller's batch it is.
            length: of its text, the new tokens not counted.
            new_tokens: they.
            text: returns the text with all new tokens at its end, `(1, length + new)`; called if a criterion looks at it.
            scores: returns one entry per generated token with the new ones at its end, or `None`: what criteria get as scores.

        Returns:
            How many of the new tokens to keep.
        """
        if self.end_of_item[item] is not None:
            return len(new_tokens)
        all_scores = scores() if self.others else None
        for kept, token in enumerate(new_tokens, start=1):
            length += 1
            self._remind_of_long_text(text, length)
            is_over = self.is_known_end(token, length)
            # Criteria may keep count of their calls, so each is asked at every token, the last one included.
            if self.others:
                seen_scores = all_scores[: len(all_scores) - len(new_tokens) + kept] if all_scores is not None else None
                is_over = bool(self.others(text()[:, :length], seen_scores).all()) or is_over
            if is_over:
                self.end_of_item[item] = length
                return kept
        return len(new_tokens)

    def is_known_end(self, token: int, length: int) -> bool:
        """Whether a text of this length, whose last token is this one, is over whatever other criteria say."""
        return token in self.eos_token_ids or (self.max_length is not None and length >= self.max_length)

    def over(self, items: list[int], lengths: list[int]) -> list[bool]:
        """Which items need no further tokens.

        Plain `generate` fills up a finished item with padding if there is an end-of-text token, and otherwise goes on writing
        it until all items are finished, or the longest text is reached.
        """
        if self.eos_token_ids:
            return [self.end_of_item[item] is not None for item in items]
        common = self.common_length()
        limit = self.max_length if common is None else common
        return [limit is not None and length >= limit for length in lengths]

    def common_length(self) -> int | None:
        """The length at which a batch without an end-of-text token ends; `None` until all items are finished."""
        return None if None in self.end_of_item else max(self.end_of_item)

    def _remind_of_long_text(self, text: Callable[[], torch.LongTensor], length: int) -> None:
        """Let the length criterion log its reminder once the text outgrows the model's positions."""
        for criterion in self.length_criteria:
            if criterion.max_position_embeddings is not None and length > criterion.max_position_embeddings:
                criterion(text()[:, :length], None)
