"""Token ids that data sets bring: whole numbers that the models have tokens for, or an error before anything is learned."""

from functools import partial
from typing import Any

import torch

from .documents import IGNORED

COLUMNS = ("input_ids", "labels")
ROWS_AT_ONCE = 1000


def check_token_ids(ids: Any, name: str, vocab_size: int | None) -> None:
    """Raise a `ValueError` unless these are token ids, `(length,)`.

    Args:
        ids: what an example has.
        name: of its column; only `labels` may have [`IGNORED`].
        vocab_size: of the models that read them, if it is known.
    """
    try:
        found = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} should be a list of token ids, got {str(ids)[:80]} ({error})") from error
    if found.numel() == 0:
        return
    if found.ndim != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} should be a list of whole numbers, token ids, got {str(ids)[:80]}")
    if name == "labels":
        found = found[found != IGNORED]
    wrong = found[(found < 0) | (found >= vocab_size)] if vocab_size is not None else found[found < 0]
    if len(wrong):
        known = "tokens are numbered from 0" if vocab_size is None else f"the vocabulary has {vocab_size} tokens"
        raise ValueError(
            f"{name} holds {wrong[0].item()}, and {known}: encode the texts with the target's own tokenizer"
        )


def check_tokens(row: dict[str, Any], number: int, vocab_size: int | None) -> dict[str, Any]:
    """The row, the `number`-th of its data set (from 0); a `ValueError` if its tokens are not as [`check_token_ids`] wants."""
    for name in COLUMNS:
        if row.get(name) is None and name != "input_ids":
            # Without labels, all tokens are learned.
            continue
        try:
            check_token_ids(row.get(name), name, vocab_size)
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from error
    return row


def with_checked_tokens(data: Any, columns: list[str], vocab_size: int | None) -> Any:
    """A `Dataset` whose tokens were all looked at, or an `IterableDataset` that looks at them when they are read.

    Raises:
        ValueError: see [`check_token_ids`].
    """
    from datasets import Dataset

    if not isinstance(data, Dataset):
        return data.map(partial(check_tokens, vocab_size=vocab_size), with_indices=True)
    names = [name for name in COLUMNS if name in columns]
    batches = data.select_columns(names).with_format("arrow").iter(ROWS_AT_ONCE)
    for start, table in zip(range(0, len(data), ROWS_AT_ONCE), batches, strict=True):
        if not all(are_token_ids(table.column(name), vocab_size, name == "labels") for name in names):
            # Which example, and what is wrong with it.
            for offset, row in enumerate(table.to_pylist()):
                check_tokens(row, start + offset, vocab_size)
    return data


def are_token_ids(column: Any, vocab_size: int | None, may_be_ignored: bool) -> bool:
    """Whether an Arrow column holds lists of token ids, of labels that [`IGNORED`] is among; `False` may be wrong."""
    import pyarrow
    import pyarrow.compute

    is_list = pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)
    if not is_list or (column.null_count and not may_be_ignored):
        return False
    values = pyarrow.compute.list_flatten(column)
    if not pyarrow.types.is_integer(values.type) or values.null_count:
        return False
    if may_be_ignored:
        values = values.filter(pyarrow.compute.not_equal(values, IGNORED))
    bounds = pyarrow.compute.min_max(values).as_py()
    if bounds["min"] is None:
        return True
    return bounds["min"] >= 0 and (vocab_size is None or bounds["max"] < vocab_size)
