"""Sampled trees over layers with and without windows, with the compiler that users get. A file of its own: it takes a while."""

import pytest

from compiled_cases import assert_same, oracle
from tiny_models import batch_of, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_compiled_tree_samples_the_eager_text():
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    target, batch = tiny_target("gemma3", **layers), batch_of(6)
    drafter = oracle("dflash", target, batch, settings={"tree_budget": 6}, num_layers=1)
    assert_same(target, batch, drafter, do_sample=True, temperature=0.5)
