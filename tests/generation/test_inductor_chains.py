"""Chains with the compiler that users get. A file of its own: it takes a while."""

import pytest

from compiled_cases import ONE_LAYER, assert_same, oracle
from hf_pardraft.generation.compiled import compiler as compiling
from tiny_models import batch_of, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_compiled_chain_writes_the_eager_text():
    """Of shapes that test_inductor_packed has too: most kernels are compiled once for both. The drafter is a Qwen3 model."""
    target, batch = tiny_target("llama", num_hidden_layers=1, tie_word_embeddings=False), batch_of(6, 3)
    drafter = oracle("pard", target, batch, **ONE_LAYER["pard"])
    assert_same(target, batch, drafter)
    assert compiling._compiled[target]
