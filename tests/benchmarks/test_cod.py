"""The benchmark of conditional drop-token runs, and its positions are fewer than with all masks."""

import re
from pathlib import Path

import pytest

import cod
from in_process import run_main


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads the memory of a process from /proc")
def test_positions_are_fewer_the_more_tokens_are_drafted():
    shares = [int(share) for share in re.findall(r"\((\d+)%\)", run_main(cod.main, "--quick").out)]
    assert len(shares) == 2
    # (1 + 0.7 + 0.49 + 0.343) / 4 and, from the fifth on, 0.24 and 0.2 of a text.
    assert abs(shares[0] - 63) <= 2
    assert abs(shares[1] - 42) <= 2
