"""Anchored blocks, for DFlash and DFlare: a text, and blocks of an anchor and masks (arXiv 2606.02091, section 3.3)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...pairing.gathered_rows import draft_head
from ...pairing.target_checks import input_dtype
from ..data.documents import IGNORED, PADDING, checked, positions_in_documents
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
from .masks import BlockQueries

if TYPE_CHECKING:
    from ..arguments import DraftTrainingArguments


class AnchoredBlocks(Layout):
    """Sequences for the target, and blocks that begin at some of their tokens.

    A batch holds `input_ids` and `attention_mask` `(batch, length)`, and `document_ids` beside them if an item is packed;
    `anchors (batch, blocks)`, `PADDING` where an example has fewer; `block_ids (batch, blocks, block_size)`; and `labels
    (batch, blocks, block_size - 1)`, the tokens after the anchor. A block that runs past the end of its document keeps its
    valid part. After its first unsupervised token a block is not trained: verification would stop there, since the target
    never wrote what follows.

    Args:
        mask_token_id: id of the mask token.
        block_size: tokens a block, the anchor counted.
        num_anchors: most blocks per example, all documents of a packed one together; `None` for no limit.
        seed: of the anchors.
    """

    # An anchor is a token that the target wrote, and something follows it.
    supervised_run = 2
    # The target's own embeddings, frozen.
    inputs_have_gradient = False

    def __init__(self, mask_token_id: int, block_size: int = 16, num_anchors: int | None = 512, seed: int = 0) -> None:
        super().__init__(seed)
        self.mask_token_id = mask_token_id
        self.block_size = block_size
        self.num_anchors = num_anchors

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: "DraftTrainingArguments") -> "AnchoredBlocks":
        return cls(drafter.config.mask_token_id, drafter.config.block_size, args.most_anchors, args.seed)

    def lay_out(self, example: dict[str, Any]) -> Batch:
        """Sequence, anchors, block ids and labels of one example."""
        input_ids, labels, documents = checked(example)
        anchors = some_of(possible_anchors(labels, documents), self.num_anchors, self.generator(input_ids))
        block_ids = torch.full((len(anchors), self.block_size), self.mask_token_id)
        block_ids[:, 0] = input_ids[anchors]
        return {
            **text_for_target(input_ids, documents),
            "anchors": anchors,
            "block_ids": block_ids,
            "labels": labels_after(anchors, labels, documents, self.block_size - 1),
        }

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        laid_out = [self.lay_out(example) for example in examples]
        check_something_to_draft([len(example["anchors"]) for example in laid_out])
        fill = {"anchors": PADDING, "labels": IGNORED, "block_ids": self.mask_token_id}
        return without_lone_documents(stacked(laid_out, TEXT_FILL | fill))

    @classmethod
    def queries(cls, batch: Batch) -> BlockQueries:
        anchors, (batch_size, num_blocks, block_size) = batch["anchors"], batch["block_ids"].shape
        block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size)
        ahead = torch.arange(block_size, device=anchors.device)
        return BlockQueries(
            anchors.repeat_interleave(block_size, dim=1),
            (anchors[:, :, None] + ahead).view(batch_size, -1),
            block.expand(batch_size, -1),
            cls.text(batch)[1],
        )

    @classmethod
    def supervised(cls, batch: Batch, drafter: PreTrainedModel) -> SupervisedPositions:
        """Place k of a block that is anchored at a drafts the token at a + k."""
        labels = batch["labels"]
        item, block, index = (labels != IGNORED).nonzero(as_tuple=True)
        return SupervisedPositions(
            labels=labels[item, block, index],
            draft_positions=index + 1,
            items=item,
            places=batch["anchors"][item, block] + index,
            **cls.vocabulary(drafter),
        )

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
        """All blocks of a batch in one sequence; the target's own embedding, and lm_head or rows of it, frozen."""
        queries, shape = cls.queries(batch), batch["block_ids"].shape
        context_positions = positions_in_documents(queries.context_document)
        anchors = queries.anchor.clamp(min=0)
        block_positions = context_positions.gather(1, anchors) + queries.index - queries.anchor
        hidden_states = model(
            noise_embeds=target.get_input_embeddings()(batch["block_ids"].flatten(1)).to(drafter.dtype),
            context_hidden_states=features.to(drafter.dtype),
            position_ids=torch.cat([context_positions, block_positions], dim=1),
            **layout_attention(queries, drafter),
        ).last_hidden_state
        drafted = hidden_states.view(*shape, -1)[:, :, 1:]
        head = draft_head(drafter, target.get_output_embeddings())
        return score(head, drafted[batch["labels"] != IGNORED].to(dtype=input_dtype(head)))
