"""One forward of the target over rows of several documents, each read as if it stood alone."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.cache import RowColumns
from ...models.masks import additive_masks, attention_windows
from ..data.documents import document_starts, positions_in_documents
from ..layouts.attention import compute_dtype
from ..layouts.masks import PADDING, document_mask

MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MASKED_ATTENTION = {"eager", "sdpa"}


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
        and "position_ids" in inspect.signature(target.forward).parameters
    )


def packed_inputs(target: PreTrainedModel, documents: torch.LongTensor) -> dict[str, Any]:
    """Positions that start anew with each document, and masks that end there; windows and chunks are counted from there."""
    positions = positions_in_documents(documents)
    windows = attention_windows(target.config.get_text_config(decoder=True))
    masks = additive_masks(document_mask(documents), positions, windows, RowColumns(0), compute_dtype(target))
    return {"position_ids": positions, "attention_mask": masks}


def documents_apart(
    input_ids: torch.LongTensor, documents: torch.LongTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Each document as a row of its own: ids and mask, `(documents, longest)`, in the order of rows and then places."""
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
    # Both sides are in the order of rows and then places.
    packed[documents != PADDING] = values[mask.bool()]
    return packed
