"""Batches for training drafters: one class per layout. An example has `input_ids`, `labels` and, if packed, `document_ids`.

`labels[t]` is the token at t if it is to be learned, else -100 (prompt, padding). Nothing reaches from one document of a
packed row into another: no attention, no label, no anchor.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..arguments import DraftTrainingArguments
from ..data.documents import (
    IGNORED,
    checked,
    document_starts,
    labels_behind,
    positions_in_documents,
    possible_anchors,
    predicts_supervised,
)
from .masks import PADDING
from .sampling import SharedEpoch, conditional_drop, example_generator, some_of


def padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    """Stack `(length,)` tensors of different lengths, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def stacked(samples: list[dict[str, torch.Tensor]], fill: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Examples of one layout as a batch, padded on the right with `fill`, by name, or 0."""
    fill = fill or {}
    return {name: padded([sample[name] for sample in samples], fill.get(name, 0)) for name in samples[0]}


# What the target reads is padded with.
TEXT_FILL = {"document_ids": PADDING}


def text_for_target(input_ids: torch.LongTensor, documents: torch.LongTensor) -> dict[str, torch.LongTensor]:
    """What the target reads of an example, `(length,)` each."""
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "document_ids": documents}


def without_lone_documents(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out `document_ids` if no row of the batch is packed: the target then reads it as any other batch."""
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


class PardCollator:
    """Rows for PARD: all real tokens, then for each subtask k > 1 the mask rows that COD keeps.

    A batch holds, `(batch, rows)` each: `input_ids`, `position_ids`, `labels` (what the row itself must predict; no shift),
    `draft_positions` (k of eq. 8, from 1; 0 for padding), and what the mask is made of: `row_block`, `row_index`,
    `row_document`. Only kept rows are ever built; each example has a pattern of its own.

    Args:
        mask_token_id: id of the mask token, or a list with an id for each place: block j, rows j places behind their prefix, has
            the j-th of them, as in drafting.
        num_tokens: K, how many tokens the drafter learns to draft.
        retention, min_retention: COD's r and r_min; r = 1 keeps all.
        seed: of the patterns. `epoch` is set by the trainer.
    """

    epoch = SharedEpoch()

    def __init__(
        self,
        mask_token_id: int | list[int],
        num_tokens: int = 8,
        retention: float = 0.7,
        min_retention: float = 0.2,
        seed: int = 0,
    ) -> None:
        if isinstance(mask_token_id, list) and len(mask_token_id) < num_tokens - 1:
            raise ValueError(
                f"{num_tokens} tokens are drafted with {num_tokens - 1} masks, got ids for {len(mask_token_id)} of them: pass "
                "more, a single one for all, or a smaller num_tokens"
            )
        self.mask_token_id = mask_token_id
        self.num_tokens = num_tokens
        self.retention = retention
        self.min_retention = min_retention
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "PardCollator":
        """One that is set up from the drafter's config and the training arguments."""
        config = drafter.config
        mask_token_id = config.pard_token if config.pard_tokens is None else config.mask_token_ids
        return cls(mask_token_id, args.draft_tokens, args.cod_retention, args.cod_min_retention, args.seed)

    def rows(self, example: dict[str, Any]) -> dict[str, torch.LongTensor]:
        """The rows of one example, `(rows,)` each."""
        input_ids, labels, documents = checked(example)
        predicts = predicts_supervised(labels, documents)
        generator = example_generator(self.seed, self.epoch, input_ids)
        kept = conditional_drop(predicts, self.num_tokens, self.retention, self.min_retention, generator)
        # Block 0 is also everybody's context, so it has all tokens, those that predict nothing included.
        kept[0] = torch.arange(len(input_ids))
        block = torch.cat([torch.full_like(index, j) for j, index in enumerate(kept)])
        index = torch.cat(kept)
        next_labels = torch.cat([labels[1:], labels.new_full((1,), IGNORED)]).masked_fill(~predicts, IGNORED)
        return {
            "input_ids": torch.where(block == 0, input_ids[index], self._masks()[block - 1]),
            "position_ids": positions_in_documents(documents)[index],
            "labels": next_labels[index],
            "draft_positions": block + 1,
            "row_block": block,
            "row_index": index,
            "row_document": documents[index],
        }

    def _masks(self) -> torch.LongTensor:
        # One for each block behind the first; there is one at least, so that it can be indexed by the first, too.
        shared = isinstance(self.mask_token_id, int)
        return torch.tensor([self.mask_token_id] * max(self.num_tokens - 1, 1) if shared else self.mask_token_id)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        return stacked([self.rows(example) for example in examples], {"labels": IGNORED, "row_document": PADDING})


class BlockCollator:
    """Anchored blocks: sequences for the target, and blocks of an anchor and masks (arXiv 2606.02091, section 3.3).

    A batch holds `input_ids` and `attention_mask` `(batch, length)`, and `document_ids` beside them if a row is packed;
    `anchors (batch, blocks)`, `PADDING` where an example has fewer; `block_ids (batch, blocks, block_size)`; and `labels
    (batch, blocks, block_size - 1)`, the tokens after the anchor. A block that runs past the end of its document keeps its
    valid part. Behind its first unsupervised token a block is not trained: verification would stop there, since the target
    never wrote what follows.

    Args:
        mask_token_id: id of the mask token.
        block_size: tokens a block, the anchor counted.
        num_anchors: most blocks per example, all documents of a packed one together; `None` for no limit.
        seed: of the anchors. `epoch` is set by the trainer.
    """

    epoch = SharedEpoch()

    def __init__(self, mask_token_id: int, block_size: int = 16, num_anchors: int | None = 512, seed: int = 0) -> None:
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "BlockCollator":
        """One that is set up from the drafter's config and the training arguments."""
        return cls(drafter.config.mask_token_id, drafter.config.block_size, args.most_anchors, args.seed)

    def blocks(self, example: dict[str, Any]) -> dict[str, torch.LongTensor]:
        """Sequence, anchors, block ids and labels of one example."""
        input_ids, labels, documents = checked(example)
        generator = example_generator(self.seed, self.epoch, input_ids)
        anchors = some_of(possible_anchors(labels, documents), self.num_anchors, generator)
        block_ids = torch.full((len(anchors), self.block_size), self.mask_token_id)
        block_ids[:, 0] = input_ids[anchors]
        return {
            **text_for_target(input_ids, documents),
            "anchors": anchors,
            "block_ids": block_ids,
            "labels": labels_behind(anchors, labels, documents, self.block_size - 1),
        }

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        samples = [self.blocks(example) for example in examples]
        check_something_to_draft([len(sample["anchors"]) for sample in samples])
        fill = {"anchors": PADDING, "labels": IGNORED, "block_ids": self.mask_token_id}
        return without_lone_documents(stacked(samples, TEXT_FILL | fill))


class SharedPrefixCollator:
    """For DART: every token of a sequence but the last, and masks after many of its prefixes (arXiv 2601.19278, section 3.3).

    Row i of the prefix reads the target's states at i and the embedding of token i + 1, so the prefix that ends there is
    followed by the anchor i + 1, and its draft by the tokens behind that. All such rows share one prefix, and each group of
    masks sees its own part of it.

    A batch holds `input_ids` and `attention_mask` `(batch, length)` for the target, and `document_ids` beside them if a row
    is packed; and `(batch, rows)` each, the `length - 1` rows of the prefix first: `labels` (what the row itself must
    predict), `draft_positions` (t, from 1; 0 where nothing is predicted), `target_index` (whose logits of the target score the
    same token), what the mask is made of: `row_block`, `row_index`, `row_document`; and `row_position`, the row's place in its
    document. Anchors and labels are those of [`BlockCollator`]. Masks that have no label, and none behind them that has, are
    not built.

    Args:
        num_tokens: d, how many tokens the drafter learns to draft.
        shifted: whether a row predicts the token behind its own place, so that the last row of a prefix predicts too.
        num_anchors: most prefixes per example that get masks; `None` for all, as in the paper. All that can, predict their first
            token.
        seed: of the anchors. `epoch` is set by the trainer.
    """

    epoch = SharedEpoch()

    def __init__(self, num_tokens: int = 8, shifted: bool = True, num_anchors: int | None = 512, seed: int = 0) -> None:
        self.num_tokens = num_tokens
        self.shifted = shifted
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "SharedPrefixCollator":
        return cls(drafter.max_draft_depth, drafter.config.shifted, args.most_anchors, args.seed)

    def prefix_rows(
        self, labels: torch.LongTensor, documents: torch.LongTensor, anchors: torch.LongTensor
    ) -> dict[str, torch.LongTensor]:
        """The rows of real tokens, `(length - 1,)` each."""
        index = torch.arange(len(labels) - 1)
        learned = torch.full_like(index, IGNORED)
        if self.shifted:
            learned[anchors - 1] = labels[anchors + 1]
        return self._rows(torch.zeros_like(index), index, learned, documents)

    def mask_rows(
        self, labels: torch.LongTensor, documents: torch.LongTensor, anchors: torch.LongTensor
    ) -> dict[str, torch.LongTensor]:
        """The rows of masks, prefix by prefix, `(masks,)` each."""
        learned = labels_behind(anchors, labels, documents, self.num_tokens)[:, 1 if self.shifted else 0 :]
        group, mask = (learned != IGNORED).nonzero(as_tuple=True)
        return self._rows(mask + 1, anchors[group] + mask, learned[group, mask], documents)

    def _rows(
        self,
        block: torch.LongTensor,
        index: torch.LongTensor,
        learned: torch.LongTensor,
        documents: torch.LongTensor,
    ) -> dict[str, torch.LongTensor]:
        shift = 1 if self.shifted else 0
        return {
            "labels": learned,
            "draft_positions": (block + shift).masked_fill(learned == IGNORED, 0),
            "target_index": index + shift,
            "row_block": block,
            "row_index": index,
            "row_document": documents[index],
            "row_position": positions_in_documents(documents)[index],
        }

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        sequences, prefixes, masks = [], [], []
        for example in examples:
            input_ids, labels, documents = checked(example)
            # Something of the document has to be read before its first anchor.
            anchors = possible_anchors(labels, documents)
            anchors = anchors[~document_starts(documents)[anchors]]
            generator = example_generator(self.seed, self.epoch, input_ids)
            sequences.append(text_for_target(input_ids, documents))
            prefixes.append(self.prefix_rows(labels, documents, anchors))
            masks.append(self.mask_rows(labels, documents, some_of(anchors, self.num_anchors, generator)))
        check_something_to_draft([int((rows["labels"] != IGNORED).sum()) for rows in prefixes + masks])
        fill = {"labels": IGNORED, "row_document": PADDING}
        first, behind = stacked(prefixes, fill), stacked(masks, fill)
        rows = {name: torch.cat([first[name], behind[name]], dim=1) for name in first}
        return without_lone_documents(stacked(sequences, TEXT_FILL)) | rows


# By what a drafter says of its `training_layout`.
COLLATORS = {"dropped_masks": PardCollator, "anchored_blocks": BlockCollator, "shared_prefix": SharedPrefixCollator}
