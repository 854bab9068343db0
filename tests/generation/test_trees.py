"""Decoding with token trees: the same text, the same cache, for every kind of attention."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_pardraft.generation.tree.token_tree import build_tree
from tiny_models import every_architecture, greedy_text, make_oracle, random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
LONGEST = 24


def greedy(target, prompt, **options):
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


def tree_drafter(kind, target, budget=14, depth=5, **settings):
    drafter = tiny_drafter(kind, target, depth=depth)
    drafter.generation_config.tree_budget = budget
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("architecture", "kind"), every_architecture(KINDS))
def test_trees_leave_the_text_as_it_is(architecture, kind, attention):
    if (architecture, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("its attention sinks have no sdpa implementation")
    target = tiny_target(architecture)
    target.set_attn_implementation(attention)
    prompt = random_prompt(9)
    expected = greedy_text(architecture, 9, LONGEST, attention=attention)
    untrained = tree_drafter(kind, target)
    assert torch.equal(greedy(target, prompt, assistant_model=untrained, max_new_tokens=LONGEST), expected)
    oracle = make_oracle(tree_drafter(kind, target), expected[0], [0.6] * 5, runner_up=0.8)
    assert torch.equal(greedy(target, prompt, assistant_model=oracle, max_new_tokens=LONGEST), expected)
    assert oracle.last_stats.tau > 1.8


@pytest.mark.parametrize("settings", [{"tree_beam_width": 2}, {"tree_top_k": 3}, {"budget": 1}, {"budget": 60}])
def test_any_shape_of_tree_leaves_the_text_as_it_is(settings):
    target, prompt = tiny_target("llama"), random_prompt(5)
    expected = greedy(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tree_drafter("pard", target, **settings), expected[0], [0.5] * 5, runner_up=0.9)
    assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST), expected)


def test_a_tree_accepts_more_than_a_chain_of_the_same_drafts():
    target, prompt = tiny_target("qwen3"), random_prompt(5)
    expected = greedy(target, prompt, max_new_tokens=64)
    taus = []
    for budget in (0, 20):
        drafter = make_oracle(tree_drafter("pard", target, budget), expected[0], [0.5] * 5, runner_up=0.9)
        assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=64), expected)
        taus.append(drafter.last_stats.tau)
    assert taus[1] > 1.3 * taus[0]


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_every_length_and_end_of_text_is_cut_at_the_same_token(kind):
    target, prompt = tiny_target("gemma3"), random_prompt(5)
    reference = greedy(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tree_drafter(kind, target), reference[0], [0.7] * 5, runner_up=0.7)
    for length in range(1, LONGEST + 1):
        out = greedy(target, prompt, assistant_model=drafter, max_new_tokens=length)
        assert torch.equal(out, reference[:, : 5 + length])
    for token in set(reference[0, 5:].tolist()):
        options = {"max_new_tokens": LONGEST, "eos_token_id": token}
        expected = greedy(target, prompt, **options)
        assert torch.equal(greedy(target, prompt, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("budget", [0, 14])
def test_the_committed_cache_is_the_cache_of_the_committed_text(architecture, budget):
    target, prompt = tiny_target(architecture), random_prompt(9)
    options = {"max_new_tokens": LONGEST, "return_dict_in_generate": True}
    expected = greedy(target, prompt, **options)
    drafter = make_oracle(tree_drafter("dflash", target, budget), expected.sequences[0], [0.6] * 5, runner_up=0.8)
    found = greedy(target, prompt, assistant_model=drafter, **options)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    for ours, plain in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, plain.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("budget", [0, 14])
def test_scores_logits_states_and_attentions_are_those_of_plain_generate(architecture, budget):
    target, prompt = tiny_target(architecture), random_prompt(6)
    target.set_attn_implementation("eager")
    options = {
        "max_new_tokens": LONGEST,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "no_repeat_ngram_size": 3,
    }
    expected = greedy(target, prompt, **options)
    for kind in KINDS:
        drafter = make_oracle(tree_drafter(kind, target, budget), expected.sequences[0], [0.6] * 5, runner_up=0.8)
        found = greedy(target, prompt, assistant_model=drafter, **options)
        assert torch.equal(found.sequences, expected.sequences)
        for name in ("scores", "logits", "hidden_states", "attentions"):
            assert_alike(found[name], expected[name], name)


def assert_alike(found, expected, name):
    """Nested tuples of tensors agree in shape and value."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape, name
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        return
    assert len(found) == len(expected), name
    for ours, plain in zip(found, expected, strict=True):
        assert_alike(ours, plain, name)


