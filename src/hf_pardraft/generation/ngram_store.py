"""The file of an n-gram model: its layout, how it is written in one piece, and how a damaged one is told."""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

FILE_NAME = "ngram.safetensors"
METADATA_KEY = "hf_pardraft.ngram"
CHECKSUM_KEY = "hf_pardraft.ngram.crc32"
FORMAT = 1
ORDERS = (2, 5)
# Entries that are handled at once while writing and checking: half a MB for each array of them.
BLOCK = 1 << 16
# A checksum of this much takes a fraction of a second, so smaller files are always checked whole.
CHECKED_BYTES = 1 << 26
SAFETENSORS_NAMES = {"int32": "I32", "int64": "I64"}


@dataclass(frozen=True)
class NgramInfo:
    """What a store says about itself.

    Attributes:
        order: length of the longest n-grams.
        vocab_size: token ids are below it.
        num_tokens: tokens that were counted.
        num_ngrams: different n-grams kept, of each length from 1 to `order`.
        count_bits: bits of a word that hold the count, for each length from 2.
        min_count: n-grams of two and more tokens that were seen less often were dropped.
        tokenizer_name, tokenizer_hash: of the tokenizer whose ids these are ([`tokenizer_hash`]), if known.
        checksums: CRC-32 of each tensor's bytes.
    """

    order: int
    vocab_size: int
    num_tokens: int
    num_ngrams: list[int]
    count_bits: list[int]
    min_count: int = 1
    tokenizer_name: str | None = None
    tokenizer_hash: str | None = None
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """The n-grams of one length, on their way to a file.

    Attributes:
        keys: int64, ascending: `parent * (vocab_size + 1) + token`, where `parent` is the place of the n-gram without its
            last token among those one token shorter (for bigrams: that token).
        counts: int64, how often each was seen.
    """

    keys: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Level:
    """The n-grams of one length as a model reads them: one sorted word each.

    A word is `key << count_bits | code` with the key of [`Counts`]. The code is the count; all ones stand for a larger
    count, to be found in the table beside. One word above all keys ends the list, so that every search ends on a word.
    Words are 32 bits wide where that is enough.

    Attributes:
        words: `(n-grams + 1,)`, ascending.
        large_places, large_counts: `(large,)`, which words have a larger count, and that count.
        count_bits: how many.
    """

    words: torch.Tensor
    large_places: torch.Tensor
    large_counts: torch.Tensor
    count_bits: int


def check_order(order: int) -> None:
    """Raise a `ValueError` unless `order` is one that can be counted."""
    if isinstance(order, bool) or not isinstance(order, int) or not ORDERS[0] <= order <= ORDERS[1]:
        raise ValueError(
            f"the order of an n-gram model is a whole number from {ORDERS[0]} to {ORDERS[1]}, got {order!r}"
        )


