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
from .counting import CountJob, KeyLayout, SortedRun, count_windows
from .levels import pruned, write_levels
from .merging import merged, merged_down
from .sources import Chunk, chunks_of
from .store import check_order, write_store

LEAST_MEMORY = 1 << 20
# What a token of a chunk takes while it is counted (ids, keys, sorted keys, counts), and an entry while runs are merged.
BYTES_PER_TOKEN = 64
BYTES_PER_ENTRY = 192
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


def count_runs(
    chunks: Iterator[Chunk], layout: KeyLayout, folder: Path, options: BuildOptions
) -> tuple[list[SortedRun], int]:
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


def count_apart(chunks: Iterator[Chunk], layout: KeyLayout, paths: Iterator[Path], num_proc: int) -> list[SortedRun]:
    """Count chunks in processes of their own, `num_proc` at a time."""

    def count(shifted: Path, num_windows: int, path: Path) -> SortedRun:
        job = CountJob(str(shifted), num_windows, layout.bits, list(layout.columns), str(path))
        done = subprocess.run(job.command(), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode in NO_ROOM:
            raise OSError(done.returncode, os.strerror(done.returncode))
        if done.returncode:
            raise RuntimeError(f"a counting process failed: {done.stderr.strip() or done.returncode}")
        shifted.unlink()
        return SortedRun(path)

    finished: list[SortedRun] = []
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
