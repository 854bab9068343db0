"""Chains, trees, and all that lasts between rounds, with the compiler that users get. A file of its own: it takes a while."""

import pytest
import torch

from compiled_cases import ONE_LAYER, assert_same, oracle, static
from hf_pardraft.generation.compiled import compiler as compiling
from hf_pardraft.generation.compiled import decoder as compiled_decoder
from tiny_models import batch_of, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_compiled_chain_writes_the_eager_text():
    """Of shapes that test_inductor_packed has too: most kernels are compiled once for both. The drafter is a Qwen3 model."""
    target, batch = tiny_target("llama", num_hidden_layers=1, tie_word_embeddings=False), batch_of(6, 3)
    drafter = oracle("pard", target, batch, **ONE_LAYER["pard"])
    assert_same(target, batch, drafter)
    assert compiling._compiled[target]


def test_a_compiled_tree_samples_the_eager_text():
    """Over layers with and without windows."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    target, batch = tiny_target("gemma3", **layers), batch_of(6)
    drafter = oracle("dflash", target, batch, settings={"tree_budget": 6}, num_layers=1)
    assert_same(target, batch, drafter, do_sample=True, temperature=0.5)


def test_what_inductor_leaves_between_rounds_is_what_is_left_uncompiled(monkeypatch):
    """Not only what is read of it: inductor may use the memory of an argument for something else."""
    target, batch = tiny_target("llama", num_hidden_layers=1), batch_of(6)
    drafter = oracle("pard", target, batch, settings={"tree_budget": 8}, **ONE_LAYER["pard"])
    original, rounds = compiled_decoder.CompiledDecoding.round, []

    def noted(self):
        original(self)
        if self.decode_state is not None:
            values = {**vars(self.draft_inputs), **vars(self.decode_state)}
            rounds.append({name: value.tolist() for name, value in values.items() if value is not None})

    monkeypatch.setattr(compiled_decoder.CompiledDecoding, "round", noted)
    static(target, batch["input_ids"], drafter, attention_mask=batch["attention_mask"], max_new_tokens=20)
    compiled = rounds.copy()
    rounds.clear()
    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    compiling._compiled.clear()
    static(target, batch["input_ids"], drafter, attention_mask=batch["attention_mask"], max_new_tokens=20)
    assert compiled == rounds
    assert len(rounds) > 3