def blocks_of(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


# Writing


@dataclass(frozen=True)
class WordLayout:
    """How the words of a level are cut: their dtype, bits for the count, and entries whose count does not fit."""

    dtype: np.dtype
    count_bits: int
    num_large: int

    @property
    def escape(self) -> int:
        return (1 << self.count_bits) - 1


def narrowest_layout(counts: np.ndarray, num_parents: int, vocab_size: int) -> WordLayout:
    """The layout of a level that takes the fewest bytes.

    Args:
        counts: of the level.
        num_parents: n-grams one token shorter (for bigrams: the vocabulary).
        vocab_size: of the tokens.

    Raises:
        ValueError: if the keys don't fit 62 bits.
    """
    # One parent and one token that don't exist must have a key too, below that of the last word: a search may ask for them.
    key_bits = ((num_parents + 1) * (vocab_size + 1)).bit_length()
    if key_bits > 62:
        raise ValueError(
            f"{num_parents} contexts x {vocab_size} tokens need keys of {key_bits} bits, and a store holds 62: count less "
            "text, or a lower order"
        )
    escapes = (1 << np.arange(1, 63, dtype=np.int64)) - 1
    reached = np.zeros(len(escapes) + 1, dtype=np.int64)
    for block in blocks_of(len(counts)):
        reached += np.bincount(np.searchsorted(escapes, counts[block], side="right"), minlength=len(reached))
    num_large = {bits: int(reached[bits:].sum()) for bits in range(1, 63)}
    layouts = [
        WordLayout(dtype, 8 * dtype.itemsize - 1 - key_bits, num_large[8 * dtype.itemsize - 1 - key_bits])
        for dtype in (np.dtype(np.int32), np.dtype(np.int64))
        if 8 * dtype.itemsize - 1 - key_bits >= 1
    ]
    return min(layouts, key=lambda layout: layout.dtype.itemsize * len(counts) + 16 * layout.num_large)


def words_of(level: Counts, layout: WordLayout) -> Iterator[np.ndarray]:
    """The words of a level, block by block, and the word that ends it."""
    for block in blocks_of(len(level.keys)):
        words = (level.keys[block] << layout.count_bits) | np.minimum(level.counts[block], layout.escape)
        yield words.astype(layout.dtype)
    yield np.array([np.iinfo(layout.dtype).max], dtype=layout.dtype)


def large_entries(level: Counts, layout: WordLayout) -> tuple[np.ndarray, np.ndarray]:
    """Places and counts of the entries whose count does not fit a word."""
    places = np.empty(layout.num_large, dtype=narrow_dtype(len(level.keys)))
    filled = 0
    for block in blocks_of(len(level.keys)):
        found = np.flatnonzero(level.counts[block] >= layout.escape) + block.start
        places[filled : filled + len(found)] = found
        filled += len(found)
    counts = level.counts[places]
    return places, counts.astype(narrow_dtype(int(counts.max(initial=0))))


def narrow_dtype(largest: int) -> np.dtype:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def write_store(path: Path, unigrams: np.ndarray, levels: list[Counts], facts: dict) -> NgramInfo:
    """Write a store, in memory that does not grow with it.

    Args:
        path: of the file to make.
        unigrams: `(vocab_size,)`, how often each token was seen.
        levels: of bigrams, trigrams, ...
        facts: the fields of [`NgramInfo`] besides the order and the sizes.
    """
    num_parents = [len(unigrams), *(len(level.keys) for level in levels)]
    layouts = [
        narrowest_layout(level.counts, parents, len(unigrams))
        for level, parents in zip(levels, num_parents, strict=False)
    ]
    tensors: dict[str, tuple[np.dtype, int]] = {}
    parts: dict[str, Iterator[np.ndarray]] = {}

    def add(name: str, dtype: np.dtype, size: int, arrays: Iterator[np.ndarray]) -> None:
        tensors[name], parts[name] = (dtype, size), arrays

    unigrams = unigrams.astype(narrow_dtype(int(unigrams.max(initial=0))))
    add("unigrams", unigrams.dtype, len(unigrams), iter([unigrams]))
    for length, (level, layout) in enumerate(zip(levels, layouts, strict=True), start=2):
        places, counts = large_entries(level, layout)
        add(f"{length}.words", layout.dtype, len(level.keys) + 1, words_of(level, layout))
        add(f"{length}.large_places", places.dtype, len(places), iter([places]))
        add(f"{length}.large_counts", counts.dtype, len(counts), iter([counts]))
    info = NgramInfo(
        order=len(levels) + 1,
        vocab_size=len(unigrams),
        num_ngrams=[int(np.count_nonzero(unigrams)), *(len(level.keys) for level in levels)],
        count_bits=[layout.count_bits for layout in layouts],
        **facts,
    )
    # Wide tensors first: then every one begins at a multiple of its own width.
    names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    return _write_tensors(path, {name: tensors[name] for name in names}, parts, info)


def _write_tensors(
    path: Path, tensors: dict[str, tuple[np.dtype, int]], parts: dict[str, Iterator[np.ndarray]], info: NgramInfo
) -> NgramInfo:
    """Write a safetensors file from arrays that come in parts; the checksums are filled in when all have come."""
    checksums = dict.fromkeys(tensors, 0)
    with open(path, "wb") as file:
        file.write(_header(tensors, info, checksums))
        for name in tensors:
            for array in parts[name]:
                checksums[name] = zlib.crc32(array.data, checksums[name])
                file.write(array.data)
        file.seek(0)
        file.write(_header(tensors, info, checksums))
        file.flush()
        os.fsync(file.fileno())
    return NgramInfo(**{**asdict(info), "checksums": checksums})


def _header(tensors: dict[str, tuple[np.dtype, int]], info: NgramInfo, checksums: dict[str, int]) -> bytes:
    """The head of a safetensors file, of the same length whatever the checksums."""
    entries, end = {}, 0
    for name, (dtype, size) in tensors.items():
        start, end = end, end + dtype.itemsize * size
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype.name], "shape": [size], "data_offsets": [start, end]}
    facts = {"format": FORMAT, **asdict(info), "checksums": {name: f"{crc:08x}" for name, crc in checksums.items()}}
    text = json.dumps(facts)
    metadata = {METADATA_KEY: text, CHECKSUM_KEY: f"{zlib.crc32(text.encode()):08x}"}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


