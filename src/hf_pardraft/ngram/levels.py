"""The levels of a model, bigrams, trigrams and so on, made of the ascending longest n-grams, and pruned."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .counting import ArrayFile, KeyLayout, first_of_equals, mapped
from .pairs import Counts, blocks_of


class LevelWriter:
    """Writes the [`Counts`] of one level from sorted blocks. An n-gram may go on from one block to the next."""

    def __init__(self, path: Path) -> None:
        self.keys, self.counts = ArrayFile(path.with_suffix(".keys")), ArrayFile(path.with_suffix(".counts"))
        self.size = 0
        self.open_key, self.open_count = -1, 0

    def append(self, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Add the counts of ascending keys, equal ones together; returns the place of each entry's n-gram."""
        if not len(keys):
            return keys
        starts = first_of_equals([keys])
        totals = np.add.reduceat(counts, starts)
        if keys[0] == self.open_key:
            totals[0] += self.open_count
        else:
            self._write_open()
        first = self.size
        self.keys.append(keys[starts[:-1]])
        self.counts.append(totals[:-1])
        self.size += len(starts) - 1
        self.open_key, self.open_count = int(keys[starts[-1]]), int(totals[-1])
        return np.repeat(np.arange(first, first + len(starts)), np.diff(starts, append=len(keys)))

    def _write_open(self) -> None:
        if self.open_key >= 0:
            self.keys.append(np.array([self.open_key]))
            self.counts.append(np.array([self.open_count]))
            self.size += 1

    def close(self) -> Counts:
        self._write_open()
        self.keys.close()
        self.counts.close()
        return Counts(mapped(self.keys.path, np.int64), mapped(self.counts.path, np.int64))


def write_levels(
    blocks: Iterator[tuple[list[np.ndarray], np.ndarray]], layout: KeyLayout, vocab_size: int, folder: Path
) -> tuple[np.ndarray, list[Counts]]:
    """The counts of all lengths, from the sorted longest n-grams: those of the tokens, and the levels from bigrams on."""
    unigrams = np.zeros(vocab_size, dtype=np.int64)
    writers = [LevelWriter(folder / f"level{length}") for length in range(2, layout.order + 1)]
    for columns, counts in blocks:
        parents = layout.token(columns, 0) - 1
        starts = first_of_equals([parents])
        unigrams[parents[starts]] += np.add.reduceat(counts, starts)
        for place, writer in enumerate(writers, start=1):
            tokens = layout.token(columns, place) - 1
            goes_on = tokens >= 0
            if not goes_on.all():
                columns, parents, tokens = [column[goes_on] for column in columns], parents[goes_on], tokens[goes_on]
                counts = counts[goes_on]
            parents = writer.append(parents * (vocab_size + 1) + tokens, counts)
    return unigrams, [writer.close() for writer in writers]


def pruned(levels: list[Counts], vocab_size: int, min_count: int, folder: Path) -> list[Counts]:
    """The levels without what was seen less than `min_count` times.

    An n-gram is never seen more often than what it begins with, so what stays has its parents.
    """
    if min_count == 1:
        return levels
    kept_levels, new_places = [], None
    for length, level in enumerate(levels, start=2):
        writer = LevelWriter(folder / f"pruned{length}")
        places = ArrayFile(folder / f"places{length}")
        num_kept = 0
        for block in blocks_of(len(level.keys)):
            is_kept = level.counts[block] >= min_count
            places.append(num_kept + is_kept.cumsum() - 1)
            num_kept += int(is_kept.sum())
            parents, tokens = np.divmod(level.keys[block][is_kept], vocab_size + 1)
            if new_places is not None:
                parents = new_places[parents]
            writer.append(parents * (vocab_size + 1) + tokens, level.counts[block][is_kept])
        places.close()
        new_places = mapped(places.path, np.int64)
        kept_levels.append(writer.close())
    return kept_levels
