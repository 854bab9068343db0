"""The benchmark of shared keys times two ways with equal results."""

import torch

from shared_keys import measured


def test_both_ways_are_timed():
    found = measured((2, 3, 8), text=20, tokens=4, dtype=torch.float32, turns=2)
    assert found.keys() == {"copied", "shared"}
    assert min(found.values()) > 0
