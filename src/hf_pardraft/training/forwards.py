"""From a batch to the draft logits of its supervised rows, one function per kind of drafter."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .collators import IGNORED
from .features import tapped_features
from .masks import BlockRows, PardRows, additive, block_mask, block_window, pard_mask, pard_window


@dataclass(frozen=True)
class SupervisedRows:
    """What losses and metrics see.

    Attributes:
        logits: `(rows, vocab)`.
        labels: `(rows,)`.
        positions: `(rows,)`, k of each row, counted from 1 for the first drafted token.
        blocks: `(rows,)`, which draft the row is part of, in `[0, num_blocks)`; rows of one draft share an anchor.
        num_blocks: how many drafts the batch has room for; some may have no row.
    """

    logits: torch.Tensor
    labels: torch.LongTensor
    positions: torch.LongTensor
    blocks: torch.LongTensor
    num_blocks: int


def target_features(drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict) -> torch.Tensor | None:
    """The tapped hidden states that the drafter reads, `(batch, length, taps * hidden)`, or `None` if it reads none."""
    if not drafter.tapped_hidden_states:
        return None
    return tapped_features(target, drafter.tapped_hidden_states, batch["input_ids"], batch["attention_mask"])


def attention_masks(
    drafter: PreTrainedModel, mask: torch.BoolTensor, window_mask: torch.BoolTensor | None
) -> torch.Tensor | dict[str, torch.Tensor]:
    """`mask` as the drafter's attention takes it; one per layer type if it has sliding layers (then see `window_mask`)."""
    device = drafter.device.type
    # An additive mask has to be of the dtype that attention computes in.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else drafter.dtype
    if window_mask is None:
        return additive(mask, dtype)
    return {"full_attention": additive(mask, dtype), "sliding_attention": additive(mask & window_mask, dtype)}


def sliding_window(drafter: PreTrainedModel) -> int | None:
    """How far the drafter's sliding layers see; `None` if it has none. Llama's config knows no layer types at all."""
    facts = drafter.config.to_dict()
    return facts["sliding_window"] if "sliding_attention" in (facts.get("layer_types") or ()) else None


def pard_forward(
    model: nn.Module, drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict, features: None
) -> SupervisedRows:
    """A PARD batch through an ordinary causal LM, with a mask that shows each row what inference shows it."""
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    supervised = batch["labels"] != IGNORED
    window = sliding_window(drafter)
    outputs = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=attention_masks(drafter, pard_mask(rows), window and pard_window(rows, window)),
        use_cache=False,
        logits_to_keep=supervised,
    )
    batch_size, num_rows = supervised.shape
    sample = torch.arange(batch_size, device=supervised.device)[:, None]
    # A draft is known by its anchor, and a sample has no more anchors than rows.
    blocks = sample * num_rows + rows.index - rows.block
    return SupervisedRows(
        logits=outputs.logits,
        labels=batch["labels"][supervised],
        positions=batch["draft_positions"][supervised],
        blocks=blocks[supervised],
        num_blocks=batch_size * num_rows,
    )


def dflash_forward(
    model: nn.Module, drafter: PreTrainedModel, target: PreTrainedModel, batch: dict, features: torch.Tensor
) -> SupervisedRows:
    """All anchored blocks of a batch in one sequence; the target's own embedding and lm_head, frozen."""
    rows, position_ids = block_rows(batch)
    context_length = batch["input_ids"].shape[1]
    window = sliding_window(drafter)
    mask = block_mask(rows, batch["attention_mask"].bool())
    hidden_states = model(
        noise_embeds=target.get_input_embeddings()(batch["block_ids"].flatten(1)).to(drafter.dtype),
        context_hidden_states=features.to(drafter.dtype),
        position_ids=position_ids,
        attention_mask=attention_masks(drafter, mask, window and block_window(rows, context_length, window)),
    ).last_hidden_state
    supervised = batch["labels"] != IGNORED
    batch_size, num_blocks, num_positions = supervised.shape
    drafted = hidden_states.view(batch_size, num_blocks, num_positions + 1, -1)[:, :, 1:]
    head = target.get_output_embeddings()
    sample, block, position = supervised.nonzero(as_tuple=True)
    return SupervisedRows(
        logits=head(drafted[supervised].to(head.weight.dtype)),
        labels=batch["labels"][supervised],
        positions=position + 1,
        blocks=sample * num_blocks + block,
        num_blocks=batch_size * num_blocks,
    )


def block_rows(batch: dict) -> tuple[BlockRows, torch.LongTensor]:
    """The rows of a batch's anchored blocks, and the positions of context and rows, `(batch, context + rows)`."""
    anchors, block_ids = batch["anchors"], batch["block_ids"]
    batch_size, num_blocks, block_size = block_ids.shape
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size).expand(batch_size, -1)
    ahead = torch.arange(block_size, device=anchors.device)
    # A padding block stands at the start of the sequence, of which it sees nothing.
    index = (anchors.clamp(min=0)[:, :, None] + ahead).flatten(1)
    context_index = torch.arange(batch["input_ids"].shape[1], device=anchors.device).expand(batch_size, -1)
    rows = BlockRows(anchors.repeat_interleave(block_size, dim=1), block, index)
    return rows, torch.cat([context_index, index], dim=1)


FORWARDS = {"pard": pard_forward, "dflash": dflash_forward}
