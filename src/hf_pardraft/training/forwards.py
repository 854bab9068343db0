"""From a batch to the draft logits of its supervised rows, one function per batch layout."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .collators import IGNORED
from .features import tapped_features
from .masks import BlockRows, PardRows, additive, block_mask, pard_mask


@dataclass(frozen=True)
class SupervisedRows:
    """What the losses see.

    Attributes:
        logits: `(rows, vocab)`.
        labels: `(rows,)`.
        positions: `(rows,)`, k of each row, counted from 1 for the first drafted token.
    """

    logits: torch.Tensor
    labels: torch.LongTensor
    positions: torch.LongTensor


def target_features(drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict) -> torch.Tensor | None:
    """The tapped hidden states that the drafter reads, `(batch, length, taps * hidden)`, or `None` if it reads none."""
    if not drafter.tapped_hidden_states:
        return None
    return tapped_features(target, drafter.tapped_hidden_states, batch["input_ids"], batch["attention_mask"])


def compute_dtype(drafter: PreTrainedModel) -> torch.dtype:
    """What attention computes in, autocast considered; an additive mask has to be of that dtype."""
    device = drafter.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else drafter.dtype


def pard_forward(
    model: nn.Module, drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict, features: None
) -> SupervisedRows:
    """A PARD batch through an ordinary causal LM, with a mask that shows each row what inference shows it."""
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    supervised = batch["labels"] != IGNORED
    outputs = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=additive(pard_mask(rows), compute_dtype(drafter)),
        use_cache=False,
        logits_to_keep=supervised,
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


# By what a drafter declares as its `batch_layout`.
FORWARDS = {"cod": pard_forward, "anchored_blocks": block_forward}
