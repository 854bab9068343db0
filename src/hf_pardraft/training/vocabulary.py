"""Draft vocabularies in training: the tokens that are learned most often, and a head of which only their rows learn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..models.base import ParallelDrafter
from ..models.modeling_dart import DartDrafter
from ..pairing.gathered_rows import ChosenColumns, has_plain_rows
from .data.documents import IGNORED, checked, document_starts


def set_frequent_vocabulary(drafter: ParallelDrafter, size: int, data: Any) -> None:
    """Let a drafter propose the `size` tokens that are learned most often.

    They are counted where they are learned, so in what the target wrote, and not in prompts. Of tokens that occur equally often,
    or never, the lower ids are taken: tokenizers number what they merged first.

    Args:
        drafter: a DART drafter chooses among the tokens that its lm_head has rows of.
        size: of the draft vocabulary.
        data: the prepared examples.

    Raises:
        ValueError: if there are fewer tokens, or the data can't be looked through beforehand.
    """
    vocab_size = drafter.config.vocab_size
    known = drafter.draft_token_ids if isinstance(drafter, DartDrafter) else None
    candidates = torch.arange(vocab_size) if known is None else known.cpu()
    if not 1 <= size <= len(candidates):
        raise ValueError(
            f"draft_vocab_size must be in [1, {len(candidates)}], the tokens that this {type(drafter).__name__} has rows of, got "
            f"{size}"
        )
    if data is None or not hasattr(data, "__len__"):
        raise ValueError(
            "draft_vocab_size counts the tokens of the training data before training, and a stream can't be read twice: train on "
            "a data set that is not streamed, or call drafter.set_draft_vocabulary with ids of your own"
        )
    counts = token_counts(data, vocab_size)[candidates]
    order = counts.argsort(descending=True, stable=True)
    drafter.set_draft_vocabulary(candidates[order[:size]])


def token_counts(data: Any, vocab_size: int) -> torch.LongTensor:
    """How often each token is learned in prepared examples, `(vocab_size,)`: padding is not, nor what nothing comes before."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in data:
        _, labels, documents = checked(example)
        counts += torch.bincount(labels[(labels != IGNORED) & ~document_starts(documents)], minlength=vocab_size)
    return counts


class LearnedRows(nn.Module):
    """The rows of a head that score a draft vocabulary, as they are in this step; their gradient goes to the head.

    Args:
        head: whose rows they are.
        token_ids: `(columns,)`.
    """

    def __init__(self, head: nn.Linear, token_ids: torch.LongTensor) -> None:
        super().__init__()
        self.head = head
        # Once a step, and not for each chunk of positions.
        self.rows = [
            weight.index_select(0, token_ids.to(weight.device))
            for weight in (head.weight, head.bias)
            if weight is not None
        ]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., hidden)` to `(..., columns)`."""
        return functional.linear(states, *self.rows)


def of_own_rows(drafter: ParallelDrafter, score: Callable) -> Callable:
    """A scorer of a drafter's own head, as one of its rows of the draft vocabulary, where it has one."""
    token_ids = drafter.draft_token_ids
    if token_ids is None:
        return score

    def score_rows(head: nn.Module, states: torch.Tensor) -> Any:
        rows = LearnedRows(head, token_ids) if has_plain_rows(head) else ChosenColumns(head, token_ids)
        return score(rows, states)

    return score_rows
