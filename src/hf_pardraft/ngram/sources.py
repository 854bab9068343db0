"""What an n-gram model counts: files and data sets as documents of token ids, and documents as chunks."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..user_input.conversations import are_messages
from ..user_input.data import load_data, reading_data
from ..user_input.files import not_utf8

# Characters of a file that are read, and texts that are tokenised, at once. A fast tokenizer works on them in parallel.
PIECE_CHARACTERS = 1 << 20
TEXTS_PER_BATCH = 256
# Of a data set, those that hold its text, by default the first that there is; `pardraft regenerate` writes the latter two.
COLUMNS = ("text", "messages", "completion")


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
        # Without the byte order mark that some editors begin a file with.
        with open(path, encoding="utf-8-sig") as file:
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


def texts_of_dataset(name_or_path: str, config: str | None, split: str, column: str | None = None) -> Iterator[str]:
    """The texts of a data set, streamed; of conversations the answers, which are what a target writes.

    Args:
        name_or_path, config, split: as [`load_data`] takes them.
        column: that holds texts, or conversations as lists of messages; by default the first of
            [`COLUMNS`] that a row has.

    Raises:
        ImportError: without the `datasets` package.
        OSError, ValueError: if there is no such data set or column, or it can't be read.
    """
    examples = iter(load_data(name_or_path, config, split, streaming=True))
    while True:
        with reading_data(name_or_path):
            example = next(examples, None)
        if example is None:
            return
        names = (column,) if column else COLUMNS
        name = next((each for each in names if each in example), None)
        if name is None:
            raise ValueError(
                f"the data set has no column {' or '.join(map(repr, names))}: it has {', '.join(example)}. Name the column to "
                "count"
            )
        yield from texts_in(example[name])


def texts_in(value: Any) -> list[Any]:
    """What is to be counted of a column's value: the answers of a conversation, and anything else as it is."""
    if are_messages(value):
        return [message.get("content") for message in value if message["role"] == "assistant"]
    return [value]


# Chunks: pieces of ids that are counted at once


@dataclass(frozen=True)
class Chunk:
    """A piece of the stream to be counted.

    Attributes:
        shifted: int32, ids plus 1, and 0 after every document, often enough that no n-gram reaches into the next.
        num_windows: the n-grams that begin at the first so many places are this chunk's.
        num_tokens: ids among them.
    """

    shifted: np.ndarray
    num_windows: int
    num_tokens: int


def as_ids(document: Any) -> np.ndarray:
    """A document's ids as a one-dimensional array of integers.

    Raises:
        ValueError: if it is none.
    """
    ids = np.asarray(document.cpu() if isinstance(document, torch.Tensor) else document)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"a document is a one-dimensional sequence of token ids, got {ids.ndim} dimensions of {ids.dtype}: pass ids, as "
            "a tokenizer gives them for one text, and of a data set's rows its column (row['input_ids'])"
        )
    return ids


def shifted_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(
            f"token id {wrong} is not in a vocabulary of {vocab_size}: pass the vocab_size (or tokenizer) of these ids"
        )
    return (ids + 1).astype(np.int32)


def chunks_of(stream: Iterable[Any], vocab_size: int, order: int, num_tokens: int) -> Iterator[Chunk]:
    """The whole stream as chunks.

    Args:
        stream: documents, one document, or its ids one by one.
        vocab_size: ids are below it.
        order: length of the n-grams to be counted.
        num_tokens: about as many ids go into a chunk.

    Raises:
        ValueError: for a document that holds no ids, or an id beyond the vocabulary.
    """
    if isinstance(stream, (np.ndarray, torch.Tensor)) and stream.ndim == 1 and stream.dtype != object:
        return document_chunks(iter([stream]), vocab_size, order - 1, num_tokens)
    items = iter(stream)
    first = next(items, None)
    if first is None:
        return iter(())
    items = itertools.chain([first], items)
    is_id = isinstance(first, (int, np.integer)) or (isinstance(first, torch.Tensor) and first.ndim == 0)
    make = id_chunks if is_id else document_chunks
    return make(items, vocab_size, order - 1, num_tokens)


def document_chunks(documents: Iterator[Any], vocab_size: int, reach: int, capacity: int) -> Iterator[Chunk]:
    """Chunks of documents. Where one has to be cut, its first part sees `reach` tokens of the next."""
    end = np.zeros(reach, dtype=np.int32)
    parts, filled, num_tokens = [], 0, 0
    for document in documents:
        shifted = shifted_ids(as_ids(document), vocab_size)
        while filled + len(shifted) >= capacity:
            taken = capacity - filled
            parts += [shifted[: taken + reach], end]
            yield Chunk(np.concatenate(parts), capacity, num_tokens + taken)
            shifted = shifted[taken:]
            parts, filled, num_tokens = [], 0, 0
        # Where the end marks alone would overfill it, the chunk is done.
        if filled + len(shifted) + reach >= capacity:
            yield Chunk(np.concatenate([*parts, shifted, end]), filled + len(shifted), num_tokens + len(shifted))
            parts, filled, num_tokens = [], 0, 0
        elif len(shifted):
            parts += [shifted, end]
            filled, num_tokens = filled + len(shifted) + reach, num_tokens + len(shifted)
    if num_tokens:
        yield Chunk(np.concatenate(parts), filled - reach, num_tokens)


def id_chunks(ids: Iterator[Any], vocab_size: int, reach: int, capacity: int) -> Iterator[Chunk]:
    """Chunks of one long document whose ids come one by one."""
    tail = np.empty(0, dtype=np.int32)
    while len(piece := np.fromiter(itertools.islice(ids, capacity), dtype=np.int64)):
        joined = np.concatenate([tail, shifted_ids(piece, vocab_size)])
        num_windows = max(0, len(joined) - reach)
        yield Chunk(joined, num_windows, num_windows)
        tail = joined[num_windows:]
    yield Chunk(np.concatenate([tail, np.zeros(reach, dtype=np.int32)]), len(tail), len(tail))
