"""What all layouts share: which tokens are learned, what of them is chosen at random, and what a layout has to say.

Nothing reaches from one document of a packed example into another: no attention, no label, no anchor.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.documents import IGNORED, PADDING
from .masks import BlockQueries, PrefixQueries

if TYPE_CHECKING:
    from ..arguments import DraftTrainingArguments

# The column of a token that the drafter can't write.
UNKNOWN = -1
# Called with an lm_head and the hidden states of the supervised positions, `(positions, hidden)`.
Scorer = Callable[[nn.Module, torch.Tensor], Any]
Batch = dict[str, torch.Tensor]


class SharedEpoch:
    """An attribute whose value copies of an object share, in other processes too: a data loader's workers hold such copies, and
    persistent ones live for many epochs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_shared_{name}"

    def __get__(self, instance: Any, owner: type) -> "int | SharedEpoch":
        if instance is None:
            return self
        return int(vars(instance)[self.name])

    def __set__(self, instance: Any, value: int) -> None:
        if self.name not in vars(instance):
            vars(instance)[self.name] = torch.tensor(0).share_memory_()
        vars(instance)[self.name].fill_(value)


def example_generator(seed: int, epoch: int, input_ids: Sequence[int]) -> torch.Generator:
    """A random generator that depends on these three alone, and not on the order of calls: so a resumed run sees the batches
    of an unbroken one."""
    content = torch.as_tensor(input_ids, dtype=torch.int64).numpy().tobytes()
    # A CPU generator looks at 32 bits of its seed only, so all three have to be mixed into them.
    return torch.Generator().manual_seed(zlib.crc32(content, zlib.crc32(f"{seed} {epoch}".encode())))


def some_of(candidates: torch.LongTensor, most: int | None, generator: torch.Generator) -> torch.LongTensor:
    """At most `most` of the candidates, in their order; all of them if `None`."""
    chosen = torch.randperm(len(candidates), generator=generator)[:most]
    return candidates[chosen.sort().values]


