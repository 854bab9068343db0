"""From a batch to the draft logits of its supervised rows, one function per layout of batches."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.target_projection import one_place_behind
from .attention import layout_mask
from .documents import IGNORED, documents_of, positions_in_documents
from .features import TargetReading, read_target
from .masks import PADDING, BlockRows, PardRows

# The label of a token that the drafter can't write.
UNKNOWN = -1


@dataclass(frozen=True)
class SupervisedRows:
    """What the losses see.

    Attributes:
        logits: `(rows, vocab)`.
        labels: `(rows,)`.
        positions: `(rows,)`, k of each row, counted from 1 for the first drafted token.
        target_rows: sample and place of the target's logits for the same token, `(rows,)` each; `None` if the layout
            doesn't say.
        vocabulary: `(vocab,)`, the target's id of each column of `logits`, if they are not the same; labels are columns
            too then, `UNKNOWN` for tokens that have none.
    """

    logits: torch.Tensor
    labels: torch.LongTensor
    positions: torch.LongTensor
    target_rows: tuple[torch.LongTensor, torch.LongTensor] | None = None
    vocabulary: torch.LongTensor | None = None


def target_reading(
    drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict, with_logits: bool = False
) -> TargetReading:
    """What the drafter reads of the target, and learns from it; nothing if it reads token ids only."""
    taps = drafter.taps_for(target)
    if not taps:
        return TargetReading()
    documents = packed_documents(batch)
    if "attention_mask" in batch:
        return read_target(target, taps, batch["input_ids"], batch["attention_mask"], with_logits, documents)
    # A PARD batch holds its text among its rows.
    return read_target(target, taps, *text_of_rows(batch), with_logits, documents)


def text_of_rows(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The real tokens of a PARD batch, which every example's rows begin with: ids and mask, `(batch, length)` each."""
    real = (batch["row_block"] == 0) & (batch["row_document"] != PADDING)
    length = int(real.sum(dim=1).max())
    return batch["input_ids"][:, :length], real[:, :length].long()


def packed_documents(batch: dict) -> torch.LongTensor | None:
    """The document of each token that the target reads, `(batch, length)`, -1 for padding; `None` if no row is packed."""
    if "attention_mask" in batch:
        return batch.get("document_ids")
    real = text_of_rows(batch)[1].bool()
    documents = batch["row_document"][:, : real.shape[1]].masked_fill(~real, PADDING)
    return documents if int(documents.max()) > 0 else None


def pard_forward(
    model: nn.Module,
    drafter: PreTrainedModel,
    target: PreTrainedModel | None,
    batch: dict,
    features: torch.Tensor | None,
) -> SupervisedRows:
    """A PARD batch through an ordinary causal LM, with a mask that shows each row what inference shows it.

    With features (PARD-2), each row gets those that its anchor gets, the last real token that it sees.
    """
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    supervised = batch["labels"] != IGNORED
    injected = {}
    if features is not None:
        anchors = batch["row_index"] - batch["row_block"]
        # A document's first token has no predecessor, whatever stands before it in a packed row.
        is_first = batch["position_ids"][:, : features.shape[1]] == 0
        shifted = one_place_behind(features).masked_fill(is_first[:, :, None], 0)
        injected = {"target_features": shifted, "feature_rows": anchors}
    outputs = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=layout_mask(rows, drafter),
        use_cache=False,
        logits_to_keep=supervised,
        **injected,
    )
    return SupervisedRows(outputs.logits, batch["labels"][supervised], batch["draft_positions"][supervised])


def block_forward(
    model: nn.Module, drafter: PreTrainedModel, target: PreTrainedModel, batch: dict, features: torch.Tensor
) -> SupervisedRows:
    """All anchored blocks of a batch in one sequence; the target's own embedding and lm_head, frozen."""
    anchors, block_ids = batch["anchors"], batch["block_ids"]
    batch_size, num_blocks, block_size = block_ids.shape
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size)
    documents = documents_of(batch)
    ahead = torch.arange(block_size, device=anchors.device)
    rows = BlockRows(
        anchors.repeat_interleave(block_size, dim=1),
        (anchors[:, :, None] + ahead).view(batch_size, -1),
        block.expand(batch_size, -1),
        documents,
    )
    context_positions = positions_in_documents(documents)
    anchor_positions = context_positions.gather(1, anchors.clamp(min=0))
    block_positions = (anchor_positions[:, :, None] + ahead).view(batch_size, -1)
    hidden_states = model(
        noise_embeds=target.get_input_embeddings()(block_ids.view(batch_size, -1)).to(drafter.dtype),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=layout_mask(rows, drafter),
    ).last_hidden_state
    drafted = hidden_states.view(batch_size, num_blocks, block_size, -1)[:, :, 1:]
    supervised = batch["labels"] != IGNORED
    head = target.get_output_embeddings()
    positions = ahead[1:].expand(batch_size, num_blocks, -1)
    return SupervisedRows(
        head(drafted[supervised].to(head.weight.dtype)), batch["labels"][supervised], positions[supervised]
    )


def shared_prefix_forward(
    model: nn.Module, drafter: PreTrainedModel, target: PreTrainedModel, batch: dict, features: torch.Tensor
) -> SupervisedRows:
    """A shared-prefix batch: each token's states beside the next one's embedding, and all prefixes' masks behind them."""
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    supervised = batch["labels"] != IGNORED
    logits = model(
        next_embeds=target.get_input_embeddings()(batch["input_ids"][:, 1:]).to(drafter.dtype),
        target_hidden_states=features[:, :-1].to(drafter.dtype),
        num_masks=batch["labels"].shape[1] - batch["input_ids"].shape[1] + 1,
        position_ids=batch["row_position"],
        attention_mask=layout_mask(rows, drafter),
        logits_to_keep=supervised,
    ).logits
    labels, vocabulary = batch["labels"][supervised], drafter.draft_token_ids
    if vocabulary is not None:
        columns = torch.full((drafter.config.vocab_size,), UNKNOWN, device=labels.device)
        columns[vocabulary] = torch.arange(len(vocabulary), device=labels.device)
        labels = columns[labels]
    sample = supervised.nonzero(as_tuple=True)[0]
    return SupervisedRows(
        logits, labels, batch["draft_positions"][supervised], (sample, batch["target_index"][supervised]), vocabulary
    )


# By what a drafter says of its `training_layout`.
FORWARDS = {"dropped_masks": pard_forward, "anchored_blocks": block_forward, "shared_prefix": shared_prefix_forward}
