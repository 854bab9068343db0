"""Chat over several turns, on the cache that an earlier call returned; and the caches a caller may bring."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma4TextConfig, StaticCache

from pairwise import every_two_meet
from tiny_models import batch_oracle, make_oracle, ragged_prompts, random_prompt, tiny_drafter, tiny_target

NEW = 14
RATES = [0.7, 0.6, 0.6, 0.5]


def greedy(target, ids, **options):
    return target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **options)


def drafter_for(kind, target, text, budget=0):
    drafter = make_oracle(tiny_drafter(kind, target), text, RATES, runner_up=0.7)
    drafter.generation_config.tree_budget = budget
    return drafter


def three_turns(target, prompts, kinds, budget=0, texts=None, make_cache=None):
    """A chat: each turn appends a prompt to the text so far. `kinds` names each turn's drafter, or `None` for none."""
    cache = (make_cache or (lambda: DynamicCache(config=target.config)))()
    ids, found = None, []
    for turn, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        ids = prompt if ids is None else torch.cat([ids, prompt], dim=1)
        drafter = None if kind is None else drafter_for(kind, target, texts[turn][0], budget)
        ids = greedy(target, ids, past_key_values=cache, assistant_model=drafter)
        found.append(ids)
        if drafter is not None:
            assert drafter.last_stats.tau > 1.2
    return found


TURNS = [
    ("pard",) * 3,
    ("dflash",) * 3,
    ("dart",) * 3,
    ("pard2",) * 3,
    ("dflash", None, "pard"),
    ("dflash", None, "pard2"),
    (None, "dflash", None),
]


@pytest.mark.parametrize(
    ("architecture", "kinds", "budget"), every_two_meet(["llama", "mistral", "gemma3"], TURNS, [0, 10])
)
def test_each_turn_equals_decoding_from_scratch(architecture, kinds, budget):
    target = tiny_target(architecture)
    prompts = [random_prompt(length, seed=seed) for seed, length in enumerate((7, 4, 1))]
    ids, expected = None, []
    for prompt in prompts:
        ids = greedy(target, prompt if ids is None else torch.cat([ids, prompt], dim=1))
        expected.append(ids)
    for found, text in zip(three_turns(target, prompts, kinds, budget, expected), expected, strict=True):
        assert torch.equal(found, text)


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_static_caches_are_filled_as_plain_generate_fills_them(architecture, budget):
    target = tiny_target(architecture)
    prompts = [random_prompt(length, seed=seed) for seed, length in enumerate((7, 4, 1))]
    ids, expected = None, []
    for prompt in prompts:
        ids = greedy(target, prompt if ids is None else torch.cat([ids, prompt], dim=1))
        expected.append(ids)

    def static():
        return StaticCache(config=target.config, max_cache_len=80)

    found = three_turns(target, prompts, ("pard", "dflash", "pard"), budget, expected, static)
    assert all(map(torch.equal, found, expected))
    drafter = drafter_for("dflash", target, expected[0][0], budget)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(greedy(target, prompts[0], assistant_model=drafter, **options), expected[0])


@pytest.mark.parametrize("budget", [0, 10])
def test_layers_that_share_the_cache_of_others_go_on_too(budget):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "eos_token_id": None}
    config = Gemma4TextConfig(**sizes, **heads, **layers, **shared, initializer_range=0.2)
    target = AutoModelForCausalLM.from_config(config).eval()
    prompts = [random_prompt(length, seed=seed) for seed, length in enumerate((7, 4, 1))]
    ids, expected = None, []
    for prompt in prompts:
        ids = greedy(target, prompt if ids is None else torch.cat([ids, prompt], dim=1))
        expected.append(ids)
    found = three_turns(target, prompts, ("pard", "dflash", "pard"), budget, expected)
    assert all(map(torch.equal, found, expected))


def test_a_turn_behind_a_padded_prompt_keeps_its_padding():
    target = tiny_target("llama")
    prompt, mask = random_prompt(8), torch.ones(1, 8, dtype=torch.long)
    mask[0, :3] = 0
    options = {"do_sample": False, "max_new_tokens": NEW}
    texts = []
    for drafted in (False, True):
        cache = DynamicCache(config=target.config)
        ids, attention_mask = prompt, mask
        for _ in range(2):
            drafter = tiny_drafter("pard", target) if drafted else None
            ids = target.generate(
                ids, attention_mask=attention_mask, past_key_values=cache, assistant_model=drafter, **options
            )
            ids = torch.cat([ids, random_prompt(3, seed=5)], dim=1)
            attention_mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - 8), value=1)
        texts.append(ids)
        assert cache.get_seq_length() == ids.shape[1] - 4
    assert torch.equal(*texts)


