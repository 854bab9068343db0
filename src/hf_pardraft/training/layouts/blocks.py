"""The supervised rows of a batch: what each drafts, from where, and which rows make a block."""

from dataclasses import dataclass
from functools import cached_property

import torch

# The label of a token that the drafter can't write.
UNKNOWN = -1


@dataclass(frozen=True)
class SupervisedRows:
    """What the losses must know of a batch, read off the batch alone.

    All that a drafter proposes behind one prefix is a block, and its rows need not stand together: those of PARD and DART are
    found by where their prefix ends. COD drops a block's rows from the end only, so what is left of it is a shorter block.

    Attributes:
        labels: `(rows,)`, ids of the target's vocabulary.
        positions: `(rows,)`, k of each row, counted from 1 for the first drafted token.
        samples, places: `(rows,)` each: the example, and the place in its text of the token before the drafted one. The
            target's logits there score the same token, and the prefix ends k - 1 tokens before.
        vocabulary: `(columns,)`, the target's id of each column of the drafter's logits, if they are not the same.
        vocab_size: of the target; asked for with `vocabulary` only.
    """

    labels: torch.LongTensor
    positions: torch.LongTensor
    samples: torch.LongTensor
    places: torch.LongTensor
    vocabulary: torch.LongTensor | None = None
    vocab_size: int = 0

    def columns(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """The drafter's columns of the target's token ids; `UNKNOWN` where it has none, and for negative ids."""
        if self.vocabulary is None:
            return token_ids.clamp(min=UNKNOWN)
        columns = torch.full((self.vocab_size,), UNKNOWN, device=token_ids.device)
        columns[self.vocabulary] = torch.arange(len(self.vocabulary), device=token_ids.device)
        return torch.where(token_ids < 0, UNKNOWN, columns[token_ids.clamp(min=0)])

    @cached_property
    def label_columns(self) -> torch.LongTensor:
        """`(rows,)`, the labels as columns of the drafter's logits; `UNKNOWN` for tokens that have none."""
        return self.columns(self.labels)

    @cached_property
    def anchors(self) -> torch.LongTensor:
        """`(rows,)`, the place of the last token that each row's prefix has."""
        return self.places - self.positions + 1

    @cached_property
    def _prefixes(self) -> tuple[torch.LongTensor, torch.LongTensor]:
        return torch.stack([self.samples, self.anchors], dim=1).unique(dim=0, return_inverse=True)

    @property
    def prefixes(self) -> torch.LongTensor:
        """`(blocks, 2)`, sample and anchor of each block, in that order."""
        return self._prefixes[0]

    @property
    def blocks(self) -> torch.LongTensor:
        """`(rows,)`, the block of each row."""
        return self._prefixes[1]

    def grid(self, values: torch.Tensor, depth: int) -> torch.Tensor:
        """Values of the rows, `(rows,)`, as `(blocks, depth)`; 0 where a block has no row."""
        slots = self.blocks.to(values.device) * depth + self.positions.to(values.device) - 1
        grid = values.new_zeros(len(self.prefixes) * depth)
        return grid.index_put((slots,), values).view(-1, depth)

    def check_depth(self, depth: int) -> None:
        """Raise a `ValueError` if a row drafts further ahead than `depth` tokens."""
        deepest = int(self.positions.max()) if len(self.positions) else 0
        if deepest > depth:
            raise ValueError(
                f"the batch drafts {deepest} tokens ahead, and training was set up for {depth}: give the data collator and "
                "DraftTrainingArguments (draft_tokens) the same number"
            )
