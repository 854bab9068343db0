"""What a round of drafting takes: what the drafter is told, what it remembers, and the index arithmetic on both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn
from transformers import Cache


@dataclass
class DraftInputs:
    """What has happened since the drafter's last call: the newly committed text, and what the target thought of it.

    The last of `new_ids` is the *anchor*: committed, but not yet read by the target. On the first call `new_ids` holds
    the whole text so far. Items of a batch that have less to tell are padded on the left.

    Attributes:
        new_ids: `(batch, new)`, the tokens committed since the last call, oldest first.
        new_positions: `(batch, new)`, their positions (what RoPE sees).
        features: `(batch, read, taps * target_hidden)` or `None`, the tapped hidden states of the tokens that the target
            has read since the last call. They end just before the anchor.
        feature_positions: `(batch, read)` or `None`, the positions of those tokens.
        new_counts: how many of `new_ids` are real in each item, at least one; `None` if all are.
        feature_counts: how many of `features` are real in each item; `None` if all are.
    """

    new_ids: torch.LongTensor
    new_positions: torch.LongTensor
    features: torch.Tensor | None = None
    feature_positions: torch.LongTensor | None = None
    new_counts: list[int] | None = None
    feature_counts: list[int] | None = None


@dataclass
class StaticDraftInputs:
    """What a round of fixed shapes tells the drafter: a [`DraftInputs`] whose items are padded on the right to one width.

    Attributes:
        ids, positions: `(batch, width)`, the tokens committed since the last draft, and their positions.
        counts: `(batch,)`, how many of them are real.
        features: `(batch, width, taps * target_hidden)` or `None`; beside each token the states of the token before it.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor
    counts: torch.LongTensor
    features: torch.Tensor | None = None

    @property
    def anchor_columns(self) -> torch.LongTensor:
        """`(batch, 1)`, the column of each item's anchor; the first of an item to which nothing is new."""
        return (self.counts[:, None] - 1).clamp(min=0)

    def last(self, values: torch.LongTensor) -> torch.LongTensor:
        """`(batch, 1)`, of `ids` or `positions` those of the anchor."""
        return values.gather(1, self.anchor_columns)

    def real(self, after: int = 0) -> torch.BoolTensor:
        """`(batch, width + after)`, which columns are real, where as many real ones stand after all."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        return nn.functional.pad(columns < self.counts[:, None], (0, after), value=True)

    def positions_with(self, num_masks: int) -> torch.LongTensor:
        """`(batch, width + num_masks)`, `positions` and those of masks, which count on from the anchor."""
        ahead = torch.arange(1, num_masks + 1, device=self.positions.device)
        return torch.cat([self.positions, self.last(self.positions) + ahead], dim=1)


@lru_cache(maxsize=256)
def cached_arange(first: int, end: int, device: torch.device) -> torch.LongTensor:
    """The numbers from `first` to before `end`, `(numbers,)`, made once and never to be written to."""
    # A call under inference_mode would otherwise make tensors that no later autograd user may touch.
    with torch.inference_mode(False):
        return torch.arange(first, end, device=device)


@lru_cache(maxsize=64)
def mask_ids(mask_token_id: int, batch: int, count: int, device: torch.device) -> torch.LongTensor:
    """`(batch, count)` mask token ids, made once and never to be written to."""
    with torch.inference_mode(False):
        return torch.full((batch, count), mask_token_id, device=device)


def last_columns(counts: list[int] | None, batch: int, width: int) -> list[list[int]]:
    """The columns of the real entries of items that are padded on the left to `width`."""
    return [list(range(width - count, width)) for count in counts or [width] * batch]


def are_real(counts: list[int] | None, batch: int, width: int, device: torch.device) -> torch.BoolTensor:
    """Which entries of such items are real: `(batch, width)`."""
    if counts is None:
        return torch.ones(batch, width, dtype=torch.bool, device=device)
    return torch.arange(width, device=device) >= width - torch.tensor(counts, device=device)[:, None]


def take_positions(values: torch.Tensor, positions: torch.LongTensor) -> torch.Tensor:
    """Of `values (batch, all, width)` those at the places `(batch, kept)`: `(batch, kept, width)`."""
    return values.gather(1, positions.to(values.device)[:, :, None].expand(-1, -1, values.shape[2]))


def scoring(positions: torch.LongTensor) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What a drafter's forward takes as `read_rows` to score the positions `(batch, kept)` only."""
    return lambda head, states: head(take_positions(states, positions))


def input_device(module: nn.Module) -> torch.device:
    """Where a target, or a part of it, takes its input: anywhere, if accelerate has offloaded it to the meta device."""
    return next((weight.device for weight in module.parameters() if not weight.is_meta), torch.device("cpu"))


@dataclass
class DraftState:
    """One generate call's memory of a drafter: its cache, what it borrows from the target, and what no round changes.

    Attributes:
        cache: keys and values of the context.
        embed_tokens: the target's, if the drafter has none of its own.
        lm_head: what scores drafts, if the drafter's forward does not end with it.
        constants: arguments of the drafter's forward that are the same in every round, computed once.
        embed_device, head_device, head_dtype: where what is borrowed takes its input, and in what precision (`None`: any).
    """

    cache: Cache
    embed_tokens: nn.Module | None = None
    lm_head: nn.Module | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    embed_device: torch.device | None = field(init=False, default=None)
    head_device: torch.device | None = field(init=False, default=None)
    head_dtype: torch.dtype | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.embed_tokens is not None:
            self.embed_device = input_device(self.embed_tokens)
        if self.lm_head is not None:
            self.head_device = input_device(self.lm_head)
            # Weights of bytes are quantised, and such a head converts its input itself.
            self.head_dtype = next((w.dtype for w in self.lm_head.parameters() if w.dtype.itemsize > 1), None)
