"""Processes that share a core in slices: all at once, each with what it knows, and none waited for that is dead."""

import os
import time

import pytest

from time_slices import SLICE, ask_all, workers


def busy(seconds: float) -> tuple[float, float]:
    """Take so much CPU time; when that began and ended."""
    began, until = time.monotonic(), time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return began, time.monotonic()


def test_what_is_asked_of_all_is_done_at_once():
    with workers([busy] * 3) as asked:
        spans = ask_all(asked, 8 * SLICE)
    # As long as all of them take, and each from the first slices on to the last ones.
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)
    assert min(ended - began for began, ended in spans) > 16 * SLICE


def test_each_knows_what_it_has_learned_and_answers_in_order():
    sums = [0, 100]

    def add(which: int):
        def work(number: int) -> int:
            sums[which] += number
            return sums[which]

        return work

    with workers([add(0), add(1)]) as asked:
        assert [ask_all(asked, number) for number in (1, 2)] == [[1, 101], [3, 103]]
    assert sums == [0, 100]


def test_one_that_dies_is_not_waited_for():
    with workers([busy, lambda seconds: os._exit(1)]) as asked, pytest.raises(EOFError):
        ask_all(asked, SLICE)