def test_a_call_can_override_what_the_drafter_was_saved_with():
    from transformers import GenerationConfig

    target, prompt = tiny_target("llama"), random_prompt(5)
    drafter = tree_drafter("pard", target, budget=14, depth=5)
    expected = greedy(target, prompt, max_new_tokens=LONGEST)
    for settings, most in (({"tree_budget": 0}, 5), ({"tree_budget": 3, "num_assistant_tokens": 2}, 3), ({}, 14)):
        config = GenerationConfig(max_new_tokens=LONGEST, do_sample=False, **settings)
        out = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, generation_config=config
        )
        assert torch.equal(out, expected)
        assert max(drafter.last_stats.drafted_per_round[1:]) == most


@pytest.mark.parametrize(
    ("do_sample", "default", "other"), [(False, "dart", "probability"), (True, "probability", "dart")]
)
def test_greedy_trees_favour_depth_by_default_and_sampled_ones_probable_prefixes(do_sample, default, other):
    target, prompt = tiny_target("llama"), random_prompt(5)

    def drafted(**settings):
        drafter = tree_drafter("pard", target, record_drafts=True, draft_schedule="fixed", **settings)
        torch.manual_seed(0)
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter,
            do_sample=do_sample,
            max_new_tokens=LONGEST,
        )
        return drafter.last_stats.proposals

    assert drafted() == drafted(tree_scoring=default) != drafted(tree_scoring=other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_settings_are_saved_with_the_drafter(tmp_path, kind):
    from hf_pardraft import AutoDrafter

    drafter = tree_drafter(kind, tiny_target("llama"), budget=14, tree_beam_width=3, draft_schedule="fixed")
    drafter.save_pretrained(tmp_path)
    config = AutoDrafter.from_pretrained(tmp_path).generation_config
    assert (config.tree_budget, config.tree_beam_width, config.draft_schedule) == (14, 3, "fixed")


# Flex attention takes masks, but not on a CPU, where it would end the process.
@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_refuses_trees(attention):
    target = tiny_target("llama")
    target.config._attn_implementation = attention
    drafter = tree_drafter("pard", target)
    with pytest.raises(ValueError, match="attn_implementation"):
        greedy(target, random_prompt(4), assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("masks", [None, "flash_attention_2", "sdpa"])
def test_attention_of_somebodys_own_takes_trees_if_it_is_given_masks_for_all_queries(masks):
    def attend(module, query, key, value, mask, **options):
        causal = torch.ones(1, 1, query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).bool()
        return sdpa_attention_forward(module, query, key, value, mask if masks == "sdpa" else causal, **options)

    name = f"somebodys_{masks}".replace("flash", "fast")
    AttentionInterface.register(name, attend)
    if masks is not None:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    target, prompt = tiny_target("llama"), random_prompt(9)
    target.set_attn_implementation(name)
    expected = greedy(target, prompt, max_new_tokens=LONGEST)
    for budget in (0, 14):
        drafter = make_oracle(tree_drafter("pard", target, budget), expected[0], [0.6] * 5, runner_up=0.8)
        if budget and masks != "sdpa":
            with pytest.raises(ValueError, match=f"{name} does not take"):
                greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST)
        else:
            assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST), expected)


def test_trees_are_built_in_half_precision_too():
    logits = torch.randn(1, 5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert build_tree(logits.float(), 12).num_nodes == 12


@pytest.mark.parametrize("lookup", [0, 6])
@pytest.mark.parametrize("schedule", ["fixed", "auto"])
def test_acceptance_by_position_counts_levels_rather_than_nodes(schedule, lookup):
    target, prompt = tiny_target("llama"), random_prompt(9)
    expected = greedy(target, prompt, max_new_tokens=40)
    settings = {"record_drafts": True, "draft_schedule": schedule, "prompt_lookup_num_tokens": lookup}
    drafter = make_oracle(tree_drafter("dflash", target, **settings), expected[0], [0.6] * 5, runner_up=0.8)
    greedy(target, prompt, assistant_model=drafter, max_new_tokens=40)
    stats = drafter.last_stats
    reached = [(max(proposal.depths), proposal.num_accepted) for proposal in stats.proposals]
    rates = []
    for position in range(1, max(depth for depth, _ in reached) + 1):
        accepted = [count >= position for depth, count in reached if depth >= position]
        rates.append(sum(accepted) / len(accepted))
    assert stats.per_position_acceptance == pytest.approx(rates)
    assert len(stats.depths_per_round) == len(stats.drafted_per_round)
