"""What a drafter's training reads from the frozen target: one forward, packed texts each as if they stood alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.cache import HeldColumns
from ...models.inputs import input_device
from ...models.masks import additive_masks, attention_windows
from ...pairing.target_checks import takes_positions
from ..data.documents import PADDING, document_starts, positions_in_documents
from ..layouts import layout_of
from ..layouts.attention import compute_dtype
from ..layouts.masks import document_mask
from .head import chosen_columns, target_head, watching_base

# What a batch calls the stored states of its texts.
STATES = "target_states"
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MASKED_ATTENTION = {"eager", "sdpa"}


@dataclass(frozen=True)
class TargetReading:
    """What the target makes of a batch.

    Attributes:
        features: `(batch, length, taps * hidden)`, its tapped hidden states, side by side; `None` if there are no taps.
        states: `(batch, length, hidden)`, what its head gets, entry t for the token at t + 1; `None` unless it was asked for.
        head: from some of the `states`, `(positions, hidden)`, and the ids of the tokens that are asked for, to their logits.
    """

    features: torch.Tensor | None = None
    states: torch.Tensor | None = None
    head: Callable[[torch.Tensor, torch.LongTensor | None], torch.Tensor] | None = None

    def logits(
        self, items: torch.LongTensor, places: torch.LongTensor, token_ids: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """The target's logits after the token at `places` of batch `items`, `(positions,)` each.

        Args:
            token_ids: `(columns,)`, the tokens whose logits are wanted; all of them by default.

        Returns:
            `(positions, vocab)`, or `(positions, columns)`.
        """
        return self.head(self.states[items.to(self.states.device), places.to(self.states.device)], token_ids)


def target_reading(
    drafter: PreTrainedModel, target: PreTrainedModel | None, batch: dict[str, torch.Tensor], with_states: bool = False
) -> TargetReading:
    """What the drafter reads of the target, live or stored, and learns from it (`with_states`); nothing if it does neither."""
    taps = drafter.taps_for(target)
    if not taps and not with_states:
        return TargetReading()
    if STATES in batch:
        return reading_of_states(batch[STATES], target, len(taps), with_states)
    input_ids, documents = layout_of(drafter).text(batch)
    packed = documents if int(documents.max()) > 0 else None
    return read_target(target, taps, input_ids, (documents != PADDING).long(), with_states, packed)


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
        documents: `(batch, length)`, of packed texts, -1 for padding: each document is read as if it stood alone.
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
        outputs = target(**arguments, output_hidden_states=taps or None, logits_to_keep=no_logits(target))
    features = torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1) if taps else None
    if not with_states:
        return TargetReading(features)
    if seen.module is None:
        # A target that is not divided into a base model and a head: its logits have to be whole.
        return TargetReading(features, target(**arguments).logits, chosen_columns)
    return TargetReading(features, seen.output.last_hidden_state, target_head(target, seen))


def no_logits(target: PreTrainedModel) -> torch.LongTensor | int:
    """The least `logits_to_keep` that a target takes: none, as a tensor of positions, or one where its code is not
    Transformers'. (One row in bfloat16 costs a CPU a copy of the whole head.)"""
    if not type(target).__module__.startswith("transformers."):
        return 1
    return torch.zeros(0, dtype=torch.long, device=input_device(target.get_input_embeddings()))


@torch.no_grad()
def reading_of_states(
    states: torch.Tensor, target: PreTrainedModel, num_taps: int, with_last: bool = False
) -> TargetReading:
    """What [`read_target`] would have found.

    Args:
        states: `(batch, length, width)`, the tapped hidden states of a batch and, for logits, the last one after them.
        target: lends its head.
        num_taps: how many there are.
        with_last: whether its logits will be asked for.
    """
    size = num_taps * target.config.get_text_config(decoder=True).hidden_size
    if not with_last:
        return TargetReading(states[..., :size])
    return TargetReading(states[..., :size], states[..., size:].to(target.dtype), target_head(target))


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """The target in evaluation mode, with no gradient to any of its weights."""
    target.requires_grad_(False)
    return target.eval()


def takes_document_masks(target: PreTrainedModel) -> bool:
    """Whether attention masks and positions alone keep the target's documents apart.

    They don't for recurrent layers, whose state runs on; for kernels that take no mask; and for models that derive their
    positions from a two-dimensional mask.
    """
    config = target.config.get_text_config(decoder=True)
    return (
        target._supports_attention_backend
        and not target._is_stateful
        and config._attn_implementation in MASKED_ATTENTION
        and set(attention_windows(config)) <= MASKED_LAYERS
        and takes_positions(target)
    )


def packed_inputs(target: PreTrainedModel, documents: torch.LongTensor) -> dict[str, Any]:
    """Positions that start anew with each document, and masks that end there; windows and chunks are counted from there."""
    positions = positions_in_documents(documents)
    windows = attention_windows(target.config.get_text_config(decoder=True))
    masks = additive_masks(document_mask(documents), positions, windows, HeldColumns(0), compute_dtype(target))
    return {"position_ids": positions, "attention_mask": masks}


def documents_apart(
    input_ids: torch.LongTensor, documents: torch.LongTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Each document as a batch item of its own: ids and mask, `(documents, longest)`, in the order of items and then places."""
    real = documents != PADDING
    number = (document_starts(documents) & real).flatten().long().cumsum(0).view_as(documents) - 1
    positions = positions_in_documents(documents)
    shape = int(number.max()) + 1, int(positions[real].max()) + 1
    apart, mask = input_ids.new_zeros(shape), input_ids.new_zeros(shape)
    apart[number[real], positions[real]] = input_ids[real]
    mask[number[real], positions[real]] = 1
    return apart, mask


def put_together(values: torch.Tensor, mask: torch.LongTensor, documents: torch.LongTensor) -> torch.Tensor:
    """What the target made of [`documents_apart`], `(documents, longest, size)`, back as `(batch, length, size)`."""
    packed = values.new_zeros(*documents.shape, values.shape[-1])
    # Both sides are in the order of items and then places.
    packed[documents != PADDING] = values[mask.bool()]
    return packed
