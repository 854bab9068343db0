"""Batches for training drafters: one class per layout. An example has `input_ids`, `labels` and, if packed, `document_ids`.

`labels[t]` is the token at t if it is to be learned, else -100 (prompt, padding). Randomness depends on the seed, the
epoch and the example, not on the order of calls, so that a resumed run sees the batches of an unbroken one.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .arguments import DraftTrainingArguments
from .masks import PADDING

IGNORED = -100


def example_generator(seed: int, epoch: int, input_ids: Sequence[int]) -> torch.Generator:
    """A random generator that depends on these three alone."""
    content = torch.as_tensor(input_ids, dtype=torch.int64).numpy().tobytes()
    # A CPU generator looks at 32 bits of its seed only, so all three have to be mixed into them.
    return torch.Generator().manual_seed(zlib.crc32(content, zlib.crc32(f"{seed} {epoch}".encode())))


def checked(example: dict[str, Any]) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """Input ids, labels and document ids of an example, `(length,)` each."""
    input_ids = torch.as_tensor(example["input_ids"], dtype=torch.long)
    labels = torch.as_tensor(example.get("labels", input_ids), dtype=torch.long)
    documents = torch.as_tensor(example.get("document_ids", torch.zeros_like(input_ids)), dtype=torch.long)
    if not input_ids.shape == labels.shape == documents.shape or input_ids.ndim != 1:
        raise ValueError(
            "an example needs input_ids, labels and document_ids of one length, got "
            f"{tuple(input_ids.shape)}, {tuple(labels.shape)} and {tuple(documents.shape)}"
        )
    return input_ids, labels, documents


def predicts_supervised(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.BoolTensor:
    """Which positions p have a token p + 1 to be learned, in the same document. `(length,)`."""
    result = torch.zeros_like(labels, dtype=torch.bool)
    result[:-1] = (labels[1:] != IGNORED) & (documents[1:] == documents[:-1])
    return result


def positions_in_documents(documents: torch.LongTensor) -> torch.LongTensor:
    """Positions that start again at 0 with each packed document. `(length,)`."""
    index = torch.arange(len(documents))
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[1:] = documents[1:] != documents[:-1]
    return index - torch.where(starts, index, 0).cummax(0).values


def conditional_drop(
    predicts: torch.BoolTensor, num_tokens: int, retention: float, min_retention: float, generator: torch.Generator
) -> list[torch.LongTensor]:
    """COD: which positions each subtask keeps (pard.txt, section 3.2.2 and algorithm 1).

    Block 0 keeps every position that predicts something. Block j keeps N max(r^j, r_min) of those whose left neighbour
    block j - 1 kept, so the masks before a kept row are all there: its keys and values are whole. N counts supervised
    positions only, and a chain that meets an unsupervised one ends there.

    Args:
        predicts: `(length,)`, see [`predicts_supervised`].
        num_tokens: K, the number of subtasks.
        retention, min_retention: r and r_min of eq. 11.
        generator: where the randomness comes from.

    Returns:
        One ascending `(kept,)` index tensor per block 0..K-1.
    """
    kept = [predicts.nonzero()[:, 0]]
    for block in range(1, num_tokens):
        candidates = kept[-1] + 1
        candidates = candidates[candidates < len(predicts)]
        candidates = candidates[predicts[candidates]]
        quota = int(len(kept[0]) * max(retention**block, min_retention))
        if len(candidates) > quota:
            candidates = some_of(candidates, quota, generator)
        kept.append(candidates)
    return kept


def padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    """Stack `(length,)` tensors of different lengths, padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def stacked(samples: list[dict[str, torch.Tensor]], fill: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Examples of one layout as a batch, padded on the right with `fill`, by name, or 0."""
    fill = fill or {}
    return {name: padded([sample[name] for sample in samples], fill.get(name, 0)) for name in samples[0]}


def check_one_document(documents: torch.LongTensor) -> None:
    """Raise a `ValueError` for a packed row, where the target would have to read the documents apart."""
    if documents.unique().numel() > 1:
        raise ValueError(
            "drafters that read hidden states are trained with one document per row, got a packed row: the target would "
            "attend across documents. Pass the documents as separate examples"
        )


def check_something_to_draft(counts: list[int]) -> None:
    """Raise a `ValueError` if no example of a batch has an anchor."""
    if not any(counts):
        raise ValueError(
            "no example of this batch has two supervised tokens in a row, so there is nothing to draft: check the labels "
            "(-100 marks tokens that are not learned)"
        )


def possible_anchors(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.LongTensor:
    """Where a draft can begin: at inference the target writes the first anchor itself, so an anchor lies in the response, and
    has a successor. `(anchors,)`, ascending."""
    return (predicts_supervised(labels, documents) & (labels != IGNORED)).nonzero()[:, 0]


def some_of(candidates: torch.LongTensor, most: int, generator: torch.Generator) -> torch.LongTensor:
    """At most `most` of the candidates, in their order."""
    chosen = torch.randperm(len(candidates), generator=generator)[:most]
    return candidates[chosen.sort().values]


def labels_behind(anchors: torch.LongTensor, labels: torch.LongTensor, num_tokens: int) -> torch.LongTensor:
    """The tokens behind each anchor, `(anchors, num_tokens)`, up to the first that is unsupervised or beyond the end.

    What follows that one is not trained: verification would stop there, since the target never wrote what follows.
    """
    ahead = anchors[:, None] + torch.arange(1, num_tokens + 1)
    found = torch.cat([labels, labels.new_full((num_tokens + 1,), IGNORED)])[ahead]
    stopped = (found == IGNORED).cummax(dim=1).values if len(anchors) else found == IGNORED
    return found.masked_fill(stopped, IGNORED)


class PardCollator:
    """Rows for PARD: all real tokens, then for each subtask k > 1 the mask rows that COD keeps.

    A batch holds, `(batch, rows)` each: `input_ids`, `position_ids`, `labels` (what the row itself must predict; no shift),
    `draft_positions` (k of eq. 8, from 1; 0 for padding), and what the mask is made of: `row_block`, `row_index`,
    `row_document`. Only kept rows are ever built; each example has a pattern of its own.

    Args:
        mask_token_id: id of the mask token.
        num_tokens: K, how many tokens the drafter learns to draft.
        retention, min_retention: COD's r and r_min; r = 1 keeps all.
        seed: of the patterns. `epoch` is set by the trainer.
    """

    def __init__(
        self,
        mask_token_id: int,
        num_tokens: int = 8,
        retention: float = 0.7,
        min_retention: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.mask_token_id = mask_token_id
        self.num_tokens = num_tokens
        self.retention = retention
        self.min_retention = min_retention
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "PardCollator":
        """One that is set up from the drafter's config and the training arguments."""
        return cls(drafter.config.pard_token, args.draft_tokens, args.cod_retention, args.cod_min_retention, args.seed)

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
            "input_ids": torch.where(block == 0, input_ids[index], self.mask_token_id),
            "position_ids": positions_in_documents(documents)[index],
            "labels": next_labels[index],
            "draft_positions": block + 1,
            "row_block": block,
            "row_index": index,
            "row_document": documents[index],
        }

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        return stacked([self.rows(example) for example in examples], {"labels": IGNORED, "row_document": PADDING})


