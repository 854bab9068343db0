"""What is made once counts by both clocks, in its own thread, and not twice where one thing is made for another."""

import time

import pytest

from hf_pardraft.generation.one_off import CLOCKS, made_once, seconds_spent
from threads import in_threads


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def spent() -> list[float]:
    return [seconds_spent(clock) for clock in CLOCKS]


def test_what_is_made_for_something_else_counts_once():
    before = spent()
    with made_once():
        spin(0.02)
        with made_once():
            spin(0.05)
        assert spent() == before
    for earlier, now, clock in zip(before, spent(), CLOCKS, strict=True):
        assert now - earlier >= 0.07
        # Processor time is what it is; by the other clock this process may have waited.
        assert clock is time.perf_counter or now - earlier < 0.11


def test_what_fails_counts_and_ends():
    @made_once()
    def fail() -> None:
        spin(0.01)
        raise ValueError("no")

    before = spent()
    with pytest.raises(ValueError, match="no"):
        fail()
    after = spent()
    assert all(now - earlier >= 0.01 for earlier, now in zip(before, after, strict=True))
    with made_once():
        pass
    assert spent() != before


def test_each_thread_has_its_own():
    def made() -> list[float]:
        with made_once():
            spin(0.01)
        return spent()

    before = spent()
    assert all(0.01 <= of_thread[0] < 0.04 for of_thread in in_threads(3, made))
    assert spent() == before


def test_of_another_clock_nothing_is_known():
    assert seconds_spent(lambda: 0.0) == 0.0
