"""The hook changes calls with our drafters, and no others."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, GenerationMixin

from hf_pardraft.generation import hooks, settings
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

PROMPT = random_prompt(5)
OPTIONS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def without_hook():
    hooks.uninstall()
    yield
    hooks.install()


def test_installing_twice_changes_nothing_and_uninstalling_restores():
    installed = {name: vars(GenerationMixin)[name] for name in hooks.HOOKED}
    hooks.install()
    assert {name: vars(GenerationMixin)[name] for name in hooks.HOOKED} == installed
    hooks.uninstall()
    try:
        assert all(getattr(GenerationMixin, name).__module__.startswith("transformers") for name in hooks.HOOKED)
    finally:
        hooks.install()


def test_an_ordinary_assistant_decodes_as_before(tmp_path, monkeypatch, as_transformers_loads):
    said = []
    monkeypatch.setattr(hooks.logger, "warning_once", said.append)
    target, assistant = tiny_target("llama"), tiny_target("llama", seed=1, num_hidden_layers=1)
    expected = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **OPTIONS), expected)
    assert said == []
    # A PARD checkpoint that plain transformers loaded is an ordinary assistant too, and hardly what was meant.
    tiny_drafter("pard", target).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(target.generate(PROMPT, assistant_model=plain, **OPTIONS), expected)
    assert ["AutoDrafter.from_pretrained" in text for text in said] == [True]


@pytest.mark.parametrize("kind", ["dflash", "dflare"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
def test_transformers_own_dflash_decoding_drives_a_block_drafter(without_hook, architecture, kind):
    target = tiny_target(architecture)
    drafter = tiny_drafter(kind, target)
    expected = target.generate(PROMPT, **OPTIONS)
    out = target.generate(PROMPT, assistant_model=drafter, speculation_type="dflash", **OPTIONS)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["dflash", "dflare"])
def test_transformers_own_dflash_decoding_gets_the_drafts_that_our_loop_gets(without_hook, kind):
    """Both loops see the same logits from the same cache: count the drafts of a drafter that copies the embedding."""
    target = tiny_target("llama")
    drafter, hidden = tiny_drafter(kind, target), []
    drafter.norm.register_forward_hook(lambda _module, _args, output: hidden.append(output[:, 1:]))
    target.generate(PROMPT, assistant_model=drafter, speculation_type="dflash", **OPTIONS)
    stock = list(hidden)
    hidden.clear()
    hooks.install()
    target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    assert len(hidden) > 3
    for found, expected in zip(hidden, stock, strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_speculation_type_asks_for_transformers_own_way_even_with_the_hook():
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    out = target.generate(PROMPT, assistant_model=drafter, speculation_type="dflash", **OPTIONS)
    assert torch.equal(out, target.generate(PROMPT, **OPTIONS))
    assert drafter.last_stats is None


def test_stats_of_the_stock_loop_count_its_rounds():
    target = tiny_target("llama")
    expected = target.generate(PROMPT, **OPTIONS)
    drafter = make_oracle(tiny_drafter("pard", target), expected[0], rates=[1.0] * 4)
    drafter.generation_config.decode_loop = "stock"
    target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    assert sum(drafter.last_stats.tokens_per_round) == 12


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager")}]
)
@pytest.mark.parametrize("loop", ["native", "stock"])
def test_a_calls_settings_are_read_once(monkeypatch, loop, options):
    if loop == "stock" and options:
        pytest.skip("transformers' own loop has no compiled rounds")
    target, prompt, read = tiny_target("llama"), random_prompt(5), []
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.decode_loop = loop
    original = hooks.read_settings
    for module in (hooks, settings):
        monkeypatch.setattr(module, "read_settings", lambda *args: read.append(args) or original(*args))
    target.generate(prompt, assistant_model=drafter, max_new_tokens=8, pad_token_id=0, **options)
    assert len(read) == 1
