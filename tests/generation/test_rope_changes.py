"""Text is plain `generate`'s on both sides of a length at which rotary frequencies change, and across it."""

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig

from hf_pardraft.generation.compiled.decoder import CompiledDecoding
from hf_pardraft.generation.target_side.rope import RopeChanges, rope_changes
from tiny_models import batch_oracle, make_oracle, ragged_prompts, random_prompt, tiny_drafter, tiny_target
from unusual_targets import LONGROPE, ROPE_LIMIT, ROPE_TARGETS, fresh

# Lengths of prompts, and how many tokens come: up to the limit, on it, across it, beyond it.
CASES = [((21,), 30), ((31,), 9), ((32,), 9), ((33,), 9), ((10, 28), 12), ((33, 20), 9), ((40, 36), 9), ((5, 9), 12)]


@pytest.mark.parametrize(("kind", "budget"), [("pard", 0), ("dflash", 10)])
@pytest.mark.parametrize("name", ROPE_TARGETS)
def test_text_across_the_change_is_plain(name, kind, budget):
    target = ROPE_TARGETS[name]()
    # One prompt of each side for a second drafter; batches for all.
    for lengths, new in CASES if budget else CASES[:2] + CASES[4:6]:
        ids, mask = ragged_prompts(lengths)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
        options["eos_token_id"] = [7, 19] if len(lengths) > 1 else None
        expected = fresh(target).generate(ids, **options)
        drafter = batch_oracle(kind, target, expected, mask, budget)
        found = fresh(target).generate(ids, assistant_model=drafter, **options)
        assert torch.equal(found, expected), (lengths, new)
        if name != "dynamic" and lengths == (21,):
            assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("name", ["longrope", "phi3"])
def test_compiled_rounds_keep_to_one_side(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    runs, run = [], CompiledDecoding.run
    monkeypatch.setattr(CompiledDecoding, "run", lambda self, ids: runs.append(ids) or run(self, ids))
    target = ROPE_TARGETS[name]()
    for lengths, new, is_compiled in (
        ((5, 7), 12, True),
        ((40, 36), 9, True),
        ((21,), 20, False),
        ((10, 28), 12, False),
    ):
        ids, mask = ragged_prompts(lengths)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new}
        expected = target.generate(ids, **options)
        drafter = tiny_drafter("pard", target)
        found = target.generate(ids, assistant_model=drafter, cache_implementation="static", **options)
        assert torch.equal(found, expected)
        assert bool(runs) == is_compiled
        runs.clear()


@pytest.mark.parametrize("name", ["longrope", "phi3"])
def test_padding_of_one_prompt_is_no_length(name):
    """Rotary embeddings count positions; where Phi-3 reads again, it counts columns."""
    target = ROPE_TARGETS[name]()
    prompt = torch.nn.functional.pad(random_prompt(20), (5, 0))
    mask = (torch.arange(25) >= 5).long()[None]
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 25}
    expected = target.generate(prompt, **options)
    drafter = make_oracle(tiny_drafter("pard", target), expected[0, 5:], [0.9, 0.8, 0.8, 0.8])
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("name", ["longrope", "phi3", "dynamic"])
def test_the_loop_of_transformers_drafts_over_no_change_either(name):
    target, prompt = ROPE_TARGETS[name](), random_prompt(21)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 24}
    expected = fresh(target).generate(prompt, **options)
    drafter = make_oracle(tiny_drafter("pard", target), expected[0], [0.9] * 4)
    drafter.generation_config.decode_loop = "stock"
    if name == "phi3":
        with pytest.raises(ValueError, match="reads its whole text again when it grows beyond 32 tokens"):
            target.generate(prompt, assistant_model=drafter, **options)
    else:
        assert torch.equal(fresh(target).generate(prompt, assistant_model=drafter, **options), expected)


def test_what_phi3_reads_again_has_no_hidden_states_to_return():
    target, prompt = ROPE_TARGETS["phi3"](), random_prompt(21)
    options = {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True, "output_hidden_states": True}
    with pytest.raises(ValueError, match="can't be done while hidden states or attentions are returned"):
        target.generate(prompt, assistant_model=tiny_drafter("pard", target), max_new_tokens=20, **options)
    # Below the limit it reads nothing again.
    out = target.generate(prompt, assistant_model=tiny_drafter("pard", target), max_new_tokens=8, **options)
    assert len(out.hidden_states) == 8


@pytest.mark.parametrize("name", ["longrope", "phi3"])
def test_a_second_turn_goes_on_from_a_cache_of_the_other_side(name):
    target, prompts = ROPE_TARGETS[name](), [random_prompt(18), random_prompt(9, seed=1)]
    texts = []
    for drafted in (False, True):
        cache, ids = DynamicCache(config=target.config), prompts[0]
        for turn in range(2):
            drafter = make_oracle(tiny_drafter("dflash", target), texts[turn][0], [0.9] * 4) if drafted else None
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 10}
            ids = target.generate(ids, past_key_values=cache, assistant_model=drafter, **options)
            if drafted:
                assert torch.equal(ids, texts[turn])
            texts.append(ids)
            ids = torch.cat([ids, prompts[1]], dim=1)


def test_no_slot_comes_to_stand_beyond_a_change():
    switch, growing = RopeChanges(switches=(32,)), RopeChanges(grows_beyond=32)
    for length in range(1, 60):
        for depth in range(9):
            for changes in (switch, growing):
                room = changes.room(length, depth)
                # Slots of the anchor and the drafts, and the bonus token that comes to stand after them.
                lengths = range(length, length + room + 2)
                is_long = {number > 32 for number in lengths}
                assert room <= depth
                assert room == 0 or (len(is_long) == 1 and not (changes is growing and True in is_long))
            assert switch.room(length, depth) == depth or length + depth + 1 > 32 >= length


def test_every_layer_types_own_rope_counts():
    rope = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(rope_parameters=rope, max_position_embeddings=64)
    assert rope_changes(config) == RopeChanges(switches=(ROPE_LIMIT,))
    assert rope_changes(tiny_target("llama").config) == RopeChanges()
    assert rope_changes(ROPE_TARGETS["dynamic"]().config) == RopeChanges(grows_beyond=ROPE_LIMIT)
