"""Counting the n-grams of one piece of text, with numpy alone: also a program of its own, for builds in several processes."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class KeyLayout:
    """How the tokens of an n-gram share the bits of one or two unsigned integers, the first token highest.

    A token is stored as its id plus 1; 0 stands for what comes after the end of a document.

    Attributes:
        bits: for a token.
        columns: how many tokens each integer holds.
    """

    bits: int
    columns: tuple[int, ...]

    @property
    def order(self) -> int:
        return sum(self.columns)

    def pack(self, shifted: np.ndarray, num_windows: int) -> list[np.ndarray]:
        """The n-grams that begin at the first `num_windows` places of `shifted` (ids plus 1, uint64), column by column."""
        columns, offset = [], 0
        for width in self.columns:
            keys = shifted[offset : offset + num_windows].copy()
            for place in range(1, width):
                keys <<= np.uint64(self.bits)
                keys |= shifted[offset + place : offset + place + num_windows]
            columns.append(keys)
            offset += width
        return columns

    def token(self, columns: list[np.ndarray], place: int) -> np.ndarray:
        """The token at a place of each n-gram, plus 1."""
        for column, width in zip(columns, self.columns, strict=True):
            if place < width:
                shift = np.uint64(self.bits * (width - 1 - place))
                return ((column >> shift) & np.uint64((1 << self.bits) - 1)).astype(np.int64)
            place -= width
        raise IndexError(place)


@dataclass(frozen=True)
class SortedRun:
    """Sorted, different n-grams and their counts, on disk."""

    path: Path

    @property
    def size(self) -> int:
        return self.path.with_suffix(".counts").stat().st_size // np.dtype(np.int64).itemsize

    def columns(self, layout: KeyLayout) -> list[np.ndarray]:
        return [mapped(self.path.with_suffix(f".{i}"), np.uint64) for i in range(len(layout.columns))]

    @property
    def counts(self) -> np.ndarray:
        return mapped(self.path.with_suffix(".counts"), np.int64)

    def delete(self) -> None:
        for file in self.path.parent.glob(f"{self.path.name}.*"):
            file.unlink()


class ArrayFile:
    """A one-dimensional array on disk that grows at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "wb")  # noqa: SIM115 (closed by the caller)

    def append(self, array: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        self.file.close()


def mapped(path: Path, dtype: type) -> np.ndarray:
    """The array in a file, memory-mapped. An empty file can't be."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


class RunWriter:
    """Writes a [`SortedRun`], block by block."""

    def __init__(self, path: Path, num_columns: int) -> None:
        self.path = path
        self.files = [ArrayFile(path.with_suffix(f".{i}")) for i in range(num_columns)]
        self.counts = ArrayFile(path.with_suffix(".counts"))

    def append(self, columns: list[np.ndarray], counts: np.ndarray) -> None:
        for file, column in zip([*self.files, self.counts], [*columns, counts], strict=True):
            file.append(column)

    def close(self) -> SortedRun:
        for file in [*self.files, self.counts]:
            file.close()
        return SortedRun(self.path)


def first_of_equals(columns: list[np.ndarray]) -> np.ndarray:
    """Where, in sorted n-grams, a new one begins."""
    is_new = np.zeros(len(columns[0]), dtype=bool)
    is_new[:1] = True
    for column in columns:
        is_new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(is_new)


def count_windows(shifted: np.ndarray, num_windows: int, layout: KeyLayout, path: Path) -> SortedRun:
    """Count the n-grams that begin at the first `num_windows` places of `shifted` (ids plus 1), and write them as a run."""
    shifted = shifted.astype(np.uint64)
    columns = layout.pack(shifted, num_windows)
    is_ngram = shifted[:num_windows] != 0
    del shifted
    columns = [column[is_ngram] for column in columns]
    if len(columns) == 1:
        columns[0].sort()
    else:
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
    starts = first_of_equals(columns)
    counts = np.diff(starts, append=len(columns[0]))
    writer = RunWriter(path, len(columns))
    writer.append([column[starts] for column in columns], counts)
    return writer.close()


@dataclass(frozen=True)
class CountJob:
    """What another process is to count: a file of shifted ids (int32), as in [`count_windows`], and where to write."""

    shifted: str
    num_windows: int
    bits: int
    columns: list[int]
    path: str

    def command(self) -> list[str]:
        """The command line that does it. A program of its own needs no package and no guard in the caller's script."""
        # Not `python file`, which would look for modules in this folder first.
        start = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        return [sys.executable, "-c", start, __file__, json.dumps(asdict(self))]

    def run(self) -> None:
        layout = KeyLayout(self.bits, tuple(self.columns))
        count_windows(np.fromfile(self.shifted, dtype=np.int32), self.num_windows, layout, Path(self.path))


if __name__ == "__main__":
    try:
        CountJob(**json.loads(sys.argv[-1])).run()
    except OSError as error:
        # The caller knows a full disk by its number.
        sys.stderr.write(f"{error}\n")
        sys.exit(error.errno or 1)
