"""The benchmark of the memory's limit counts what it says."""

from argparse import Namespace

import pytest
import torch

import memory_limit
from hf_pardraft.generation.packing import packed_weights
from in_process import run_main
from memory_limit import measure_forwards, smollm2


@pytest.mark.skipif(not packed_weights.layouts_for(torch.float32), reason="no library here packs weights")
def test_copies_are_counted_of_the_target_that_is_measured(monkeypatch):
    monkeypatch.setattr(packed_weights, "FEWEST_ELEMENTS", 1 << 10)
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    earlier = smollm2(1, torch.float32, quick=True)
    # Its only weights besides these are norms.
    matrices = [weight for weight in earlier.parameters() if weight.ndim == 2]
    for weight in matrices:
        packed_weights.packed_product(torch.randn(1, weight.shape[1]), weight, None, False)
    arguments = Namespace(layers=1, tokens=[1], repeats=1, quick=True)
    with torch.no_grad():
        measured = measure_forwards(torch.float32, arguments)
    assert 0 <= measured["packed_bytes"] <= sum(weight.nbytes for weight in matrices)


def test_times_are_compared_with_one_tokens(tmp_path):
    refused = run_main(memory_limit.main, "--tokens", "8", "--output", str(tmp_path / "limit.json"))
    assert refused.code == 2
    assert "--tokens needs 1" in refused.err
