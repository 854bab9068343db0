"""The benchmark of a round's attention times three ways with the same results."""

import torch

from round_attention import measured


def test_all_ways_are_timed():
    found = measured((2, 3, 16), text=20, tokens=4, dtype=torch.float32, turns=2)
    assert found.keys() == {"copied", "shared", "kernel"}
    assert min(found.values()) > 0
