"""Shared prefixes, for DART: a text, and masks after many of its prefixes (arXiv 2601.19278, section 3.3)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.documents import IGNORED, PADDING, checked, document_starts, positions_in_documents
from .attention import layout_attention
from .base import (
    TEXT_FILL,
    Batch,
    Layout,
    Scorer,
    SupervisedPositions,
    check_something_to_draft,
    labels_after,
    possible_anchors,
    some_of,
    stacked,
    text_for_target,
    without_lone_documents,
)

if TYPE_CHECKING:
    from ..arguments import DraftTrainingArguments


class SharedPrefixes(Layout):
    """Every token of a sequence but the last, and groups of masks that share it, each seeing its own part of it.

    Query i of the prefix reads the target's states at i and the embedding of token i + 1, so the prefix that ends there is
    followed by the anchor i + 1, and its draft by the tokens after that.

    A batch holds `input_ids` and `attention_mask` `(batch, length)` for the target, and `document_ids` beside them if an item
    is packed; and `(batch, queries)` each, the `length - 1` of the prefix first: `labels` (what the query itself must
    predict), `draft_positions` (t, from 1; 0 where nothing is predicted), `target_index` (whose logits of the target score the
    same token), what the mask is made of: `query_block`, `query_index`, `query_document`; `query_position`, the query's place
    in its document; and `stands_for`, how many prefixes like its own. Anchors and labels are those of anchored blocks. Masks that
    have no label, and none after them that has, are not built.

    Args:
        num_tokens: d, how many tokens the drafter learns to draft.
        shifted: whether a query predicts the token after its own place, so that the last one of a prefix predicts too.
        num_anchors: most prefixes per example that get masks; `None` for all, as in the paper. All that can, predict their first
            token; masks weigh as many times more as there would be of them, so that the loss is the same on average.
        seed: of the anchors.
    """

    # An anchor is a token that the target wrote, and something follows it; something has to be read before it.
    supervised_run, tokens_before = 2, 2

    def __init__(self, num_tokens: int = 8, shifted: bool = True, num_anchors: int | None = 512, seed: int = 0) -> None:
        super().__init__(seed)
        self.num_tokens = num_tokens
        self.shifted = shifted
        self.num_anchors = num_anchors

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: "DraftTrainingArguments") -> "SharedPrefixes":
        return cls(drafter.max_draft_depth, drafter.config.shifted, args.most_anchors, args.seed)

    def prefix_queries(self, labels: torch.LongTensor, documents: torch.LongTensor, anchors: torch.LongTensor) -> Batch:
        """The queries of real tokens, `(length - 1,)` each."""
        index = torch.arange(len(labels) - 1)
        learned = torch.full_like(index, IGNORED)
        if self.shifted:
            learned[anchors - 1] = labels[anchors + 1]
        return self._queries(torch.zeros_like(index), index, learned, documents)

    def mask_queries(
        self, labels: torch.LongTensor, documents: torch.LongTensor, anchors: torch.LongTensor, num_all: int
    ) -> Batch:
        """The queries of masks, prefix by prefix, `(masks,)` each, of some of `num_all` anchors."""
        learned = labels_after(anchors, labels, documents, self.num_tokens)[:, 1 if self.shifted else 0 :]
        group, mask = (learned != IGNORED).nonzero(as_tuple=True)
        stands_for = num_all / max(len(anchors), 1)
        return self._queries(mask + 1, anchors[group] + mask, learned[group, mask], documents, stands_for)

    def _queries(
        self,
        block: torch.LongTensor,
        index: torch.LongTensor,
        learned: torch.LongTensor,
        documents: torch.LongTensor,
        stands_for: float = 1.0,
    ) -> Batch:
        shift = 1 if self.shifted else 0
        return {
            "labels": learned,
            "draft_positions": (block + shift).masked_fill(learned == IGNORED, 0),
            "target_index": index + shift,
            "query_block": block,
            "query_index": index,
            "query_document": documents[index],
            "query_position": positions_in_documents(documents)[index],
            "stands_for": torch.full(index.shape, stands_for),
        }

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        sequences, prefixes, masks = [], [], []
        for example in examples:
            input_ids, labels, documents = checked(example)
            # Something of the document has to be read before its first anchor.
            anchors = possible_anchors(labels, documents)
            anchors = anchors[~document_starts(documents)[anchors]]
            sequences.append(text_for_target(input_ids, documents))
            prefixes.append(self.prefix_queries(labels, documents, anchors))
            chosen = some_of(anchors, self.num_anchors, self.generator(input_ids))
            masks.append(self.mask_queries(labels, documents, chosen, len(anchors)))
        check_something_to_draft([int((part["labels"] != IGNORED).sum()) for part in prefixes + masks])
        fill = {"labels": IGNORED, "query_document": PADDING}
        first, last = stacked(prefixes, fill), stacked(masks, fill)
        queries = {name: torch.cat([first[name], last[name]], dim=1) for name in first}
        return without_lone_documents(stacked(sequences, TEXT_FILL)) | queries

    @classmethod
    def supervised(cls, batch: Batch, drafter: PreTrainedModel) -> SupervisedPositions:
        return SupervisedPositions.of_queries(batch["target_index"], batch, **cls.vocabulary(drafter))

    @classmethod
    def forward(
        cls,
        model: nn.Module,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        batch: Batch,
        features: torch.Tensor,
        score: Scorer,
    ) -> Any:
        """Each token's states beside the next one's embedding, and all prefixes' masks after them."""
        return model(
            next_embeds=target.get_input_embeddings()(batch["input_ids"][:, 1:]).to(drafter.dtype),
            target_hidden_states=features[:, :-1].to(drafter.dtype),
            num_masks=batch["labels"].shape[1] - batch["input_ids"].shape[1] + 1,
            position_ids=batch["query_position"],
            **layout_attention(cls.queries(batch), drafter),
            logits_to_keep=batch["labels"] != IGNORED,
            read_rows=score,
        )
