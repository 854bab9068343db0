"""Drafters in bfloat16: the text stays the target's, and what they draft is compared in float32."""

import pytest
import torch

from compiled_cases import settle
from hf_pardraft.generation.compiled.steps import grow_tree
from hf_pardraft.generation.sequences import TokenBuffer
from hf_pardraft.generation.settings import read_settings
from hf_pardraft.generation.tree.token_tree import build_tree
from hf_pardraft.generation.tree_search import TreeSearch
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
PROMPTS = {1: torch.ones(1, 7, dtype=torch.long), 3: torch.ones(3, 7, dtype=torch.long)}
for index in range(3):
    PROMPTS[3][index] = random_prompt(7, seed=index)[0]
PROMPTS[1] = PROMPTS[3][:1].clone()
LOOPS = {
    "chain": ({}, {}),
    "tree": ({"tree_budget": 8}, {}),
    "automatic": ({"draft_schedule": "auto"}, {}),
    "stock": ({"decode_loop": "stock"}, {}),
    "compiled": ({}, {"cache_implementation": "static"}),
    "compiled tree": ({"tree_budget": 8}, {"cache_implementation": "static"}),
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    settle(monkeypatch)


def written(target, batch, **options):
    prompts = PROMPTS[batch]
    options = {"max_new_tokens": 14, "do_sample": False, **options}
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


def drafter_of(kind, target, dtype, **settings):
    drafter = tiny_drafter(kind, target).to(dtype)
    assert {parameter.dtype for parameter in drafter.parameters()} == {dtype}
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_drafter_leaves_a_float32_target_its_text(kind, loop):
    settings, options = LOOPS[loop]
    target = tiny_target("llama")
    drafter = drafter_of(kind, target, torch.bfloat16, **settings)
    for batch in (1,) if loop == "stock" else (1, 3):
        assert torch.equal(written(target, batch, assistant_model=drafter, **options), written(target, batch))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_pair_writes_what_its_target_finds_likeliest(kind, loop):
    """Near ties may fall either way in bfloat16, where a forward of several tokens rounds otherwise than one of a single one."""
    settings, options = LOOPS[loop]
    target = tiny_target("llama").to(torch.bfloat16)
    drafter = drafter_of(kind, target, torch.bfloat16, **settings)
    text = written(target, 1, assistant_model=drafter, **options)
    assert text.shape == (1, 21)
    with torch.no_grad():
        logits = target(text).logits.float()[:, 6:-1]
    gap = logits.amax(-1) - logits.gather(2, text[:, 7:, None])[..., 0]
    # A bfloat16 number has 8 significant bits, and these logits are sums of some.
    assert float((gap / logits.abs().amax(-1)).max()) < 0.05


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 8}, {"verification": "rejection"}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_pair_samples(kind, settings):
    target = tiny_target("llama").to(torch.bfloat16)
    drafter = drafter_of(kind, target, torch.bfloat16, **settings)
    torch.manual_seed(0)
    assert written(target, 3, assistant_model=drafter, do_sample=True).shape == (3, 21)


def coarse_logits() -> torch.Tensor:
    """Marginals whose sums of log-probabilities are in another order in bfloat16, of which a level has 8 bits."""
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_trees_of_a_bfloat16_draft_are_those_of_its_logits_in_float32():
    logits, target = coarse_logits(), tiny_target("llama")
    drafter = drafter_of("pard", target, torch.bfloat16, tree_budget=12, tree_scoring="probability")
    search = TreeSearch(read_settings(drafter, target.generation_config), drafter)
    exact, rounded = build_tree(logits.float(), budget=12), build_tree(logits, budget=12)
    assert not torch.equal(exact.tokens, rounded.tokens)
    for tree in (search.tree(logits, TokenBuffer(PROMPTS[3][:2]), 12), grow_tree(logits, None, search.arguments(12))):
        assert torch.equal(tree.tokens, exact.tokens)
        assert torch.equal(tree.parents, exact.parents)
