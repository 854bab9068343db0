"""Bars that were interrupted while they were drawn."""

import sys
import threading

import pytest
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm
from transformers.utils import logging

from progress_lock import take_own_progress_lock


@pytest.mark.parametrize("bar", [tqdm, auto_tqdm, logging.tqdm])
def test_a_bar_that_was_interrupted_stops_nobody_else(bar):
    drawn = []
    tqdm.get_lock().acquire()
    take_own_progress_lock()
    other = threading.Thread(target=lambda: drawn.extend(bar(range(3), disable=False)), daemon=True)
    other.start()
    other.join(20)
    assert drawn == [0, 1, 2]


def test_what_all_tests_share_is_set_up_once():
    # Imported by name it would be a second module beside pytest's own: with fixtures that look at the wrong objects.
    assert "conftest" not in sys.modules
