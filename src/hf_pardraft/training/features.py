"""What a drafter's training reads from the frozen target."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .packed_reading import documents_apart, packed_inputs, put_together, takes_document_masks


@dataclass(frozen=True)
class TargetReading:
    """What the target makes of a batch.

    Attributes:
        features: `(batch, length, taps * hidden)`, its tapped hidden states, side by side; `None` if there are no taps.
        logits: `(batch, length, vocab)`, entry t scores the token at t + 1; `None` unless they were asked for.
    """

    features: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@torch.no_grad()
def read_target(
    target: PreTrainedModel,
    taps: list[int],
    input_ids: torch.LongTensor,
    attention_mask: torch.LongTensor,
    with_logits: bool = False,
    documents: torch.LongTensor | None = None,
) -> TargetReading:
    """One forward of the target.

    Args:
        target: frozen.
        taps: indices into its `hidden_states` tuple; no other entry is kept in memory.
        input_ids, attention_mask: `(batch, length)`, padded on the right.
        with_logits: whether to compute the logits of all positions.
        documents: `(batch, length)`, of packed rows, -1 for padding: each document is read as if it stood alone.
    """
    if documents is not None and not takes_document_masks(target):
        apart, mask = documents_apart(input_ids, documents)
        reading = read_target(target, taps, apart, mask, with_logits)
        logits = put_together(reading.logits, mask, documents) if with_logits else None
        return TargetReading(put_together(reading.features, mask, documents), logits)
    inputs = {"attention_mask": attention_mask} if documents is None else packed_inputs(target, documents)
    outputs = target(
        input_ids=input_ids,
        **inputs,
        output_hidden_states=taps,
        use_cache=False,
        logits_to_keep=0 if with_logits else 1,
    )
    features = torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1)
    return TargetReading(features, outputs.logits if with_logits else None)


def tapped_features(
    target: PreTrainedModel, taps: list[int], input_ids: torch.LongTensor, attention_mask: torch.LongTensor
) -> torch.Tensor:
    """The target's tapped hidden states alone, `(batch, length, taps * hidden)`; see [`read_target`]."""
    return read_target(target, taps, input_ids, attention_mask).features


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """The target in evaluation mode, with no gradient to any of its weights."""
    target.requires_grad_(False)
    return target.eval()
