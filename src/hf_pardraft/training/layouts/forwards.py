"""From a batch to its supervised rows, and from these to whatever is read off them, one function per layout of batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.target_projection import one_place_behind
from ..data.documents import IGNORED, documents_of, positions_in_documents
from ..target.feature_store import STATES, reading_of_states
from ..target.features import TargetReading, read_target
from .attention import layout_mask
from .blocks import SupervisedRows
from .masks import PADDING, BlockRows, PardRows

# Called with an lm_head and the hidden states of the supervised rows, `(rows, hidden)`.
RowReader = Callable[[nn.Module, torch.Tensor], Any]


def target_reading(
    drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict, with_states: bool = False
) -> TargetReading:
    """What the drafter reads of the target, and learns from it (`with_states`); nothing if it does neither."""
    taps = drafter.taps_for(target)
    if not taps and not with_states:
        return TargetReading()
    if STATES in batch:
        return reading_of_states(batch[STATES], target, len(taps), with_states)
    return read_target(target, taps, *text_of(batch), with_states, packed_documents(batch))


def text_of(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """What the target reads of a batch: ids and mask, `(batch, length)` each."""
    if "attention_mask" in batch:
        return batch["input_ids"], batch["attention_mask"]
    # A PARD batch holds its text among its rows.
    return text_of_rows(batch)


def text_of_rows(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """The real tokens of a PARD batch, which every example's rows begin with: ids and mask, `(batch, length)` each."""
    real = (batch["row_block"] == 0) & (batch["row_document"] != PADDING)
    length = int(real.sum(dim=1).max())
    return batch["input_ids"][:, :length], real[:, :length].long()


def packed_documents(batch: dict) -> torch.LongTensor | None:
    """The document of each token that the target reads, `(batch, length)`, -1 for padding; `None` if no row is packed."""
    if "attention_mask" in batch:
        return batch.get("document_ids")
    documents = documents_in(batch)[1]
    return documents if int(documents.max()) > 0 else None


def documents_in(batch: dict) -> tuple[torch.LongTensor, torch.LongTensor]:
    """What the target reads of a batch: ids, and the document of each, -1 for padding; `(batch, length)` each."""
    if "attention_mask" in batch:
        return batch["input_ids"], documents_of(batch)
    ids, mask = text_of_rows(batch)
    return ids, batch["row_document"][:, : ids.shape[1]].masked_fill(mask == 0, PADDING)


def rows_at(places: torch.LongTensor, batch: dict, **vocabulary: Any) -> SupervisedRows:
    """The supervised ones of rows that lie one behind the other; `places (batch, rows)` of the tokens before the drafted ones."""
    supervised = batch["labels"] != IGNORED
    return SupervisedRows(
        labels=batch["labels"][supervised],
        positions=batch["draft_positions"][supervised],
        samples=supervised.nonzero(as_tuple=True)[0],
        places=places[supervised],
        **vocabulary,
    )


def pard_rows(drafter: PreTrainedModel, batch: dict) -> SupervisedRows:
    """Row (j, p) of a PARD batch drafts the token at p + 1 from the prefix that ends at p - j."""
    return rows_at(batch["row_index"], batch)


def pard_forward(
    model: nn.Module,
    drafter: PreTrainedModel,
    target: PreTrainedModel | None,
    batch: dict,
    features: torch.Tensor | None,
    read_rows: RowReader,
) -> Any:
    """A PARD batch through an ordinary causal LM, with a mask that shows each row what inference shows it.

    With features (PARD-2), each row gets those that its anchor gets, the last real token that it sees.
    """
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    injected = {}
    if features is not None:
        anchors = batch["row_index"] - batch["row_block"]
        # A document's first token has no predecessor, whatever stands before it in a packed row.
        is_first = batch["position_ids"][:, : features.shape[1]] == 0
        shifted = one_place_behind(features).masked_fill(is_first[:, :, None], 0)
        injected = {"target_features": shifted, "feature_rows": anchors}
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=layout_mask(rows, drafter),
        use_cache=False,
        logits_to_keep=batch["labels"] != IGNORED,
        read_rows=read_rows,
        **injected,
    )


def block_rows(drafter: PreTrainedModel, batch: dict) -> SupervisedRows:
    """Row k of a block that is anchored at a drafts the token at a + k."""
    labels = batch["labels"]
    sample, block, index = (labels != IGNORED).nonzero(as_tuple=True)
    return SupervisedRows(
        labels=labels[sample, block, index],
        positions=index + 1,
        samples=sample,
        places=batch["anchors"][sample, block] + index,
    )


def block_forward(
    model: nn.Module,
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    batch: dict,
    features: torch.Tensor,
    read_rows: RowReader,
) -> Any:
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
    head = target.get_output_embeddings()
    return read_rows(head, drafted[batch["labels"] != IGNORED].to(head.weight.dtype))


def shared_prefix_rows(drafter: PreTrainedModel, batch: dict) -> SupervisedRows:
    """Rows of a shared-prefix batch; labels are columns of the drafter's vocabulary, if that is a part of the target's."""
    vocabulary = {"vocabulary": drafter.draft_token_ids, "vocab_size": drafter.config.vocab_size}
    return rows_at(batch["target_index"], batch, **vocabulary)


def shared_prefix_forward(
    model: nn.Module,
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    batch: dict,
    features: torch.Tensor,
    read_rows: RowReader,
) -> Any:
    """A shared-prefix batch: each token's states beside the next one's embedding, and all prefixes' masks behind them."""
    rows = PardRows(batch["row_block"], batch["row_index"], batch["row_document"])
    return model(
        next_embeds=target.get_input_embeddings()(batch["input_ids"][:, 1:]).to(drafter.dtype),
        target_hidden_states=features[:, :-1].to(drafter.dtype),
        num_masks=batch["labels"].shape[1] - batch["input_ids"].shape[1] + 1,
        position_ids=batch["row_position"],
        attention_mask=layout_mask(rows, drafter),
        logits_to_keep=batch["labels"] != IGNORED,
        read_rows=read_rows,
    )


# By what a drafter says of its `training_layout`.
ROWS = {"dropped_masks": pard_rows, "anchored_blocks": block_rows, "shared_prefix": shared_prefix_rows}
FORWARDS = {"dropped_masks": pard_forward, "anchored_blocks": block_forward, "shared_prefix": shared_prefix_forward}
