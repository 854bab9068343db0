"""From a batch to the draft logits of its supervised rows, one function per layout of batches."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.row_masks import additive
from ..models.target_projection import one_place_behind
from .collators import IGNORED, check_one_document
from .feature_store import STATES, reading_of_states
from .features import TargetReading, read_target
from .masks import PADDING, BlockRows, PardRows, block_mask, pard_mask

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
    if STATES in batch:
        return reading_of_states(batch[STATES], target, len(taps), with_logits)
    return read_target(target, taps, *text_of(batch), with_logits)


def text_of(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """What the target reads of a batch: ids and mask, `(batch, length)` each."""
    if "attention_mask" in batch:
        return batch["input_ids"], batch["attention_mask"]
    # A PARD batch holds its text among its rows.
    return text_of_rows(batch)


def text_of_rows(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The real tokens of a PARD batch, which every example's rows begin with: ids and mask, `(batch, length)` each.

    Raises:
        ValueError: for a packed row, where the target would attend across documents.
    """
    documents = batch["row_document"]
    real = (batch["row_block"] == 0) & (documents != PADDING)
    for row_documents, is_real in zip(documents, real, strict=True):
        check_one_document(row_documents[is_real])
    length = int(real.sum(dim=1).max())
    return batch["input_ids"][:, :length], real[:, :length].long()


def compute_dtype(drafter: PreTrainedModel) -> torch.dtype:
    """What attention computes in, autocast considered; an additive mask has to be of that dtype."""
    device = drafter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else drafter.dtype


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
        injected = {"target_features": one_place_behind(features), "feature_rows": anchors}
    outputs = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=additive(pard_mask(rows), compute_dtype(drafter)),
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
    rows = BlockRows(anchors.repeat_interleave(block_size, dim=1), block.expand(batch_size, -1))
    length = batch["input_ids"].shape[1]
    context_positions = torch.arange(length, device=anchors.device).expand(batch_size, -1)
    ahead = torch.arange(block_size, device=anchors.device)
    block_positions = (anchors.clamp(min=0)[:, :, None] + ahead).view(batch_size, -1)
    hidden_states = model(
        noise_embeds=target.get_input_embeddings()(block_ids.view(batch_size, -1)).to(drafter.dtype),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=torch.cat([context_positions, block_positions], dim=1),
        attention_mask=additive(block_mask(rows, batch["attention_mask"].bool()), compute_dtype(drafter)),
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
        position_ids=batch["row_index"],
        attention_mask=additive(pard_mask(rows), compute_dtype(drafter)),
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
