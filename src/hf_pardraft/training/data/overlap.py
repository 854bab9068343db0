"""Training examples that hold a long run of a test set's words, which would be known by heart there, are left out."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...user_input.copies import copies_of
from ...user_input.data import file_kind, load_data
from .sources import first_row

logger = logging.get_logger(__name__)

WORD = re.compile(r"\w+")
# Words in a row (arXiv 2606.02091, section A.5).
RUN_LENGTH = 32


def load_test_set(source: str) -> Any:
    """A file or folder, or of a data set on the Hub the part that is called test."""
    path = Path(source)
    return load_data(source, split="train" if file_kind(path) or path.exists() else "test")


def strings_in(value: Any) -> Iterator[str]:
    """All texts of a row, those of its messages among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings_in(part)


def runs_of_words(row: dict[str, Any], length: int) -> set[tuple[str, ...]]:
    """All runs of so many words within a text of a row, in lower case and without what stands between them."""
    runs: set[tuple[str, ...]] = set()
    for text in strings_in(row):
        words = WORD.findall(text.lower())
        runs.update(zip(*(words[start:] for start in range(length)), strict=False))
    return runs


def without_overlap(data: Any, test_sets: Iterable[Iterable[dict[str, Any]]]) -> Any:
    """The rows that share no run of [`RUN_LENGTH`] words with any row of the test sets.

    Args:
        data: a `datasets` data set, or rows in memory, with texts.
        test_sets: rows with texts, each.

    Raises:
        ValueError: if the data has token ids alone, the test sets have no run as long, or nothing is left.
    """
    if next(strings_in(first_row(data)), None) is None:
        raise ValueError(
            "expected rows with texts, got token ids alone, in which no words can be found: prepare them from texts, or leave "
            "--exclude-overlap out"
        )
    known = set().union(*(runs_of_words(row, RUN_LENGTH) for rows in test_sets for row in rows))
    if not known:
        raise ValueError(f"expected test sets with texts of {RUN_LENGTH} words and more, got none: name other ones")

    def is_kept(row: dict[str, Any]) -> bool:
        return known.isdisjoint(runs_of_words(row, RUN_LENGTH))

    if isinstance(data, list | tuple):
        kept = [*filter(is_kept, data)]
    else:
        with copies_of(data):
            kept = data.filter(is_kept)
    if hasattr(data, "__len__"):
        if not len(kept):
            raise ValueError(
                f"all {len(data)} examples share {RUN_LENGTH} words in a row with the test sets: name other ones"
            )
        logger.warning(
            "%d of %d examples share %d words in a row with test sets", len(data) - len(kept), len(data), RUN_LENGTH
        )
    return kept