def predicts_supervised(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.BoolTensor:
    """Which positions p have a token p + 1 to be learned, in the same document. `(length,)`."""
    result = torch.zeros_like(labels, dtype=torch.bool)
    result[:-1] = (labels[1:] != IGNORED) & (documents[1:] == documents[:-1])
    return result


def possible_anchors(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.LongTensor:
    """Where a draft can begin: at inference the target writes the first anchor itself, so an anchor lies in the response, and
    has a successor. `(anchors,)`, ascending."""
    return (predicts_supervised(labels, documents) & (labels != IGNORED)).nonzero()[:, 0]


def labels_after(
    anchors: torch.LongTensor, labels: torch.LongTensor, documents: torch.LongTensor, num_tokens: int
) -> torch.LongTensor:
    """The tokens after each anchor, `(anchors, num_tokens)`, up to the first that is unsupervised, of another document or
    beyond the end.

    What follows that one is not trained: verification would stop there, since the target never wrote what follows.
    """
    ahead = anchors[:, None] + torch.arange(1, num_tokens + 1)
    found = torch.cat([labels, labels.new_full((num_tokens + 1,), IGNORED)])[ahead]
    document = torch.cat([documents, documents.new_full((num_tokens + 1,), PADDING)])[ahead]
    stops = (found == IGNORED) | (document != documents[anchors][:, None])
    return found.masked_fill(stops.cummax(dim=1).values if len(anchors) else stops, IGNORED)


def stacked(examples: list[Batch], fill: dict[str, int] | None = None) -> Batch:
    """Examples of one layout, `(length, ...)` each, as a batch: padded on the right with `fill`, by name, or 0."""
    pad, fill = torch.nn.utils.rnn.pad_sequence, fill or {}
    return {
        name: pad([example[name] for example in examples], batch_first=True, padding_value=fill.get(name, 0))
        for name in examples[0]
    }


# What the target reads is padded with.
TEXT_FILL = {"document_ids": PADDING}


def text_for_target(input_ids: torch.LongTensor, documents: torch.LongTensor) -> Batch:
    """What the target reads of an example, `(length,)` each."""
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "document_ids": documents}


def without_lone_documents(batch: Batch) -> Batch:
    """Leave out `document_ids` if no item of the batch is packed: the target then reads it as any other batch."""
    if int(batch["document_ids"].max()) < 1:
        del batch["document_ids"]
    return batch


def check_something_to_draft(counts: list[int]) -> None:
    """Raise a `ValueError` if no example of a batch has an anchor."""
    if not any(counts):
        raise ValueError(
            "no example of this batch has two supervised tokens in a row, so there is nothing to draft: check the labels "
            "(-100 marks tokens that are not learned)"
        )


@dataclass(frozen=True)
class SupervisedPositions:
    """What the losses must know of a batch, read off the batch alone.

    All that a drafter proposes after one prefix is a block, and its positions need not stand together: those of PARD and DART
    are found by where their prefix ends. COD drops a block's positions from the end only, so what is left is a shorter block.

    Attributes:
        labels: `(positions,)`, ids of the target's vocabulary.
        draft_positions: `(positions,)`, k of each, counted from 1 for the first drafted token.
        items, places: `(positions,)` each: the batch item, and the place in its text of the token before the drafted one. The
            target's logits there score the same token, and the prefix ends k - 1 tokens before.
        vocabulary: `(columns,)`, the target's id of each column of the drafter's logits, if they are not the same.
        vocab_size: of the target; asked for with `vocabulary` only.
        stands_for: `(positions,)`, how many positions like it each stands for, where only some of the text's are there; `None` if
            each stands for itself.
    """

    labels: torch.LongTensor
    draft_positions: torch.LongTensor
    items: torch.LongTensor
    places: torch.LongTensor
    vocabulary: torch.LongTensor | None = None
    vocab_size: int = 0
    stands_for: torch.Tensor | None = None

    @classmethod
    def of_queries(cls, places: torch.LongTensor, batch: Batch, **vocabulary: Any) -> "SupervisedPositions":
        """The supervised ones of a batch's queries; `places (batch, queries)` of the tokens before the drafted ones."""
        supervised = batch["labels"] != IGNORED
        return cls(
            labels=batch["labels"][supervised],
            draft_positions=batch["draft_positions"][supervised],
            items=supervised.nonzero(as_tuple=True)[0],
            places=places[supervised],
            stands_for=batch["stands_for"][supervised] if "stands_for" in batch else None,
            **vocabulary,
        )

    def columns(self, token_ids: torch.LongTensor) -> torch.LongTensor:
        """The drafter's columns of the target's token ids; `UNKNOWN` where it has none, and for negative ids."""
        if self.vocabulary is None:
            return token_ids.clamp(min=UNKNOWN)
        columns = torch.full((self.vocab_size,), UNKNOWN, device=token_ids.device)
        columns[self.vocabulary] = torch.arange(len(self.vocabulary), device=token_ids.device)
        return torch.where(token_ids < 0, UNKNOWN, columns[token_ids.clamp(min=0)])

    @cached_property
    def label_columns(self) -> torch.LongTensor:
        """`(positions,)`, the labels as columns of the drafter's logits; `UNKNOWN` for tokens that have none."""
        return self.columns(self.labels)

    @cached_property
    def _prefixes(self) -> tuple[torch.LongTensor, torch.LongTensor]:
        # A prefix ends with its anchor.
        anchors = self.places - self.draft_positions + 1
        return torch.stack([self.items, anchors], dim=1).unique(dim=0, return_inverse=True)

    @property
    def prefixes(self) -> torch.LongTensor:
        """`(blocks, 2)`, batch item and anchor of each block, in that order."""
        return self._prefixes[0]

    @property
    def blocks(self) -> torch.LongTensor:
        """`(positions,)`, the block of each position."""
        return self._prefixes[1]

    def grid(self, values: torch.Tensor, depth: int) -> torch.Tensor:
        """Values of the positions, `(positions,)`, as `(blocks, depth)`; 0 where a block has none."""
        cells = self.blocks.to(values.device) * depth + self.draft_positions.to(values.device) - 1
        grid = values.new_zeros(len(self.prefixes) * depth)
        return grid.index_put((cells,), values).view(-1, depth)

    def check_depth(self, depth: int) -> None:
        """Raise a `ValueError` if anything is drafted further ahead than `depth` tokens."""
        deepest = int(self.draft_positions.max()) if len(self.draft_positions) else 0
        if deepest > depth:
            raise ValueError(
                f"the batch drafts {deepest} tokens ahead, and training was set up for {depth}: give the data collator and "
                "DraftTrainingArguments (draft_tokens) the same number"
            )


class Layout:
    """A layout of training batches. An instance is a data collator; all else is of the class, and takes a batch of it.

    An example has `input_ids`, `labels` and, if packed, `document_ids`; `labels[t]` is the token at t if it is to be learned,
    else -100 (prompt, padding).

    Args:
        seed: of what is chosen at random, for each example and epoch anew. `epoch` is set by the trainer.

    Attributes:
        supervised_run, tokens_before: how many supervised tokens in a row an example needs so that there is something to
            learn, and what stands before the last of them at least.
        learns_mask_token: whether the mask token's embedding is the drafter's own, and learned.
        inputs_have_gradient: whether a gradient flows into what the drafter's first layer gets.
    """

    epoch = SharedEpoch()
    supervised_run, tokens_before = 1, 1
    learns_mask_token = False
    inputs_have_gradient = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: "DraftTrainingArguments") -> "Layout":
        """A collator that is set up from the drafter's config and the training arguments."""
        raise NotImplementedError

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Examples as a batch."""
        raise NotImplementedError

    def generator(self, input_ids: torch.LongTensor) -> torch.Generator:
        """Where this epoch's randomness of an example comes from."""
        return example_generator(self.seed, self.epoch, input_ids)

    @classmethod
    def text(cls, batch: Batch) -> tuple[torch.LongTensor, torch.LongTensor]:
        """What the target reads of a batch: ids, and the packed document of each, `PADDING` for padding; `(batch, length)`."""
        if "document_ids" in batch:
            return batch["input_ids"], batch["document_ids"]
        return batch["input_ids"], torch.where(batch["attention_mask"] > 0, 0, PADDING)

    @classmethod
    def queries(cls, batch: Batch) -> PrefixQueries | BlockQueries:
        """What the mask is made of: who sees whom."""
        return PrefixQueries(batch["query_block"], batch["query_index"], batch["query_document"])

    @classmethod
    def supervised(cls, batch: Batch, drafter: PreTrainedModel) -> SupervisedPositions:
        """What is learned, in the order in which [`forward`] scores it.

        With a draft vocabulary a label is a column of the drafter's logits, and `UNKNOWN` where it has none.
        """
        raise NotImplementedError

    @staticmethod
    def vocabulary(drafter: PreTrainedModel) -> dict[str, Any]:
        """What [`SupervisedPositions`] have to know of the tokens that a drafter proposes."""
        return {"vocabulary": drafter.draft_token_ids, "vocab_size": drafter.config.vocab_size}

    @classmethod
    def forward(
        cls,
        model: nn.Module,
        drafter: PreTrainedModel,
        target: PreTrainedModel | None,
        batch: Batch,
        features: torch.Tensor | None,
        score: Scorer,
    ) -> Any:
        """The drafter's forward, up to what `score` makes of the hidden states of the supervised positions.

        Args:
            model: the drafter, as wrapped for training.
            target: lends its embedding, and to some drafters its head.
            features: the target's hidden states, `(batch, length, taps * hidden)`, for drafters that read them.
        """
        raise NotImplementedError
