"""Where the text of an n-gram model comes from: files and data sets, as documents of token ids."""

import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..user_input.data import check_json_files, reading_data
from ..user_input.files import not_utf8

# Characters of a file that are read, and texts that are tokenised, at once. A fast tokenizer works on them in parallel.
PIECE_CHARACTERS = 1 << 20
TEXTS_PER_BATCH = 256


def token_documents(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, add_end_token: bool = False
) -> Iterator[list[int]]:
    """The ids of each text, without special tokens but, if asked for, the one that ends a text.

    Raises:
        ValueError: if there is no such token, an item is no text, or all of them together are empty.
    """
    end = [tokenizer.eos_token_id] if add_end_token else []
    if add_end_token and tokenizer.eos_token_id is None:
        raise ValueError("add_end_token needs a tokenizer with an eos_token, and this one has none: leave it out")
    return _token_documents(texts, tokenizer, end)


def _token_documents(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, end: list[int]) -> Iterator[list[int]]:
    texts, is_empty = iter(texts), True
    while batch := list(itertools.islice(texts, TEXTS_PER_BATCH)):
        wrong = [text for text in batch if not isinstance(text, str)]
        if wrong:
            raise ValueError(f"expected texts, got {type(wrong[0]).__name__}: name the column that holds the text")
        # Long documents are wanted whole, so the warning about a model's longest input has no place here.
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        is_empty = is_empty and not any(encoded["input_ids"])
        yield from (ids + end for ids in encoded["input_ids"])
    if is_empty:
        raise ValueError("there is nothing to count: the text is empty. Name another file, data set, split or column")


def texts_of_files(paths: Iterable[str | Path], separator: str | None = None) -> Iterator[str]:
    """The documents of text files (UTF-8), in memory of a few MB as long as no document is longer.

    Args:
        paths: of the files.
        separator: what stands between two documents, such as a blank line or "<|endoftext|>". Without one a file is one
            document; longer ones are cut at the end of a line about every million characters, and lose the n-grams there.

    Raises:
        OSError: if one can't be read.
        ValueError: if one is no UTF-8.
    """
    for path in paths:
        with open(path, encoding="utf-8") as file:
            try:
                yield from _separated(file, separator) if separator else _cut_at_lines(file)
            except UnicodeDecodeError as error:
                raise ValueError(not_utf8(path, error)) from error


def _separated(file: Any, separator: str) -> Iterator[str]:
    rest = ""
    while piece := file.read(PIECE_CHARACTERS):
        *documents, rest = (rest + piece).split(separator)
        yield from (document for document in documents if document)
    if rest:
        yield rest


def _cut_at_lines(file: Any) -> Iterator[str]:
    while lines := file.readlines(PIECE_CHARACTERS):
        yield "".join(lines)


def texts_of_dataset(name_or_path: str, config: str | None, split: str, column: str) -> Iterator[str]:
    """The texts of a data set, streamed.

    Args:
        name_or_path: on the Hub, or a folder, or a .json(l), .csv or .parquet file.
        config: of the data set, if it has several.
        split: of it, "train" for a file.
        column: that holds the text.

    Raises:
        ImportError: without the `datasets` package.
        OSError, ValueError: if there is no such data set or column, or it can't be read.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ImportError('reading data sets needs the datasets package: pip install "hf-pardraft[train]"')
    from datasets import load_dataset

    kind = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(name_or_path).suffix)
    is_file = bool(kind) and Path(name_or_path).is_file()
    check_json_files([Path(name_or_path)] if is_file else [])
    with reading_data(name_or_path):
        if is_file:
            rows = iter(load_dataset(kind, data_files=name_or_path, split=split, streaming=True))
        else:
            rows = iter(load_dataset(name_or_path, config, split=split, streaming=True))
    while True:
        with reading_data(name_or_path):
            row = next(rows, None)
        if row is None:
            return
        if column not in row:
            raise ValueError(f"the data set has no column {column!r}: it has {', '.join(row)}")
        yield row[column]
