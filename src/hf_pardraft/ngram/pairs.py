"""How an n-gram model packs its n-grams: two to a pair of 12 bytes, sorted, so that one search finds n-grams of all lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .counting import ArrayFile, mapped

# Entries that are handled at once while writing and checking: half a MB for each array of them.
BLOCK = 1 << 16
# Of the code in a rest. More would leave less room for the distance; n-grams with rarer counts are heads.
MOST_REST_BITS = 8
NO_REST = np.iinfo(np.int32).min
# Distances of keys that a rest has room for, whatever the codes.
REST_DISTANCE_BITS = 30


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
class NgramTable:
    """The n-grams of all lengths from 2 on, as a model reads them: one sorted list of pairs.

    An n-gram's slot is its number: tokens come first, [`slots_before`] of them, then two to a pair. Its key is
    `slot * (vocab_size + 1) + token`, from the slot of the n-gram without its last token and that token. Keys ascend, shorter
    n-grams first. Its code is the place of its count among `values`; code 0 is nothing, and so is the code `1 << rest_bits`.

    A pair's first n-gram is its head, `key << code_bits | (all ones - code)`. Its second one, whose code is below
    `1 << rest_bits` and whose key is not far, is its rest: `((key - first key) << rest_bits) - code`, to which the highest
    `rest_bits` bits of the first one's code are added, since they are there when the difference to a head is shifted. Where
    there is none, the rest is [`NO_REST`].

    Attributes:
        heads: `(pairs,)`, ascending; the one in front is no n-gram. 32 bits wide where that is enough, else 64.
        rests: `(pairs,)`, 32 bits wide.
        values: `(codes,)`, what the codes stand for.
        unigrams: `(vocab_size,)`, the counts of the tokens.
        code_bits: of a head.
    """

    heads: torch.Tensor
    rests: torch.Tensor
    values: torch.Tensor
    unigrams: torch.Tensor
    code_bits: int

    @property
    def rest_bits(self) -> int:
        return rest_bits_of(self.code_bits)

    def to(self, device: torch.device | str) -> "NgramTable":
        tensors = (self.heads, self.rests, self.values, self.unigrams)
        return NgramTable(*(tensor.to(device) for tensor in tensors), self.code_bits)


def rest_bits_of(code_bits: int) -> int:
    """Bits for the code of a pair's second n-gram; the others are for how far its key is."""
    return min(MOST_REST_BITS, code_bits)


def slots_before(vocab_size: int) -> int:
    """The slots of tokens: of all there are, and of one that was never seen."""
    return vocab_size + 1


def blocks_of(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


@dataclass(frozen=True)
class PairLayout:
    """How the n-grams of a store are packed.

    Attributes:
        values: int64, what the codes stand for; ascending but for the two that stand for nothing.
        code_bits: of a head.
        dtype: of the heads.
    """

    values: np.ndarray
    code_bits: int
    dtype: np.dtype

    @property
    def rest_bits(self) -> int:
        return rest_bits_of(self.code_bits)

    def codes_of(self, counts: np.ndarray) -> np.ndarray:
        """The codes of counts that occur."""
        codes = np.searchsorted(self.values[: 1 << self.rest_bits], counts)
        is_rare = codes >> self.rest_bits != 0
        # The place where the rare ones begin stands for nothing.
        codes[is_rare] += 1 + np.searchsorted(self.values[(1 << self.rest_bits) + 1 :], counts[is_rare])
        return codes


def layout_for(levels: list[Counts], vocab_size: int) -> PairLayout:
    """The layout for n-grams of these lengths and counts.

    Raises:
        ValueError: if their keys need more than 62 bits with the codes.
    """
    occurring = [np.unique(level.counts[block]) for level in levels for block in blocks_of(len(level.counts))]
    distinct = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *occurring]))
    frequent, rare = distinct[: 1 << MOST_REST_BITS], distinct[1 << MOST_REST_BITS :]
    values = np.concatenate([frequent, [0], rare]) if len(rare) else frequent
    code_bits = max(1, (len(values) - 1).bit_length())
    num_slots = slots_before(vocab_size) + 2 * (sum(len(level.keys) for level in levels) + 1)
    # The last slot is one after all others, and the last key that of a token which was never seen.
    key_bits = ((num_slots + 1) * (vocab_size + 1)).bit_length()
    if key_bits + code_bits > 62:
        raise ValueError(
            f"{num_slots} n-grams x {vocab_size} tokens with {len(distinct) - 1} different counts need {key_bits + code_bits} "
            "bits each, and a store has 62: count less text, or a lower order"
        )
    return PairLayout(values, code_bits, np.dtype(np.int32 if key_bits + code_bits <= 31 else np.int64))