# Reading


def read_store(path: str | Path, verify: bool | None = None) -> tuple[NgramInfo, torch.Tensor, list[Level]]:
    """A store as memory-mapped tensors.

    Args:
        path: of the file.
        verify: whether to compare every byte with its checksum; by default in files of up to 64 MB, since it reads them
            whole.

    Returns:
        What it says about itself, the counts of the tokens `(vocab_size,)`, and the levels from bigrams on.

    Raises:
        ValueError: if it is no n-gram store, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): copy, download or build it again") from error
    if METADATA_KEY not in metadata:
        raise ValueError(f"{path} holds no n-gram model: expected a file that NgramModel.save_pretrained wrote")
    info = _read_info(path, metadata[METADATA_KEY], metadata.get(CHECKSUM_KEY))
    _check_tensors(path, info, tensors)
    if verify or (verify is None and os.path.getsize(path) <= CHECKED_BYTES):
        check_sums(path, info, tensors)
    levels = [
        Level(tensors[f"{n}.words"], tensors[f"{n}.large_places"], tensors[f"{n}.large_counts"], bits)
        for n, bits in enumerate(info.count_bits, start=2)
    ]
    return info, tensors["unigrams"], levels


def _read_info(path: str | Path, text: str, checksum: str | None) -> NgramInfo:
    if checksum != f"{zlib.crc32(text.encode()):08x}":
        raise ValueError(f"{path} is damaged (its description): copy, download or build it again")
    try:
        facts = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise ValueError(f"{path} is of another format than this version reads ({FORMAT}): update hf-pardraft")
        facts["checksums"] = {name: int(crc, 16) for name, crc in facts["checksums"].items()}
        info = NgramInfo(**facts)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged (its description: {error}): copy, download or build it again") from error
    check_order(info.order)
    return info


def _check_tensors(path: str | Path, info: NgramInfo, tensors: dict[str, torch.Tensor]) -> None:
    """Raise a `ValueError` unless the tensors are those that the description speaks of."""
    expected = {"unigrams": info.vocab_size}
    for n in range(2, info.order + 1):
        expected[f"{n}.words"] = info.num_ngrams[n - 1] + 1
        for name in ("large_places", "large_counts"):
            found = tensors.get(f"{n}.large_places")
            expected[f"{n}.{name}"] = 0 if found is None else len(found)
    found = {name: len(tensor) for name, tensor in tensors.items()}
    if found != expected or len(info.count_bits) != info.order - 1:
        raise ValueError(
            f"{path} is damaged: its description speaks of tensors {expected}, and it holds {found}: copy, download or "
            "build it again"
        )
    wrong = {str(tensor.dtype) for tensor in tensors.values()} - {"torch.int32", "torch.int64"}
    if wrong:
        raise ValueError(
            f"{path} is damaged: it holds {', '.join(wrong)} and no integers: copy, download or build it again"
        )
    for n in range(2, info.order + 1):
        words = tensors[f"{n}.words"]
        if words[-1] != torch.iinfo(words.dtype).max:
            raise ValueError(
                f"{path} is damaged: the {n}-grams don't end as they should: copy, download or build it again"
            )


def check_sums(path: str | Path, info: NgramInfo, tensors: dict[str, torch.Tensor]) -> None:
    """Raise a `ValueError` unless every tensor has the bytes that were written."""
    for name, tensor in tensors.items():
        checksum = 0
        for block in blocks_of(len(tensor)):
            checksum = zlib.crc32(tensor[block].numpy().data, checksum)
        if checksum != info.checksums.get(name):
            raise ValueError(
                f"{path} is damaged: {name} has other bytes than were written: copy, download or build it again"
            )
