"""The file of an n-gram model: its layout, how it is written in one piece, and how a damaged one is told."""

import json
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..checkpoints.atomic_files import check_no_file, explained
from ..checkpoints.atomic_folders import writing_folder
from ..checkpoints.config_checks import is_whole
from .pairs import Counts, NgramTable, blocks_of, layout_for, write_pairs

FILE_NAME = "ngram.safetensors"
METADATA_KEY = "hf_pardraft.ngram"
CHECKSUM_KEY = "hf_pardraft.ngram.crc32"
FORMAT = 2
ORDERS = (2, 5)
# A checksum of this much takes a fraction of a second, so smaller files are always checked whole.
CHECKED_BYTES = 1 << 26
SAFETENSORS_NAMES = {"int32": "I32", "int64": "I64"}
ADVICE = "copy, download or build it again"


@dataclass(frozen=True)
class NgramInfo:
    """What a store says about itself.

    Attributes:
        order: length of the longest n-grams.
        vocab_size: token ids are below it.
        num_tokens: tokens that were counted.
        num_ngrams: different n-grams kept, of each length from 1 to `order`.
        code_bits: of a head; see [`NgramTable`].
        min_count: n-grams of two and more tokens that were seen less often were dropped.
        tokenizer_name, tokenizer_hash: of the tokenizer whose ids these are ([`tokenizer_hash`]), if known.
        checksums: CRC-32 of each tensor's bytes.
    """

    order: int
    vocab_size: int
    num_tokens: int
    num_ngrams: list[int]
    code_bits: int
    min_count: int = 1
    tokenizer_name: str | None = None
    tokenizer_hash: str | None = None
    checksums: dict[str, int] = field(default_factory=dict)


def check_order(order: int) -> None:
    """Raise a `ValueError` unless `order` is one that can be counted."""
    if not is_whole(order) or not ORDERS[0] <= order <= ORDERS[1]:
        raise ValueError(
            f"the order of an n-gram model is a whole number from {ORDERS[0]} to {ORDERS[1]}, got {order!r}"
        )


# Writing


def write_store(path: Path, unigrams: np.ndarray, levels: list[Counts], facts: dict) -> NgramInfo:
    """Write a store, in memory that does not grow with it.

    Args:
        path: of the file to make; a temporary folder beside it holds about as much as the file.
        unigrams: `(vocab_size,)`, how often each token was seen.
        levels: of bigrams, trigrams, ...
        facts: the fields of [`NgramInfo`] besides the order and the sizes.

    Raises:
        ValueError: if the keys don't fit the words of a store.
    """
    layout = layout_for(levels, len(unigrams))
    info = NgramInfo(
        order=len(levels) + 1,
        vocab_size=len(unigrams),
        num_ngrams=[int(np.count_nonzero(unigrams)), *(len(level.keys) for level in levels)],
        code_bits=layout.code_bits,
        **facts,
    )
    with tempfile.TemporaryDirectory(prefix="pairs-", dir=path.parent) as folder:
        heads, rests = write_pairs(levels, layout, len(unigrams), Path(folder))
        tensors = {"heads": heads, "rests": rests, "values": narrowed(layout.values), "unigrams": narrowed(unigrams)}
        # Wide tensors first: then every one begins at a multiple of its own width.
        names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        return _write_tensors(path, {name: tensors[name] for name in names}, info)


def narrowed(array: np.ndarray) -> np.ndarray:
    """The array, none of which is negative, in the narrowest of the dtypes that a store has."""
    return array.astype(np.int32 if array.max(initial=0) <= np.iinfo(np.int32).max else np.int64)


def _write_tensors(path: Path, tensors: dict[str, np.ndarray], info: NgramInfo) -> NgramInfo:
    """Write a safetensors file, block by block; the checksums are filled in when all is written."""
    sizes = {name: (array.dtype, len(array)) for name, array in tensors.items()}
    checksums = dict.fromkeys(tensors, 0)
    with open(path, "wb") as file:
        file.write(_header(sizes, info, checksums))
        for name, array in tensors.items():
            for block in blocks_of(len(array)):
                checksums[name] = zlib.crc32(array[block].data, checksums[name])
                file.write(array[block].data)
        file.seek(0)
        file.write(_header(sizes, info, checksums))
        file.flush()
        os.fsync(file.fileno())
    return replace(info, checksums=checksums)


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


