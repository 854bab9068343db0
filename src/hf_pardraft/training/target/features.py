"""What a drafter's training reads from the frozen target."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .head import TargetHead, watching_base
from .packed_forward import documents_apart, packed_inputs, put_together, takes_document_masks


@dataclass(frozen=True)
class TargetReading:
    """What the target makes of a batch.

    Attributes:
        features: `(batch, length, taps * hidden)`, its tapped hidden states, side by side; `None` if there are no taps.
        states: `(batch, length, hidden)`, what its head gets, entry t for the token at t + 1; `None` unless it was asked for.
        head: from rows of `states`, `(rows, hidden)`, to its logits, `(rows, vocab)`.
    """

    features: torch.Tensor | None = None
    states: torch.Tensor | None = None
    head: Callable[[torch.Tensor], torch.Tensor] | None = None

    def logits(self, samples: torch.LongTensor, places: torch.LongTensor) -> torch.Tensor:
        """The target's logits behind the token at `places` of `samples`, `(rows,)` each: `(rows, vocab)`."""
        return self.head(self.states[samples.to(self.states.device), places.to(self.states.device)])


@torch.no_grad()
def read_target(
    target: PreTrainedModel,
    taps: list[int],
    input_ids: torch.LongTensor,
    attention_mask: torch.LongTensor,
    with_states: bool = False,
    documents: torch.LongTensor | None = None,
) -> TargetReading:
    """One forward of the target.

    Args:
        target: frozen.
        taps: indices into its `hidden_states` tuple; no other entry is kept in memory.
        input_ids, attention_mask: `(batch, length)`, padded on the right.
        with_states: whether its logits will be asked for. Its last hidden states are kept then, which are smaller.
        documents: `(batch, length)`, of packed rows, -1 for padding: each document is read as if it stood alone.
    """
    if documents is not None and not takes_document_masks(target):
        apart, mask = documents_apart(input_ids, documents)
        reading = read_target(target, taps, apart, mask, with_states)
        features, states = (
            None if values is None else put_together(values, mask, documents)
            for values in (reading.features, reading.states)
        )
        return TargetReading(features, states, reading.head)
    inputs = {"attention_mask": attention_mask} if documents is None else packed_inputs(target, documents)
    arguments = {"input_ids": input_ids, **inputs, "use_cache": False, "return_dict": True}
    with watching_base(target) as seen:
        outputs = target(**arguments, output_hidden_states=taps or None, logits_to_keep=1)
    features = torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1) if taps else None
    if not with_states:
        return TargetReading(features)
    if seen.module is None:
        # A target that is not divided into a base model and a head: its logits have to be whole.
        return TargetReading(features, target(**arguments).logits, torch.nn.Identity())
    return TargetReading(features, seen.output.last_hidden_state, TargetHead(target, seen))


def tapped_features(
    target: PreTrainedModel, taps: list[int], input_ids: torch.LongTensor, attention_mask: torch.LongTensor
) -> torch.Tensor:
    """The target's tapped hidden states alone, `(batch, length, taps * hidden)`; see [`read_target`]."""
    return read_target(target, taps, input_ids, attention_mask).features


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """The target in evaluation mode, with no gradient to any of its weights."""
    target.requires_grad_(False)
    return target.eval()
