"""What a caller asked `generate` to return besides the text: scores, logits, hidden states, attentions, the cache."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class ItemRead:
    """What one forward read of one item, on the path that was accepted.

    Attributes:
        item: the item, as the caller numbers them.
        index: the same item, in this forward's batch.
        num_past: tokens of the item in the cache before this forward.
        pending: the forward's queries that read pending tokens, the anchor's last.
        nodes: the forward's queries that read the accepted nodes.
        dropped: for each layer, how many of the item's first entries are not in the cache any more.
        places: where each token of the item stands in the caller's layout, padding counted.
        first_place: the first column that this forward accounts for.
    """

    item: int
    index: int
    num_past: int
    pending: list[int]
    nodes: list[int]
    dropped: list[int]
    places: list[int]
    first_place: int


class OutputRecorder:
    """Collects one entry per generated token and item, in the shapes of plain `generate`.

    Plain `generate` reads one token per forward, and its first forward reads the prompt. A round here reads several,
    so they are handed out one token at a time; those before the anchor belong to the first token. Entries of an item that
    ended before the others are zeros.

    Args:
        generation_config: of the call.
        batch: number of items.
        layer_windows: for each layer, the size of its attention window, or `None`.
    """

    def __init__(self, generation_config: GenerationConfig, batch: int, layer_windows: list[int | None]) -> None:
        self.enabled = bool(generation_config.return_dict_in_generate)
        self.layer_windows = layer_windows

        def items_if(wanted: bool | None) -> list[list[Any]] | None:
            return [[] for _ in range(batch)] if self.enabled and wanted else None

        self.scores = items_if(generation_config.output_scores)
        self.logits = items_if(generation_config.output_logits)
        self.hidden_states = items_if(generation_config.output_hidden_states)
        self.attentions = items_if(generation_config.output_attentions)

    @property
    def takes_states(self) -> bool:
        """Whether anybody asked for hidden states or attentions."""
        return self.hidden_states is not None or self.attentions is not None

    def add_scores(
        self, items: list[int], paths: list[list[int]], scores: torch.Tensor, logits: torch.Tensor | None
    ) -> None:
        """Take the processed `scores` and raw `logits`, `(batch, slots, vocab)`, of the slots on the items' accepted `paths`."""
        for collected, values in ((self.scores, scores), (self.logits, logits)):
            if collected is not None:
                for index, (item, path) in enumerate(zip(items, paths, strict=True)):
                    # Copied: a view would hold the values of all slots.
                    collected[item] += torch.stack([values[index, slot] for slot in path]).split(1)

    def add_states(self, outputs: Any, read: ItemRead) -> None:
        """Take an item's hidden states and attentions: one entry for the anchor, and one for each accepted node."""
        for count in range(len(read.nodes) + 1):
            queries = read.pending if count == 0 else read.nodes[count - 1 : count]
            num_seen = read.num_past + len(read.pending) + count
            end = read.places[num_seen - 1] + 1
            query_places = [place - read.first_place for place in read.places[read.num_past : num_seen]]
            query_places, height = (query_places, end - read.first_place) if count == 0 else ([0], 1)
            if self.hidden_states is not None:
                # Some targets have several states per token, on axes before the batch's.
                of_item = (states[..., read.index, queries, :] for states in outputs.hidden_states)
                placed = tuple(_placed_queries(states, query_places, height) for states in of_item)
                self.hidden_states[read.item].append(placed)
            if self.attentions is not None:
                new = [*read.pending, *read.nodes[:count]]
                self.attentions[read.item].append(
                    tuple(
                        self._placed_attention(layer, attention[read.index], queries, new, query_places, height, read)
                        for layer, attention in enumerate(outputs.attentions)
                    )
                )

    def _placed_attention(
        self,
        layer: int,
        attention: torch.Tensor,
        queries: list[int],
        new: list[int],
        query_places: list[int],
        height: int,
        read: ItemRead,
    ) -> torch.Tensor:
        """Lay `queries` of a layer's `(heads, queries, columns)` out as plain `generate` does, whose cache forgets likewise."""
        num_queries, num_columns = attention.shape[1:]
        dropped = read.dropped[layer]
        columns = [*range(read.num_past - dropped), *(num_columns - num_queries + query for query in new)]
        places = read.places[dropped : dropped + len(columns)]
        placed = attention.new_zeros(1, attention.shape[0], height, places[-1] + 1)
        attention = attention[:, queries][:, :, columns]
        columns = torch.tensor(places, device=attention.device)
        placed[0, :, torch.tensor(query_places, device=attention.device)[:, None], columns] = attention
        window = self.layer_windows[layer]
        return placed if window is None else placed[..., -(window - 1 + height) :]

    def add_rest(self, rest: GenerateDecoderOnlyOutput) -> None:
        """Take the scores and logits of a call that went on where this one stopped, `(batch, vocab)` for each token."""
        for collected, steps in ((self.scores, rest.scores), (self.logits, rest.logits)):
            for item, of_item in enumerate(collected or ()):
                of_item += [step[item : item + 1] for step in steps]

    def keep_first(self, item: int, count: int) -> None:
        """Forget the scores and logits of an item beyond its first `count` tokens."""
        for collected in (self.scores, self.logits):
            if collected is not None:
                del collected[item][count:]

    def scores_of(self, item: int) -> tuple[torch.Tensor, ...] | None:
        """One `(1, vocab)` entry per token generated so far."""
        return None if self.scores is None else tuple(self.scores[item])

    def result(
        self, text: torch.LongTensor, num_new: int, past_key_values: Any
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """The return value of `generate`, for a `text` with `num_new` generated tokens in its longest item."""
        if not self.enabled:
            return text
        return GenerateDecoderOnlyOutput(
            sequences=text,
            scores=_stacked(self.scores, num_new),
            logits=_stacked(self.logits, num_new),
            hidden_states=_stacked(self.hidden_states, num_new, batch_axis=-3),
            attentions=_stacked(self.attentions, num_new),
            past_key_values=past_key_values,
        )


def _placed_queries(states: torch.Tensor, places: list[int], height: int) -> torch.Tensor:
    """`(..., items, hidden)` at some places of `(..., 1, height, hidden)`."""
    if len(places) == height:
        return states.unsqueeze(-3)
    placed = states.new_zeros(*states.shape[:-2], 1, height, states.shape[-1])
    placed[..., 0, places, :] = states
    return placed


def _stacked(items: list[list[Any]] | None, num_new: int, batch_axis: int = 0) -> tuple[Any, ...] | None:
    """Entries per item and token as one entry per token, with the items of the batch in it."""
    if items is None:
        return None
    longest = max(items, key=len)
    return tuple(
        _joined([item[step] if step < len(item) else _zeros_like(longest[step]) for item in items], batch_axis)
        for step in range(min(num_new, len(longest)))
    )


def _joined(entries: list[Any], batch_axis: int) -> Any:
    if isinstance(entries[0], tuple):
        return tuple(_joined(list(layer), batch_axis) for layer in zip(*entries, strict=True))
    return entries[0] if len(entries) == 1 else torch.cat(entries, dim=batch_axis)


def _zeros_like(entry: Any) -> Any:
    return tuple(map(_zeros_like, entry)) if isinstance(entry, tuple) else torch.zeros_like(entry)
