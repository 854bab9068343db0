"""Packing: several short examples in one row, so that less of a batch is padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import compress
from typing import Any


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Which examples share a row: longest first, each into the fullest row that it still fits in (best fit decreasing).

    Args:
        lengths: of the examples.
        max_length: of a row. An example that is longer has a row to itself.

    Returns:
        Indices of the examples, row by row, each exactly once; rows and their examples in the order of the examples.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # what is left of each row that has some, ascending, and its number
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = bisect_left(space, (lengths[index], -1))
        left, row = space.pop(slot) if slot < len(space) else (max_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if left > lengths[index]:
            insort(space, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def packed_examples(batch: dict[str, list[list[int]]], max_length: int) -> dict[str, list[list[int]]]:
    """A batch of a data set with `input_ids` and `labels`, packed; `document_ids` say where one example ends.

    What an `attention_mask` marks as padding is left out, and of an example without labels all tokens are learned.
    """
    packed: dict[str, Any] = {"input_ids": [], "labels": [], "document_ids": []}
    rows, masks = batch["input_ids"], batch.get("attention_mask", [None] * len(batch["input_ids"]))
    labels = [ids if own is None else own for own, ids in zip(batch["labels"], rows, strict=True)]
    batch = {
        name: [list(compress(row, mask)) if mask is not None else row for row, mask in zip(values, masks, strict=True)]
        for name, values in (("input_ids", rows), ("labels", labels))
    }
    for row in pack([len(ids) for ids in batch["input_ids"]], max_length):
        for name in ("input_ids", "labels"):
            packed[name].append([token for index in row for token in batch[name][index]])
        packed["document_ids"].append(
            [document for document, index in enumerate(row) for _ in batch["input_ids"][index]]
        )
    return packed
