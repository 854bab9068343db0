"""The documents of an example, one or several that are packed: where each begins, and what of it is learned. Pure."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import compress, pairwise, repeat
from typing import Any

import torch

# The label of a token that is not learned, as everywhere in transformers.
IGNORED = -100
# The document of padding, and what stands for a block that is none.
PADDING = -1
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


def has_something_to_learn(example: dict[str, Any], run: int, num_before: int) -> bool:
    """Whether `run` labels follow each other in a document of an example, the last of them after `num_before` of its tokens.

    Args:
        example: its `labels`, `(length,)`, or `input_ids` where there are none, and what it has of [`OPTIONAL`].
        run, num_before: see there.
    """
    labels = example["input_ids"] if example.get("labels") is None else example["labels"]
    real, documents = example.get("attention_mask"), repeat(0)
    if len(labels) == 0 or (real is not None and not any(real)):
        return False
    if any(example.get(name) is not None for name in OPTIONAL):
        _, labels, documents = (part.tolist() for part in checked(example))
    else:
        labels = torch.as_tensor(labels).tolist()
    ended, length, place = None, 0, 0
    for label, document in zip(labels, documents, strict=False):
        if document != ended:
            ended, length, place = document, 0, 0
        length = length + 1 if label != IGNORED else 0
        if length >= run and place >= num_before:
            return True
        place += 1
    return False


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


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Which examples are packed together: longest first, each into the fullest pack that it still fits in (best fit decreasing).

    Args:
        lengths: of the examples.
        max_length: of a pack. An example that is longer has one to itself.

    Returns:
        Indices of the examples, pack by pack, each exactly once; packs and their examples in the order of the examples.
    """
    packs: list[list[int]] = []
    space: list[tuple[int, int]] = []  # what is left of each pack that has some, ascending, and its number
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found = bisect_left(space, (lengths[index], -1))
        left, number = space.pop(found) if found < len(space) else (max_length, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(index)
        if left > lengths[index]:
            insort(space, (left - lengths[index], number))
    return sorted(sorted(indices) for indices in packs)


def packed_examples(batch: dict[str, list[list[int]]], max_length: int) -> dict[str, list[list[int]]]:
    """A batch of a data set with `input_ids` and `labels`, packed; `document_ids` say where one example ends.

    What an `attention_mask` marks as padding is left out, and of an example without labels all tokens are learned.
    """
    texts = batch["input_ids"]
    masks = batch.get("attention_mask", [None] * len(texts))
    labels = [ids if own is None else own for own, ids in zip(batch["labels"], texts, strict=True)]
    examples = {
        name: [[*compress(own, mask)] if mask is not None else own for own, mask in zip(values, masks, strict=True)]
        for name, values in (("input_ids", texts), ("labels", labels))
    }
    if any(len(own) != len(ids) for own, ids in zip(examples["labels"], examples["input_ids"], strict=True)):
        raise ValueError("expected a label for each token of an example")
    packed: dict[str, Any] = {"input_ids": [], "labels": [], "document_ids": []}
    for indices in pack([len(ids) for ids in examples["input_ids"]], max_length):
        for name, own in examples.items():
            packed[name].append([token for index in indices for token in own[index]])
        lengths = [len(examples["input_ids"][index]) for index in indices]
        packed["document_ids"].append([document for document, length in enumerate(lengths) for _ in range(length)])
    return packed
