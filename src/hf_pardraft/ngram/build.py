"""Counting n-grams in bounded memory: chunks of text are sorted into runs on disk, and the runs merged into levels."""

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import convert_file_size_to_int
from tqdm.auto import tqdm

from ..checkpoints.atomic_files import NO_ROOM
from ..checkpoints.config_checks import is_whole
from .counting import ArrayFile, CountJob, KeyLayout, Run, RunWriter, count_windows, first_of_equals, mapped
from .pairs import Counts, blocks_of
from .sources import Chunk, chunks_of
from .store import check_order, write_store

LEAST_MEMORY = 1 << 20
# What a token of a chunk takes while it is counted (ids, keys, sorted keys, counts), and an entry while runs are merged.
BYTES_PER_TOKEN = 64
BYTES_PER_ENTRY = 192
# Runs merged at once. More would leave each too small a share of the memory.
MAX_OPEN_RUNS = 64
# Of the integers that n-grams are packed into.
KEY_BITS = 64


def checked_count(name: str, value: int) -> int:
    """`value`, or a `ValueError` unless it is a whole number of at least 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


@dataclass(frozen=True)
class BuildOptions:
    """How to count; see [`NgramModel.from_token_stream`]."""

    order: int
    vocab_size: int
    min_count: int = 1
    max_memory: int | str = "1GB"
    num_proc: int = 1
    progress: bool = False

    @property
    def memory(self) -> int:
        """Bytes to count with."""
        try:
            return convert_file_size_to_int(self.max_memory)
        except ValueError as error:
            raise ValueError(f"max_memory must be a size such as 1GB or 500MiB, got {self.max_memory!r}") from error

    @property
    def chunk_tokens(self) -> int:
        """Tokens to count at once: every process has a chunk, and one is being gathered."""
        return self.memory // BYTES_PER_TOKEN // (self.num_proc + 1 if self.num_proc > 1 else 1)

    def check(self) -> None:
        """Raise a `ValueError` for what can't be honoured."""
        check_order(self.order)
        for name in ("vocab_size", "min_count", "num_proc"):
            checked_count(name, getattr(self, name))
        if self.memory < LEAST_MEMORY:
            raise ValueError(f"counting needs a max_memory of at least {LEAST_MEMORY} bytes, got {self.max_memory!r}")
        key_layout_for(self)


def key_layout_for(options: BuildOptions) -> KeyLayout:
    """One integer for an n-gram where that is enough, else two."""
    bits = options.vocab_size.bit_length()
    if options.order * bits <= KEY_BITS:
        return KeyLayout(bits, (options.order,))
    first = options.order - options.order // 2
    if first * bits > KEY_BITS:
        raise ValueError(
            f"{options.order}-grams of a vocabulary of {options.vocab_size} are too long: with this order it may have "
            f"{2 ** (KEY_BITS // first) - 1} tokens"
        )
    return KeyLayout(bits, (first, options.order - first))


# Runs


def count_runs(
    chunks: Iterator[Chunk], layout: KeyLayout, folder: Path, options: BuildOptions
) -> tuple[list[Run], int]:
    """Count all chunks, in this process or in several; returns the runs and the number of tokens."""
    num_tokens, paths = 0, (folder / f"run{number}" for number in itertools.count())
    with tqdm(desc="counting", unit=" tokens", unit_scale=True, disable=not options.progress) as bar:

        def noted() -> Iterator[Chunk]:
            nonlocal num_tokens
            for chunk in chunks:
                num_tokens += chunk.num_tokens
                yield chunk
                bar.update(chunk.num_tokens)

        if options.num_proc == 1:
            runs = [count_windows(chunk.shifted, chunk.num_windows, layout, next(paths)) for chunk in noted()]
        else:
            runs = count_apart(noted(), layout, paths, options.num_proc)
    return runs, num_tokens