class PairWriter:
    """Packs ascending n-grams, block by block.

    Args:
        folder: for the two files.
        layout: how to pack.
        vocab_size: of the tokens.
    """

    def __init__(self, folder: Path, layout: PairLayout, vocab_size: int) -> None:
        self.layout, self.first_slot = layout, slots_before(vocab_size)
        self.heads, self.rests = ArrayFile(folder / "heads"), ArrayFile(folder / "rests")
        # What is in front: key 0, code 0. Its pair is open until a second n-gram comes, and none may.
        self.num_pairs = 0
        no_keys = np.empty(0, dtype=np.int64)
        self.open_key, self.open_code = no_keys, no_keys
        self._write(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool))

    def append(self, keys: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Pack some more n-grams; returns their slots."""
        num_open = len(self.open_key)
        keys, codes = np.concatenate([self.open_key, keys]), np.concatenate([self.open_code, codes])
        # An n-gram can be a rest if it is frequent enough and near the one before. Of several such, every other one is.
        follows = np.zeros(len(keys), dtype=bool)
        follows[1:] = np.diff(keys) < 1 << (REST_DISTANCE_BITS - self.layout.rest_bits)
        follows &= codes >> self.layout.rest_bits == 0
        places = np.arange(len(keys))
        is_rest = (places - np.maximum.accumulate(np.where(follows, 0, places))) % 2 == 1
        slots = self.first_slot + 2 * (self.num_pairs + (~is_rest).cumsum() - 1) + is_rest
        # A head at the end waits for what comes next.
        num_done = len(keys) - (len(keys) > 0 and not is_rest[-1])
        self._write(keys[:num_done], codes[:num_done], is_rest[:num_done])
        self.open_key, self.open_code = keys[num_done:], codes[num_done:]
        return slots[num_open:]

    def _write(self, keys: np.ndarray, codes: np.ndarray, is_rest: np.ndarray) -> None:
        code_bits, rest_bits = self.layout.code_bits, self.layout.rest_bits
        heads, seconds = np.flatnonzero(~is_rest), np.flatnonzero(is_rest)
        words = (keys[heads] << code_bits) + ((1 << code_bits) - 1 - codes[heads])
        rests = np.full(len(heads), NO_REST, dtype=np.int32)
        distances = (keys[seconds] - keys[seconds - 1]) << rest_bits
        first_codes = codes[seconds - 1] >> (code_bits - rest_bits)
        rests[np.searchsorted(heads, seconds) - 1] = distances + first_codes - codes[seconds]
        self.heads.append(words.astype(self.layout.dtype))
        self.rests.append(rests)
        self.num_pairs += len(heads)

    def close(self) -> tuple[np.ndarray, np.ndarray]:
        """The heads and the rests, memory-mapped."""
        self._write(self.open_key, self.open_code, np.zeros(len(self.open_key), dtype=bool))
        self.heads.close()
        self.rests.close()
        return mapped(self.heads.path, self.layout.dtype), mapped(self.rests.path, np.int32)


def write_pairs(
    levels: list[Counts], layout: PairLayout, vocab_size: int, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """The heads and the rests of all levels, in files of `folder`; see [`NgramTable`]."""
    writer = PairWriter(folder, layout, vocab_size)
    slots_of_parents = None
    for length, level in enumerate(levels, start=2):
        slots = ArrayFile(folder / f"slots{length}")
        for block in blocks_of(len(level.keys)):
            keys = level.keys[block]
            if slots_of_parents is not None:
                parents, tokens = np.divmod(keys, vocab_size + 1)
                keys = slots_of_parents[parents] * (vocab_size + 1) + tokens
            slots.append(writer.append(keys, layout.codes_of(level.counts[block])))
        slots.close()
        slots_of_parents = mapped(slots.path, np.int64)
    return writer.close()