class BlockCollator:
    """Anchored blocks: sequences for the target, and blocks of an anchor and masks (dflare.txt, section 3.3).

    A batch holds `input_ids` and `attention_mask` `(batch, length)`; `anchors (batch, blocks)`, `PADDING` where an example
    has fewer; `block_ids (batch, blocks, block_size)`; and `labels (batch, blocks, block_size - 1)`, the tokens after the
    anchor. A block that runs past the end keeps its valid part. Behind its first unsupervised token a block is not trained:
    verification would stop there, since the target never wrote what follows.

    Args:
        mask_token_id: id of the mask token.
        block_size: tokens a block, the anchor counted.
        num_anchors: most blocks per example.
        seed: of the anchors. `epoch` is set by the trainer.
    """

    def __init__(self, mask_token_id: int, block_size: int = 16, num_anchors: int = 512, seed: int = 0) -> None:
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "BlockCollator":
        """One that is set up from the drafter's config and the training arguments."""
        return cls(drafter.config.mask_token_id, drafter.config.block_size, args.num_anchors, args.seed)

    def blocks(self, example: dict[str, Any]) -> dict[str, torch.LongTensor]:
        """Sequence, anchors, block ids and labels of one example."""
        input_ids, labels, documents = checked(example)
        check_one_document(documents)
        generator = example_generator(self.seed, self.epoch, input_ids)
        anchors = some_of(possible_anchors(labels, documents), self.num_anchors, generator)
        block_ids = torch.full((len(anchors), self.block_size), self.mask_token_id)
        block_ids[:, 0] = input_ids[anchors]
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "anchors": anchors,
            "block_ids": block_ids,
            "labels": labels_behind(anchors, labels, self.block_size - 1),
        }

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        samples = [self.blocks(example) for example in examples]
        check_something_to_draft([len(sample["anchors"]) for sample in samples])
        return stacked(samples, {"anchors": PADDING, "labels": IGNORED, "block_ids": self.mask_token_id})