def count_apart(chunks: Iterator[Chunk], layout: KeyLayout, paths: Iterator[Path], num_proc: int) -> list[Run]:
    """Count chunks in processes of their own, `num_proc` at a time."""

    def count(shifted: Path, num_windows: int, path: Path) -> Run:
        job = CountJob(str(shifted), num_windows, layout.bits, list(layout.columns), str(path))
        done = subprocess.run(job.command(), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode in NO_ROOM:
            raise OSError(done.returncode, os.strerror(done.returncode))
        if done.returncode:
            raise RuntimeError(f"a counting process failed: {done.stderr.strip() or done.returncode}")
        shifted.unlink()
        return Run(path)

    finished: list[Run] = []
    waiting: set[Future] = set()
    # The threads only wait for the processes.
    with ThreadPoolExecutor(num_proc) as pool:
        for chunk in chunks:
            if len(waiting) == num_proc:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                finished += [future.result() for future in done]
            path = next(paths)
            shifted = path.with_suffix(".ids")
            # Not `tofile`, which does not say why it failed.
            shifted.write_bytes(chunk.shifted.data)
            waiting.add(pool.submit(count, shifted, chunk.num_windows, path))
        return finished + [future.result() for future in waiting]


# Merging


def merged(runs: list[Run], layout: KeyLayout, block_size: int) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """The n-grams of all runs, ascending and each once, in blocks of about `block_size`: columns and counts."""
    columns, counts = [run.columns(layout) for run in runs], [run.counts for run in runs]
    places = [0] * len(runs)
    while active := [i for i, run in enumerate(runs) if places[i] < run.size]:
        share = max(1, block_size // len(active))
        ends = {i: min(places[i] + share, runs[i].size) for i in active}
        # Up to here no run has anything that was not looked at.
        bound = min(tuple(column[ends[i] - 1] for column in columns[i]) for i in active)
        taken = []
        for i in active:
            stop = place_after(columns[i], places[i], ends[i], bound)
            taken.append(([column[places[i] : stop] for column in columns[i]], counts[i][places[i] : stop]))
            places[i] = stop
        yield summed(
            [np.concatenate(parts) for parts in zip(*(part[0] for part in taken), strict=True)],
            np.concatenate([part[1] for part in taken]),
            is_sorted=len(taken) == 1,
        )


def place_after(columns: list[np.ndarray], start: int, stop: int, bound: tuple) -> int:
    """Where, in sorted n-grams from `start` to `stop`, those up to `bound` end."""
    for column, value in zip(columns[:-1], bound[:-1], strict=True):
        window = column[start:stop]
        below, up_to = np.searchsorted(window, value), np.searchsorted(window, value, side="right")
        if below == up_to:
            return start + int(below)
        start, stop = start + int(below), start + int(up_to)
    return start + int(np.searchsorted(columns[-1][start:stop], bound[-1], side="right"))


def summed(columns: list[np.ndarray], counts: np.ndarray, is_sorted: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Sort n-grams and add up the counts of equal ones."""
    if is_sorted:
        return columns, counts
    # Stable, because that merges what is sorted in parts already.
    order = columns[0].argsort(kind="stable") if len(columns) == 1 else np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    starts = first_of_equals(columns)
    return [column[starts] for column in columns], np.add.reduceat(counts[order], starts)


def merged_down(runs: list[Run], layout: KeyLayout, folder: Path, block_size: int) -> list[Run]:
    """At most [`MAX_OPEN_RUNS`] runs with the counts of all of them."""
    numbers = itertools.count()
    while len(runs) > MAX_OPEN_RUNS:
        group, runs = runs[:MAX_OPEN_RUNS], runs[MAX_OPEN_RUNS:]
        writer = RunWriter(folder / f"merged{next(numbers)}", len(layout.columns))
        for columns, counts in merged(group, layout, block_size):
            writer.append(columns, counts)
        runs.append(writer.close())
        for run in group:
            run.delete()
    return runs


# Levels


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


def build_store(documents: Iterable[Any], path: Path, options: BuildOptions, tokenizer_facts: dict[str, Any]) -> None:
    """Count a stream of documents and write the store; see [`NgramModel.from_token_stream`]."""
    options.check()
    layout = key_layout_for(options)
    with tempfile.TemporaryDirectory(prefix="runs-", dir=path.parent) as workspace:
        folder = Path(workspace)
        chunks = chunks_of(documents, options.vocab_size, options.order, options.chunk_tokens)
        runs, num_tokens = count_runs(chunks, layout, folder, options)
        block_size = options.memory // BYTES_PER_ENTRY
        runs = merged_down(runs, layout, folder, block_size)
        num_entries = sum(run.size for run in runs)
        with tqdm(
            desc="merging", unit=" n-grams", unit_scale=True, total=num_entries, disable=not options.progress
        ) as bar:

            def blocks() -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
                for columns, counts in merged(runs, layout, block_size):
                    yield columns, counts
                    bar.update(len(counts))

            unigrams, levels = write_levels(blocks(), layout, options.vocab_size, folder)
        for run in runs:
            run.delete()
        levels = pruned(levels, options.vocab_size, options.min_count, folder)
        facts = {"num_tokens": num_tokens, "min_count": options.min_count, **tokenizer_facts}
        write_store(path, unigrams, levels, facts)
