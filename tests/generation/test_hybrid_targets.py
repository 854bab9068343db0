"""Targets with recurrent layers, whose state can't forget a rejected draft; and those with several positions per token."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    GraniteMoeHybridConfig,
    JambaConfig,
    MambaConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.cache_utils import LinearAttentionLayer

from pairwise import every_two_meet
from tiny_models import batch_oracle, make_oracle, ragged_prompts, random_prompt, tiny_drafter, tiny_target
from unusual_targets import HYBRIDS, SIZES, hybrid_target

LONGEST = 24
RATES = [0.8, 0.7, 0.6, 0.5]


def greedy(target, prompt, **options):
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


def oracle(kind, target, text):
    return make_oracle(tiny_drafter(kind, target), text, RATES)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart", "pard2"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_targets_write_what_they_write_alone(name, kind):
    target = hybrid_target(name)
    for length in (1, 9):
        prompt = random_prompt(length)
        expected = greedy(target, prompt, max_new_tokens=LONGEST)
        for drafter in (tiny_drafter(kind, target), oracle(kind, target, expected[0])):
            assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST), expected)
        # A round that rejects is followed by one that drafts nothing.
        assert drafter.last_stats.tau > 1.2


@pytest.mark.parametrize("name", HYBRIDS)
def test_scores_states_and_cache_of_a_hybrid_are_those_of_plain_generate(name):
    target, prompt = hybrid_target(name), random_prompt(7)
    options = {
        "max_new_tokens": LONGEST,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    expected = greedy(target, prompt, **options)
    found = greedy(target, prompt, assistant_model=oracle("dflash", target, expected.sequences[0]), **options)
    for ours, plain in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)
    for ours, plain in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(plain), rtol=1e-3, atol=1e-4)
    follow_up = torch.cat([expected.sequences, random_prompt(4, seed=3)], dim=1)
    text = greedy(target, follow_up, max_new_tokens=LONGEST)
    for drafter in (None, oracle("pard", target, text[0])):
        cache = DynamicCache(config=target.config)
        first = greedy(
            target,
            prompt,
            max_new_tokens=LONGEST,
            past_key_values=cache,
            assistant_model=oracle("dflash", target, expected.sequences[0]),
        )
        assert torch.equal(first, expected.sequences)
        second = greedy(target, follow_up, max_new_tokens=LONGEST, past_key_values=cache, assistant_model=drafter)
        assert torch.equal(second, text)


def states_of(cache):
    """Copies of all that a cache holds, layer by layer."""
    found = []
    for layer in cache.layers:
        is_recurrent = isinstance(layer, LinearAttentionLayer)
        states = (
            layer.conv_states | {"recurrent": layer.recurrent_states[0]}
            if is_recurrent
            else {0: layer.keys, 1: layer.values}
        )
        found.append([state.clone() for state in states.values() if state is not None])
    return found


def recorded_turns(target, prompt, kinds, removed, texts=None):
    """A chat in a cache that records its past, of which each turn's end is taken back: its texts, and what the cache holds."""
    cache, found, ids = DynamicCache(config=target.config), [], prompt
    cache.activate_past_recording()
    for turn, kind in enumerate(kinds):
        drafter = kind and oracle(kind, target, texts[turn][0][0])
        text = greedy(target, ids, max_new_tokens=LONGEST, past_key_values=cache, assistant_model=drafter)
        found.append((text, states_of(cache)))
        if removed is not None:
            cache.crop(-removed)
        ids = torch.cat([text[:, : text.shape[1] - (removed or 0)], random_prompt(3, seed=turn)], dim=1)
    return found


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("length", "kinds", "removed"),
    every_two_meet([1, 9], [("dflash", None, "pard"), (None, "pard", "dflash")], [None, 0, 4]),
)
def test_recurrent_layers_that_record_their_past_go_on_recording(name, length, kinds, removed):
    """What transformers can't take back of a recurrent state stays there in both."""
    target, prompt = hybrid_target(name), random_prompt(length)
    expected = recorded_turns(target, prompt, (None,) * 3, removed)
    for (text, states), (plain, plain_states) in zip(
        recorded_turns(target, prompt, kinds, removed, expected), expected, strict=True
    ):
        assert torch.equal(text, plain)
        torch.testing.assert_close(states, plain_states, rtol=1e-3, atol=1e-4)


def test_a_hybrid_target_takes_chains_for_one_sequence(caplog):
    target, prompt = hybrid_target("qwen3_5"), random_prompt(5)
    expected = greedy(target, prompt, max_new_tokens=12)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.tree_budget = 8
    assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=12), expected)
    assert max(drafter.last_stats.drafted_per_round) <= 4
    with pytest.raises(ValueError, match="one sequence at a time"):
        greedy(target, prompt.repeat(2, 1), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_masked_out_tokens_inside_the_text_are_refused_where_a_state_steps_over_them(name):
    target, prompt = hybrid_target(name), random_prompt(9)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="zeros inside the text"):
        target.generate(prompt, attention_mask=mask, assistant_model=tiny_drafter("pard", target), **options)
    # Before the text a state is empty, and stays so.
    padded = {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]), **options}
    expected = target.generate(prompt, **padded)
    drafter = oracle("pard", target, expected[0, 3:])
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **padded), expected)


