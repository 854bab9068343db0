"""The cache takes little more memory than plain `generate`'s, however uneven the rows, and forgets what a window left behind."""

import functools

import pytest
import torch
from transformers import DynamicCache

from hf_pardraft.generation import decoder as decode
from hf_pardraft.models.cache import GrowingLayer
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

BUDGET = 12


@functools.cache
def bytes_of_plain_cache(target, length):
    """For one item of a batch."""
    cache = DynamicCache(config=target.config)
    target(random_prompt(length), past_key_values=cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def watched_rounds(monkeypatch, target):
    """Let every round note the size of the target's cache and the length of its longest row."""
    seen = []
    round_of = decode.SpeculativeDecoding.round

    def watched(self):
        items = len(self.items)
        round_of(self)
        layers = [layer for layer in self.reader.cache.layers if isinstance(layer, GrowingLayer)]
        if self.items and len(self.items) == items:
            size = sum(layer.key_buffer.nbytes + layer.value_buffer.nbytes for layer in layers)
            seen.append((items, max(self.reader.cache.item_lengths), size))

    monkeypatch.setattr(decode.SpeculativeDecoding, "round", watched)
    return seen


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("budget", [0, BUDGET])
def test_memory_stays_near_that_of_plain_generate(monkeypatch, architecture, budget):
    # One layer of each kind: the others would hold as much.
    overrides = {"max_position_embeddings": 1024, "num_hidden_layers": 2}
    if architecture != "llama":
        overrides["sliding_window"] = 96
    target = tiny_target(architecture, **overrides)
    prompts = [random_prompt(length, seed=length) for length in (150, 40, 90)]
    ids = torch.cat([torch.nn.functional.pad(p, (150 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (150 - p.shape[1], 0)) for p in prompts])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 150}
    expected = target.generate(ids, **options)
    # Rows that accept all, nothing and something.
    texts = [expected[0], torch.zeros(300, dtype=torch.long), expected[2, 60:]]
    drafter = make_oracle(tiny_drafter("pard", target), texts, [0.9] * 4)
    drafter.generation_config.tree_budget = budget
    seen = watched_rounds(monkeypatch, target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    tree = max(budget, 4) + 1
    assert len(seen) > 20
    for items, length, size in seen[1:]:
        assert size <= items * (1.25 * bytes_of_plain_cache(target, length) + tree * bytes_of_plain_cache(target, 1))


def test_a_window_forgets_what_it_left_behind_in_chat_too():
    target = tiny_target("gemma3", max_position_embeddings=1024)
    cache, ids = DynamicCache(config=target.config), random_prompt(80)
    for turn in range(3):
        expected = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60)
        drafter = make_oracle(tiny_drafter("dflash", target), expected[0], [0.7] * 4)
        found = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=60,
            past_key_values=cache,
            assistant_model=drafter,
        )
        assert torch.equal(found, expected)
        assert cache.layers[0].keys.shape[2] == target.config.sliding_window - 1
        ids = torch.cat([expected, random_prompt(5, seed=turn)], dim=1)