class SharedPrefixCollator:
    """Rows for DART: every token of a sequence but the last, and masks behind many of its prefixes (dart.txt, section 3.3).

    Row i of the prefix reads the target's states at i and the embedding of token i + 1, so the prefix that ends there is
    followed by the anchor i + 1, and its draft by the tokens behind that. All such rows share one prefix, and each group of
    masks sees its own part of it.

    A batch holds `input_ids` and `attention_mask` `(batch, length)` for the target; and `(batch, rows)` each, the
    `length - 1` rows of the prefix first: `labels` (what the row itself must predict), `draft_positions` (t, from 1; 0 where
    nothing is predicted), `target_index` (whose logits of the target score the same token), and what the mask is made of:
    `row_block`, `row_index`, `row_document`. Anchors and labels are those of [`BlockCollator`]. Masks that have no label, and
    none behind them that has, are not built.

    Args:
        num_tokens: d, how many tokens the drafter learns to draft.
        shifted: whether a row predicts the token behind its own place, so that the last row of a prefix predicts too.
        num_anchors: most prefixes per example that get masks. All that can, predict their first token.
        seed: of the anchors. `epoch` is set by the trainer.
    """

    def __init__(self, num_tokens: int = 8, shifted: bool = True, num_anchors: int = 512, seed: int = 0) -> None:
        self.num_tokens = num_tokens
        self.shifted = shifted
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: DraftTrainingArguments) -> "SharedPrefixCollator":
        return cls(drafter.max_draft_depth, drafter.config.shifted, args.num_anchors, args.seed)

    def prefix_rows(self, labels: torch.LongTensor, anchors: torch.LongTensor) -> dict[str, torch.LongTensor]:
        """The rows of real tokens, `(length - 1,)` each."""
        index = torch.arange(len(labels) - 1)
        learned = torch.full_like(index, IGNORED)
        if self.shifted:
            learned[anchors - 1] = labels[anchors + 1]
        return self._rows(torch.zeros_like(index), index, learned)

    def mask_rows(self, labels: torch.LongTensor, anchors: torch.LongTensor) -> dict[str, torch.LongTensor]:
        """The rows of masks, prefix by prefix, `(masks,)` each."""
        learned = labels_behind(anchors, labels, self.num_tokens)[:, 1 if self.shifted else 0 :]
        group, mask = (learned != IGNORED).nonzero(as_tuple=True)
        return self._rows(mask + 1, anchors[group] + mask, learned[group, mask])

    def _rows(
        self, block: torch.LongTensor, index: torch.LongTensor, learned: torch.LongTensor
    ) -> dict[str, torch.LongTensor]:
        shift = 1 if self.shifted else 0
        return {
            "labels": learned,
            "draft_positions": (block + shift).masked_fill(learned == IGNORED, 0),
            "target_index": index + shift,
            "row_block": block,
            "row_index": index,
            "row_document": torch.zeros_like(index),
        }

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.LongTensor]:
        sequences, prefixes, masks = [], [], []
        for example in examples:
            input_ids, labels, documents = checked(example)
            check_one_document(documents)
            # Something has to be read before the first anchor.
            anchors = possible_anchors(labels, documents)
            anchors = anchors[anchors > 0]
            generator = example_generator(self.seed, self.epoch, input_ids)
            sequences.append({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})
            prefixes.append(self.prefix_rows(labels, anchors))
            masks.append(self.mask_rows(labels, some_of(anchors, self.num_anchors, generator)))
        check_something_to_draft([int((rows["labels"] != IGNORED).sum()) for rows in prefixes + masks])
        fill = {"labels": IGNORED, "row_document": PADDING}
        first, behind = stacked(prefixes, fill), stacked(masks, fill)
        return stacked(sequences) | {name: torch.cat([first[name], behind[name]], dim=1) for name in first}


# By what a drafter says of its `training_layout`.
COLLATORS = {"dropped_masks": PardCollator, "anchored_blocks": BlockCollator, "shared_prefix": SharedPrefixCollator}
