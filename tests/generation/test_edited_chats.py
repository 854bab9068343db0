"""A caller who takes back the end of a text goes on as from plain `generate`'s cache: it keeps what that one would have kept."""

import functools
from itertools import product

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from pairwise import every_two_meet
from tiny_models import batch_oracle, ragged_prompts, random_prompt, tiny_target
from unusual_targets import llama4

WINDOW, REMOVED, NEW = 6, 7, 14


TARGETS = {
    **{name: functools.partial(tiny_target, name) for name in ("mistral", "gemma3", "gpt_oss")},
    "llama4": functools.partial(llama4, attention_chunk_size=WINDOW, attn_temperature_tuning=False),
}


def recording(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


def with_wider_windows(config):
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if layer.is_sliding:
            cache.layers[index] = DynamicSlidingWindowLayer(4 * WINDOW)
    return cache


CACHES = {
    "complete": lambda config: DynamicCache(),
    "recording": recording,
    "with wider windows": with_wider_windows,
    "static": lambda config: StaticCache(config=config, max_cache_len=80),
    "ordinary": lambda config: DynamicCache(config=config),
}


def drafter_for(kind, target, texts, mask, budget):
    drafter = batch_oracle(kind, target, texts, mask, budget)
    drafter.generation_config.draft_schedule = "fixed"
    return drafter


def turns(target, make_cache, kinds, given, texts=None, budget=0, removed=REMOVED):
    """What a chat's turns leave: their texts and masks, and copies of the entries in the cache.

    Args:
        target, make_cache: the model; what makes its cache.
        kinds: of each turn's drafter, `None` for none.
        given: the first turn's prompts and mask.
        texts: what the turns will write, for drafters that are mostly right.
        budget: of trees.
        removed: how many tokens each turn takes back of the last one's text.
    """
    (ids, mask), cache, found = given, make_cache(target.config), []
    for turn, kind in enumerate(kinds):
        drafter = kind and drafter_for(kind, target, *texts[turn][:2], budget)
        options = {"attention_mask": mask, "past_key_values": cache, "assistant_model": drafter, "max_new_tokens": NEW}
        text = target.generate(ids, do_sample=False, **options)
        mask = torch.nn.functional.pad(mask, (0, NEW), value=1)
        found.append((text, mask, [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]))
        if removed:
            cache.crop(1 - removed)
        new = torch.cat([random_prompt(3, seed=7 * turn + item) for item in range(len(ids))])
        ids = torch.cat([text[:, : text.shape[1] - removed], new], dim=1)
        mask = torch.nn.functional.pad(mask, (0, 3 - removed), value=1)
    return found


def assert_alike(found, expected):
    """Texts are equal, and the entries of all columns but padding."""
    for (text, _, layers), (plain, mask, plain_layers) in zip(found, expected, strict=True):
        assert torch.equal(text, plain)
        for own, wanted in zip(layers, plain_layers, strict=True):
            assert own[0].shape == wanted[0].shape
            columns = mask[:, :-1][:, -own[0].shape[2] :] if own[0].shape[2] < mask.shape[1] else mask[:, :-1]
            real = torch.nn.functional.pad(columns, (0, own[0].shape[2] - columns.shape[1]))[:, None, :, None]
            for states, wanted_states in zip(own, wanted, strict=True):
                torch.testing.assert_close(states * real, wanted_states * real, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("where", "budget", "kinds"),
    every_two_meet(
        product(TARGETS, ["complete", "recording"]), [0, 8], [("dflash", None, "pard"), ("pard", "dflash", None)]
    ),
)
def test_what_is_taken_back_of_a_drafted_text_is_forgotten_as_ever(where, budget, kinds):
    name, cache = where
    target, given = TARGETS[name](), ragged_prompts((10,))
    expected = turns(target, CACHES[cache], (None,) * 3, given)
    assert_alike(turns(target, CACHES[cache], kinds, given, expected, budget), expected)


@pytest.mark.parametrize("kinds", [("dflash", None, "pard"), ("pard", "dflash", None)])
@pytest.mark.parametrize("cache", ["complete", "recording"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_so_it_is_in_a_batch(name, cache, kinds):
    target, given = TARGETS[name](), ragged_prompts((10, 7, 9))
    expected = turns(target, CACHES[cache], (None,) * 3, given)
    assert_alike(turns(target, CACHES[cache], kinds, given, expected, 6), expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", TARGETS)
def test_every_cache_keeps_after_a_draft_what_it_keeps_without(name, cache):
    target, given = TARGETS[name](), ragged_prompts((10,))
    expected = turns(target, CACHES[cache], (None,) * 3, given, removed=0)
    assert_alike(turns(target, CACHES[cache], ("dflash", None, "pard"), given, expected, 8, removed=0), expected)


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_attentions_are_as_wide_as_the_given_cache_makes_them(name, cache):
    target, (ids, mask) = tiny_target(name, attn_implementation="eager"), ragged_prompts((10,))
    found = []
    for drafted in (False, True):
        drafter = drafter_for("dflash", target, found[0].sequences, mask, 0) if drafted else None
        options = {"past_key_values": CACHES[cache](target.config), "assistant_model": drafter, "max_new_tokens": 40}
        options |= {"return_dict_in_generate": True, "output_attentions": True, "do_sample": False}
        found.append(target.generate(ids, attention_mask=mask, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[1].attentions, found[0].attentions, rtol=1e-3, atol=1e-4)
