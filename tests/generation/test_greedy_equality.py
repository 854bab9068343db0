"""Greedy decoding with a drafter writes exactly what plain `generate` writes."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tiny_models import (
    ARCHITECTURES,
    every_architecture,
    greedy_text,
    make_oracle,
    random_prompt,
    tiny_drafter,
    tiny_target,
)

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
# Where a text is cut is the loop's affair: it is enough to see it with one drafter that taps, and one that doesn't, and with a
# target of which every layer keeps all, and one of which some forget.
TWO_KINDS = KINDS[:2]
with_two_targets = pytest.mark.parametrize("target", ["llama", "gemma3"], indirect=True)
LONGEST = 20


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def text(target):
    """What it writes after seven tokens."""
    return plain(target, random_prompt(7), max_new_tokens=LONGEST)


def plain(target, prompt, **options):
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


def drafted(target, prompt, drafter, **options):
    return plain(target, prompt, assistant_model=drafter, **options)


@pytest.mark.parametrize(("architecture", "kind"), every_architecture(KINDS))
@pytest.mark.parametrize("prompt_length", [1, 11])
def test_untrained_and_oracle_drafters_leave_the_text_as_it_is(architecture, kind, prompt_length):
    target, prompt = tiny_target(architecture), random_prompt(prompt_length)
    expected = greedy_text(architecture, prompt_length, LONGEST)
    untrained = tiny_drafter(kind, target)
    assert torch.equal(drafted(target, prompt, untrained, max_new_tokens=LONGEST), expected)
    oracle = make_oracle(tiny_drafter(kind, target), expected[0], rates=[0.9, 0.7, 0.7, 0.5])
    assert torch.equal(drafted(target, prompt, oracle, max_new_tokens=LONGEST), expected)
    assert oracle.last_stats.tau > 1.2


@with_two_targets
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_every_length_is_cut_at_the_same_token(target, kind):
    prompt = random_prompt(5)
    expected = plain(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tiny_drafter(kind, target), expected[0], rates=[1.0, 1.0, 0.8, 0.8])
    for length in range(1, LONGEST + 1):
        out = drafted(target, prompt, drafter, max_new_tokens=length)
        assert torch.equal(out, expected[:, : 5 + length])
        assert max(drafter.last_stats.drafted_per_round) < max(length, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_drafter_commits_whole_drafts(kind):
    target = tiny_target("llama")
    prompt = random_prompt(6)
    expected = plain(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tiny_drafter(kind, target), expected[0], rates=[1.0] * 4)
    assert torch.equal(drafted(target, prompt, drafter, max_new_tokens=LONGEST), expected)
    # PARD drafts behind the bare prompt; the others have to wait for the target to read it.
    first = [5] if kind == "pard" else [1]
    stats = drafter.last_stats
    assert stats.tokens_per_round[:3] == [*first, 5, 5][:3]
    assert sum(stats.tokens_per_round) == LONGEST


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_whose_config_has_names_of_its_own(kind):
    """GPT-2 says `n_embd` for `hidden_size`, and has learned positions."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    target, prompt = AutoModelForCausalLM.from_config(config).eval(), random_prompt(6)
    expected = plain(target, prompt, max_new_tokens=LONGEST)
    for budget in (0, 8):
        drafter = make_oracle(tiny_drafter(kind, target), expected[0], rates=[0.8] * 4, runner_up=0.7)
        drafter.generation_config.tree_budget = budget
        assert torch.equal(drafted(target, prompt, drafter, max_new_tokens=LONGEST), expected)


@functools.cache
def text_until(target, *ends):
    """What plain `generate` writes after four tokens."""
    return plain(target, random_prompt(4), max_new_tokens=LONGEST, eos_token_id=[*ends] or None)


def assert_ends_where_plain_generate_ends(target, drafter):
    """With each written token in turn as the end of text, among others."""
    for token in text_until(target)[0, 4:].tolist():
        options = {"max_new_tokens": LONGEST, "eos_token_id": [token, 62]}
        assert torch.equal(drafted(target, random_prompt(4), drafter, **options), text_until(target, token, 62))


@with_two_targets
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_end_of_text_is_found_at_every_position_of_a_block(target, kind):
    drafter = make_oracle(tiny_drafter(kind, target), text_until(target)[0], rates=[1.0] * 4)
    assert_ends_where_plain_generate_ends(target, drafter)


@pytest.mark.parametrize("target", ["qwen3"], indirect=True)
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_the_stock_loop_finds_the_end_of_text_too(target, kind):
    drafter = make_oracle(tiny_drafter(kind, target), text_until(target)[0], rates=[1.0] * 4)
    drafter.generation_config.decode_loop = "stock"
    assert_ends_where_plain_generate_ends(target, drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_loop_writes_the_same_text(target, text, kind):
    drafter = make_oracle(tiny_drafter(kind, target), text[0], rates=[0.8] * 4)
    drafter.generation_config.decode_loop = "stock"
    assert torch.equal(drafted(target, random_prompt(7), drafter, max_new_tokens=LONGEST), text)
    assert drafter.last_stats.tau > 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", ["native", "stock"])
def test_masked_out_prompt_columns_change_nothing(kind, loop):
    target = tiny_target("llama")
    prompt = random_prompt(9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    expected = target.generate(prompt, **options)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.decode_loop = loop
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_attention_and_float64_agree_too(kind):
    target = tiny_target("mistral").double()
    target.set_attn_implementation("eager")
    prompt = random_prompt(8)
    expected = plain(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tiny_drafter(kind, target), expected[0], rates=[0.8] * 4)
    assert torch.equal(drafted(target, prompt, drafter, max_new_tokens=LONGEST), expected)
