"""What several tests of decoding share."""

import pytest
import torch

from hf_pardraft.generation.packing import packing_trials, panels
from hf_pardraft.generation.packing.packed_layouts import layouts_for


@pytest.fixture
def fresh_compiler():
    """What was compiled for other tests is forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def packed_without_trials(monkeypatch):
    """All weights that can be packed are, whether that is faster on this machine or not."""
    monkeypatch.setattr(packing_trials, "NUM_TRIALS", 0)
    monkeypatch.setattr(packing_trials, "_trials", {})


@pytest.fixture
def no_layout_is_known():
    """Which layouts there are on this machine is found out anew, and again afterwards."""
    found_out = panels.library, layouts_for
    for known in found_out:
        known.cache_clear()
    yield
    for known in found_out:
        known.cache_clear()