def batch_turns(target, kinds, texts=None, ends=None, budget=0):
    """A chat of two at once: texts and masks of each turn. The mask leaves out what is padding after an end of text."""
    (ids, mask), cache, found = ragged_prompts((7, 4)), DynamicCache(config=target.config), []
    for turn, kind in enumerate(kinds):
        drafter = None if kind is None else batch_oracle(kind, target, *texts[turn], budget)
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 0}
        text = target.generate(ids, attention_mask=mask, past_key_values=cache, assistant_model=drafter, **options)
        is_end = torch.isin(text[:, ids.shape[1] :], torch.tensor(ends or [-1]))
        mask = torch.cat([mask, (is_end.cumsum(dim=1) - is_end.long() == 0).long()], dim=1)
        found.append((text, mask))
        ids = torch.cat([text, torch.cat([random_prompt(3, seed=7 * turn + item) for item in range(2)])], dim=1)
        mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    return found


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("ends", [None, [7, 19, 33, 41, 5]])
@pytest.mark.parametrize("kinds", [("pard", "dflash", "pard2"), ("dart", None, "dflash")])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_batch_goes_on_from_the_cache_of_its_last_turn(architecture, kinds, ends, budget):
    if architecture == "gemma3" and ends:
        pytest.skip("a window counts what is masked out after an end of text as distance, and that is refused")
    target = tiny_target(architecture)
    expected = batch_turns(target, (None,) * 3, ends=ends)
    assert ends is None or any(int(mask.min()) == 0 for _, mask in expected)
    found = batch_turns(target, kinds, expected, ends, budget)
    for (text, _), (own_text, _) in zip(expected, found, strict=True):
        assert torch.equal(own_text, text)


@pytest.mark.parametrize(("architecture", "compiled"), [("llama", False), ("mistral", False), ("llama", True)])
def test_the_cache_of_items_that_end_before_others_is_that_of_plain_generate(architecture, compiled, monkeypatch):
    """To the last column, padding included: a caller who does not mask it gets the same text, too."""
    target, (ids, mask) = tiny_target(architecture), ragged_prompts((7, 4, 6))
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20, "eos_token_id": [7, 19, 33, 41, 5]}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    expected = target.generate(ids, **options)
    if compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        options |= {"cache_implementation": "static"}
    drafter = batch_oracle("dflash", target, expected.sequences, mask)
    found = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(found.sequences, expected.sequences)
    real = torch.nn.functional.pad(mask.bool(), (0, expected.sequences.shape[1] - 1 - mask.shape[1]), value=True)
    for layer, own in zip(expected.past_key_values.layers, found.past_key_values.layers, strict=True):
        columns = layer.keys.shape[2]
        for states, own_states in ((layer.keys, own.keys), (layer.values, own.values)):
            kept = real[:, -columns:, None]
            states, own_states = (part[:, :, :columns].transpose(1, 2).flatten(2) for part in (states, own_states))
            torch.testing.assert_close(own_states * kept, states * kept, atol=1e-5, rtol=1e-4)


def test_a_cache_that_does_not_fit_is_refused():
    target, (ids, mask) = tiny_target("llama"), ragged_prompts((7, 4))
    cache, drafter = DynamicCache(config=target.config), tiny_drafter("pard", target)
    options = {"past_key_values": cache, "do_sample": False, "max_new_tokens": 4}
    text = target.generate(ids, attention_mask=mask, **options)
    mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    with pytest.raises(ValueError, match="holds a batch of 2 and input_ids one of 1"):
        target.generate(text[:1], attention_mask=mask[:1], assistant_model=drafter, **options)
    new = torch.cat([random_prompt(14, seed=seed) for seed in range(2)])
    mask = torch.nn.functional.pad(mask, (0, 14), value=1)
    with pytest.raises(ValueError, match="pass the whole text in input_ids"):
        target.generate(new, attention_mask=mask, assistant_model=drafter, **options)
