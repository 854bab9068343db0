"""What becomes of drafted tokens: against loops, against Table 1's identity, and in real rounds."""

import random

import pytest
import torch
from transformers import GenerationConfig

from hf_pardraft.evaluation.utilisation import (
    Utilisation,
    acceptance_by_position,
    correct_by_position,
    utilisation,
)
from hf_pardraft.generation.stats import Proposal
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target


def chain(tokens, num_accepted, num_before=0, item=0, num_committed=None):
    committed = num_accepted + 1 if num_committed is None else num_committed
    return Proposal(item, num_before, tuple(tokens), tuple(range(1, len(tokens) + 1)), num_accepted, committed)


def test_a_block_by_hand():
    # Right, right, wrong, right, wrong, right: two and the bonus token are kept, two right ones are thrown away.
    text = [5, 6, 7, 8, 9, 10, 11]
    split = utilisation([chain([5, 6, 0, 8, 0, 10], num_accepted=2)], [text])
    assert split == Utilisation(slots=7, accepted=3, correct=5)
    assert (split.accept_share, split.correct_share, split.waste_share) == pytest.approx((3 / 7, 5 / 7, 2 / 5))
    # Table 1: accept = correct * (1 - waste).
    assert split.accept_share == pytest.approx(split.correct_share * (1 - split.waste_share))


def test_slots_beyond_the_end_of_the_text_do_not_count():
    # The text ends with the second drafted token, so there is no bonus token, and nobody knows what came third.
    assert utilisation([chain([5, 6, 7], 2, num_committed=2)], [[5, 6]]) == Utilisation(2, 2, 2)
    # The end came inside what was accepted.
    assert utilisation([chain([5, 6, 7], 3)], [[5, 6]]) == Utilisation(2, 2, 2)
    assert utilisation([], []).waste_share is None


def test_a_tree_counts_every_node():
    # Two first tokens, below each the right second one: of the two, one is accepted and the other wasted.
    tree = Proposal(0, 1, (5, 6, 7, 7), (1, 1, 2, 2), 2, 3)
    assert utilisation([tree], [[4, 5, 7, 8]]) == Utilisation(slots=5, accepted=3, correct=4)
    assert acceptance_by_position([tree]) == [1.0, 1.0]
    assert correct_by_position([tree], [[4, 5, 7, 8]]) == [1.0, 1.0]


def looped_split(proposals, texts):
    """Slot by slot, as the caption of Table 1 says it."""
    slots = accepted = correct = 0
    for proposal in proposals:
        text, still_right = texts[proposal.item], True
        for k, token in enumerate(proposal.tokens):
            if proposal.num_before + k >= len(text):
                break
            slots += 1
            is_right = token == text[proposal.num_before + k]
            still_right = still_right and is_right
            correct += is_right
            accepted += still_right
        run = 0
        while run < len(proposal.tokens) and proposal.num_before + run < len(text):
            if proposal.tokens[run] != text[proposal.num_before + run]:
                break
            run += 1
        if proposal.num_before + run < len(text):
            slots, accepted, correct = slots + 1, accepted + 1, correct + 1
    return Utilisation(slots, accepted, correct)


@pytest.mark.parametrize("seed", range(5))
def test_random_rounds_agree_with_a_loop(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(5, 30))] for _ in range(3)]
    proposals = []
    for item, text in enumerate(texts):
        num_before = 0
        while num_before < len(text):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
            num_accepted = 0
            for token, truth in zip(tokens, text[num_before:], strict=False):
                if token != truth:
                    break
                num_accepted += 1
            committed = min(num_accepted + 1, len(text) - num_before)
            proposals.append(chain(tokens, num_accepted, num_before, item, committed))
            num_before += committed
    assert utilisation(proposals, texts) == looped_split(proposals, texts)
    for position, rate in enumerate(acceptance_by_position(proposals), start=1):
        deep = [p for p in proposals if len(p.tokens) >= position]
        assert rate == pytest.approx(sum(p.num_accepted >= position for p in deep) / len(deep))


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 6}, {"decode_loop": "stock"}])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_real_rounds_are_recorded_as_they_went(kind, settings):
    target = tiny_target("qwen3")
    prompt, options = random_prompt(6), {"do_sample": False, "max_new_tokens": 24}
    plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    drafter = make_oracle(tiny_drafter(kind, target), plain[0], rates=[0.8] * 4, runner_up=0.5)
    config = GenerationConfig(record_drafts=True, **settings, **options)
    mask = torch.ones_like(prompt)
    target.generate(prompt, attention_mask=mask, assistant_model=drafter, generation_config=config)
    text, stats = plain[0, 6:].tolist(), drafter.last_stats
    assert sum(stats.drafted_per_round) == sum(len(p.tokens) for p in stats.proposals) > 0
    assert [p.num_accepted for p in stats.proposals] == [
        a for a, d in zip(stats.accepted_per_round, stats.drafted_per_round, strict=True) if d
    ]
    for proposal in stats.proposals:
        for depth in range(1, proposal.num_accepted + 1):
            level = [t for t, d in zip(proposal.tokens, proposal.depths, strict=True) if d == depth]
            assert text[proposal.num_before + depth - 1] in level
    if "tree_budget" not in settings:
        assert utilisation(stats.proposals, [text]) == looped_split(stats.proposals, [text])


def test_items_of_a_batch_are_told_apart():
    target = tiny_target("llama")
    prompts = torch.cat([random_prompt(6, seed=1), random_prompt(6, seed=2)])
    config = GenerationConfig(do_sample=False, max_new_tokens=20, record_drafts=True)
    options = {"attention_mask": torch.ones_like(prompts), "generation_config": config}
    plain = target.generate(prompts, **options)
    drafter = make_oracle(tiny_drafter("pard", target), list(plain), rates=[0.7] * 4)
    target.generate(prompts, assistant_model=drafter, **options)
    texts = plain[:, 6:].tolist()
    proposals = drafter.last_stats.proposals
    assert {p.item for p in proposals} == {0, 1}
    assert utilisation(proposals, texts) == looped_split(proposals, texts)


def test_nothing_is_recorded_unless_asked():
    target = tiny_target("llama")
    drafter, prompt = tiny_drafter("pard", target), random_prompt(6)
    target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, max_new_tokens=8)
    assert drafter.last_stats.proposals == []