def place_store(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write a store, in a temporary folder first: `folder` gets a whole one or none.

    Raises:
        OSError: if somebody else writes the folder, or there is no room.
    """
    kept = "nothing was written, and what was there before is as it was. Make room, or choose another folder"
    with (
        writing_folder(folder),
        explained(folder / FILE_NAME, kept),
        tempfile.TemporaryDirectory(prefix=".ngram-", dir=folder) as workspace,
    ):
        written = Path(workspace) / FILE_NAME
        make(written)
        written.replace(folder / FILE_NAME)


def check_no_store(folder: Path, overwrite: bool) -> None:
    """Raise a `FileExistsError` if `folder` is a file, or holds a store that may not be lost (`overwrite`)."""
    check_no_file(folder)
    if (folder / FILE_NAME).exists() and not overwrite:
        raise FileExistsError(
            f"{folder} holds an n-gram model: choose another folder, or pass --overwrite to replace it"
        )


# Reading


def read_store(path: str | Path, verify: bool | None = None) -> tuple[NgramInfo, NgramTable]:
    """A store as memory-mapped tensors.

    Args:
        path: of the file.
        verify: whether to compare every byte with its checksum; by default in files of up to 64 MB, since it reads them
            whole.

    Returns:
        What it says about itself, and its tensors.

    Raises:
        ValueError: if it is no n-gram store, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {ADVICE}") from error
    if METADATA_KEY not in metadata:
        raise ValueError(f"{path} holds no n-gram model: expected a file that NgramModel.save_pretrained wrote")
    info = _read_info(path, metadata[METADATA_KEY], metadata.get(CHECKSUM_KEY))
    _check_tensors(path, info, tensors)
    if verify or (verify is None and os.path.getsize(path) <= CHECKED_BYTES):
        check_sums(path, info, tensors)
    return info, NgramTable(**tensors, code_bits=info.code_bits)


def _read_info(path: str | Path, text: str, checksum: str | None) -> NgramInfo:
    if checksum != f"{zlib.crc32(text.encode()):08x}":
        raise ValueError(f"{path} is damaged (its description): {ADVICE}")
    try:
        facts = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise ValueError(
                f"{path} is of another format than this version reads ({FORMAT}): update hf-pardraft, or build it again"
            )
        facts["checksums"] = {name: int(crc, 16) for name, crc in facts["checksums"].items()}
        info = NgramInfo(**facts)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged (its description: {error}): {ADVICE}") from error
    check_order(info.order)
    return info


def _check_tensors(path: str | Path, info: NgramInfo, tensors: dict[str, torch.Tensor]) -> None:
    """Raise a `ValueError` unless the tensors are those that the description speaks of."""
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    num_pairs = sizes.get("heads", (0,))[0]
    num_ngrams = sum(info.num_ngrams[1:])
    expected = {
        "heads": (num_pairs,),
        "rests": (num_pairs,),
        "values": sizes.get("values"),
        "unigrams": (info.vocab_size,),
    }
    if sizes != expected or not num_ngrams / 2 <= num_pairs - 1 <= num_ngrams:
        raise ValueError(
            f"{path} is damaged: its description speaks of {num_ngrams} n-grams, and its tensors have the sizes {sizes}: {ADVICE}"
        )
    if not 1 <= len(tensors["values"]) <= (1 << info.code_bits) + 1:
        raise ValueError(f"{path} is damaged: its codes have not {info.code_bits} bits: {ADVICE}")
    wrong = {str(tensor.dtype) for tensor in tensors.values()} - {"torch.int32", "torch.int64"}
    if wrong:
        raise ValueError(f"{path} is damaged: it holds {', '.join(wrong)} and no integers: {ADVICE}")


def check_sums(path: str | Path, info: NgramInfo, tensors: dict[str, torch.Tensor]) -> None:
    """Raise a `ValueError` unless every tensor has the bytes that were written."""
    for name, tensor in tensors.items():
        checksum = 0
        for block in blocks_of(len(tensor)):
            checksum = zlib.crc32(tensor[block].numpy().data, checksum)
        if checksum != info.checksums.get(name):
            raise ValueError(f"{path} is damaged: {name} has other bytes than were written: {ADVICE}")
