"""The documents of an example: where each begins, what of it is learned, and where a draft of it can start."""

from itertools import pairwise
from typing import Any

import torch

from ..layouts.masks import PADDING

# The label of a token that is not learned, as everywhere in transformers.
IGNORED = -100
# What TRL's tokenised rows have in place of labels: 1 for tokens of the completion, and of what the assistant wrote.
TOKEN_MASKS = ("completion_mask", "assistant_masks")
# What an example may have beside its tokens; Arrow puts null where other rows have it and this one has not.
OPTIONAL = ("document_ids", "attention_mask")


def checked(example: dict[str, Any]) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """Input ids, labels and document numbers of an example, `(length,)` each.

    Labels are those of [`labels_of`]. Documents are numbered 0, 1, ... as they follow each other, whatever numbers
    `document_ids` gives them; without it there is one. Tokens that an `attention_mask` marks as padding are left out, on
    whichever side they stand.
    """
    input_ids = torch.as_tensor(example["input_ids"], dtype=torch.long)
    try:
        given = {
            name: torch.as_tensor(value) for name, value in example.items() if name in OPTIONAL and value is not None
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"{' and '.join(OPTIONAL)} should be lists of whole numbers: {error}") from error
    labels = torch.as_tensor(labels_of(example), dtype=torch.long)
    documents = given.get("document_ids", torch.zeros_like(input_ids)).long()
    real = given.get("attention_mask", torch.ones_like(input_ids)) != 0
    shapes = [tuple(part.shape) for part in (input_ids, labels, documents, real)]
    if len(set(shapes)) > 1 or input_ids.ndim != 1 or not real.any():
        raise ValueError(
            "an example needs input_ids, labels, document_ids and attention_mask of one length, with a token at least, got "
            f"{', '.join(map(str, shapes))}"
        )
    return input_ids[real], labels[real], document_starts(documents[real]).long().cumsum(dim=-1) - 1


def labels_of(example: dict[str, Any]) -> Any:
    """Labels of a tokenised example, `(length,)`: its `labels`, or all of its tokens, where no mask of [`TOKEN_MASKS`] is 0.

    Raises:
        ValueError: if a mask is of another length, or holds anything but 0 and 1.
    """
    labels = example["labels"] if example.get("labels") is not None else example["input_ids"]
    masks = {name: torch.as_tensor(example[name]) for name in TOKEN_MASKS if example.get(name) is not None}
    for name, mask in masks.items():
        labels = torch.as_tensor(labels, dtype=torch.long)
        if mask.shape != labels.shape or not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"{name} should be a 0 or 1 for each of {len(labels)} tokens, got {tuple(mask.shape)} values of "
                f"{sorted(set(mask.flatten().tolist()))[:5]}"
            )
        labels = labels.masked_fill(mask == 0, IGNORED)
    return labels


def document_starts(documents: torch.LongTensor) -> torch.BoolTensor:
    """Which tokens are the first of their document, `(..., length)`."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return starts


def positions_in_documents(documents: torch.LongTensor) -> torch.LongTensor:
    """Positions that start again at 0 with each packed document, `(..., length)`."""
    index = torch.arange(documents.shape[-1], device=documents.device)
    return index - torch.where(document_starts(documents), index, 0).cummax(dim=-1).values


def split_documents(tokens: torch.LongTensor, documents: torch.LongTensor) -> list[torch.LongTensor]:
    """The tokens `(length,)` of each document by themselves, in their order."""
    starts = document_starts(documents).nonzero()[:, 0].tolist()
    return [tokens[start:end] for start, end in pairwise([*starts, len(tokens)])]


def documents_of(batch: dict[str, torch.Tensor]) -> torch.LongTensor:
    """The document of each token that the target reads, `(batch, length)`; `PADDING` for padding.

    The batch has an `attention_mask`, and `document_ids` if a row of it is packed.
    """
    return batch["document_ids"] if "document_ids" in batch else torch.where(batch["attention_mask"] > 0, 0, PADDING)


def predicts_supervised(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.BoolTensor:
    """Which positions p have a token p + 1 to be learned, in the same document. `(length,)`."""
    result = torch.zeros_like(labels, dtype=torch.bool)
    result[:-1] = (labels[1:] != IGNORED) & (documents[1:] == documents[:-1])
    return result


def possible_anchors(labels: torch.LongTensor, documents: torch.LongTensor) -> torch.LongTensor:
    """Where a draft can begin: at inference the target writes the first anchor itself, so an anchor lies in the response, and
    has a successor. `(anchors,)`, ascending."""
    return (predicts_supervised(labels, documents) & (labels != IGNORED)).nonzero()[:, 0]


def labels_behind(
    anchors: torch.LongTensor, labels: torch.LongTensor, documents: torch.LongTensor, num_tokens: int
) -> torch.LongTensor:
    """The tokens behind each anchor, `(anchors, num_tokens)`, up to the first that is unsupervised, of another document or
    beyond the end.

    What follows that one is not trained: verification would stop there, since the target never wrote what follows.
    """
    ahead = anchors[:, None] + torch.arange(1, num_tokens + 1)
    found = torch.cat([labels, labels.new_full((num_tokens + 1,), IGNORED)])[ahead]
    document = torch.cat([documents, documents.new_full((num_tokens + 1,), PADDING)])[ahead]
    stops = (found == IGNORED) | (document != documents[anchors][:, None])
    return found.masked_fill(stops.cummax(dim=1).values if len(anchors) else stops, IGNORED)
