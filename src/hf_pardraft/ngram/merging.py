"""Runs of counted n-grams, merged into one ascending sequence, a block at a time."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .counting import KeyLayout, RunWriter, SortedRun, first_of_equals

# Runs merged at once. More would leave each too small a share of the memory.
MAX_OPEN_RUNS = 64


def merged(runs: list[SortedRun], layout: KeyLayout, block_size: int) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
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


def merged_down(runs: list[SortedRun], layout: KeyLayout, folder: Path, block_size: int) -> list[SortedRun]:
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