def test_hybrids_that_start_anew_with_every_longer_text_are_refused():
    """Jamba's recurrent layers read several tokens from an empty state: it would write another text."""
    fields = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False}
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "max_position_embeddings")}
    target = AutoModelForCausalLM.from_config(JambaConfig(**sizes, **fields)).eval()
    with pytest.raises(ValueError, match="recurrent layers of a jamba target"):
        greedy(target, random_prompt(4), assistant_model=tiny_drafter("pard", target), max_new_tokens=4)


def test_purely_recurrent_targets_are_refused():
    config = MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=0, eos_token_id=None
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = tiny_drafter("pard", tiny_target("llama"))
    with pytest.raises(ValueError, match="recurrent layers, a compressed cache"):
        target.generate(random_prompt(4), assistant_model=drafter, max_new_tokens=4)


VISION = {
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
}
IMAGE_TOKEN = 61


def vision_target(name):
    config_class, rope, vision = VISION[name]
    torch.manual_seed(0)
    config = config_class(
        text_config={**SIZES, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2},
        image_token_id=IMAGE_TOKEN,
        video_token_id=60,
        vision_start_token_id=59,
        vision_end_token_id=58,
    )
    target = AutoModelForImageTextToText.from_config(config).eval()
    target.generation_config.eos_token_id = None
    return target


def picture_prompt():
    """A 16 x 16 picture of 16 patches, which the model merges into 4 tokens, between some text."""
    ids = torch.cat(
        [random_prompt(3), torch.tensor([[59] + [IMAGE_TOKEN] * 4 + [58]]), random_prompt(5, seed=1).clamp(max=50)],
        dim=1,
    ).clamp(max=63)
    ids[0, :3] = ids[0, :3].clamp(max=50)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 3 * 16, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("name", VISION)
def test_targets_with_several_positions_per_token_write_what_they_write_alone(name, kind, budget):
    target = vision_target(name)
    text_only = {"input_ids": random_prompt(6).clamp(max=50)}
    text_only["attention_mask"] = torch.ones_like(text_only["input_ids"])
    for inputs in (text_only, picture_prompt()):
        options = {"do_sample": False, "max_new_tokens": LONGEST, "suppress_tokens": [58, 59, 60, IMAGE_TOKEN]}
        expected = target.generate(**inputs, **options)
        drafter = oracle(kind, target, expected[0])
        drafter.generation_config.tree_budget = budget
        assert torch.equal(target.generate(**inputs, assistant_model=drafter, **options), expected)
        assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("kind", ["pard", "dflash"])
@pytest.mark.parametrize("name", VISION)
def test_the_stock_loop_drafts_for_targets_with_several_positions_per_token(name, kind):
    target, inputs = vision_target(name), picture_prompt()
    options = {"do_sample": False, "max_new_tokens": LONGEST, "suppress_tokens": [58, 59, 60, IMAGE_TOKEN]}
    expected = target.generate(**inputs, **options)
    drafter = oracle(kind, target, expected[0])
    drafter.generation_config.decode_loop = "stock"
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize(("lengths", "budget"), [((8,), 0), ((8,), 8), ((8, 5, 6), 0)])
def test_a_family_with_recurrent_layers_may_have_models_without_any(lengths, budget):
    """Granite 4.0's dense ones, which are served in trees and batches as any other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    experts = {"num_local_experts": 0, "shared_intermediate_size": 48, "initializer_range": 0.2, "mamba_n_heads": 4}
    config = GraniteMoeHybridConfig(
        **sizes, **experts, num_hidden_layers=3, layer_types=["attention"] * 3, eos_token_id=None, pad_token_id=0
    )
    target, (ids, mask) = AutoModelForCausalLM.from_config(config).eval(), ragged_prompts(lengths)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 16}
    expected = target.generate(ids, **options)
    drafter = batch_oracle("dflash", target, expected, mask, budget)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.2


def test_the_stock_loop_begins_with_an_empty_cache_of_recurrent_layers():
    target, prompt = hybrid_target("lfm2"), random_prompt(7)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.decode_loop = "stock"
    cache = DynamicCache(config=target.config)
    text = greedy(target, prompt, max_new_tokens=6, past_key_values=cache)
    follow_up = torch.cat([text, random_prompt(4, seed=3)], dim=1)
    with pytest.raises(ValueError, match="Use decode_loop='native', or begin with an empty cache"):
        greedy(target, follow_up, max_new_tokens=6, past_key_values=cache, assistant_model=drafter)
    expected = greedy(target, follow_up, max_new_tokens=6)
    empty = DynamicCache(config=target.config)
    assert torch.equal(
        greedy(target, follow_up, max_new_tokens=6, past_key_values=empty, assistant_model=drafter), expected
    )
