"""From the same state of torch's generator, sampling with a drafter writes plain `generate`'s text, and leaves the same state."""

from functools import partial

import pytest
import torch

import sampled_cases
from hf_pardraft import DartDrafter, NgramModel
from pairwise import every_two_meet
from sampled_cases import (
    BUDGETS,
    KINDS,
    another,
    assert_every_drafter_writes_it,
    assert_plain_text,
    call,
    knowing,
    seeded,
    unpadded,
    untrained,
)
from tiny_models import (
    ARCHITECTURES,
    batch_of,
    every_architecture,
    every_pair_with_a_budget,
    make_lasting_oracle,
    tiny_drafter,
    tiny_target,
)
from unusual_targets import HYBRIDS, ROPE_TARGETS, fresh, hybrid_target

# Three layers are of all kinds, have taps that are mixed, and take a fifth less time than four.
double_target = partial(sampled_cases.double_target, num_hidden_layers=3)

LAWS = {
    "temperature 0.3": {"temperature": 0.3},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.9},
    "several": {"top_k": 30, "top_p": 0.95, "temperature": 1.3, "suppress_tokens": [5, 9]},
    "epsilon, eta": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
}


@pytest.mark.parametrize(
    ("architecture", "kind", "budget"), every_pair_with_a_budget(every_architecture((*KINDS, "pard2")), BUDGETS)
)
def test_a_seed_gives_the_text_of_plain_generate(architecture, kind, budget):
    target = double_target(architecture)
    for lengths in ((7,), (9, 3, 6)):
        assert_every_drafter_writes_it(target, batch_of(*lengths), kind, budget)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_these_targets_have_much_to_choose_from(architecture):
    """Another seed gives another text, nearly everywhere: what is the same for one seed is no accident."""
    target, batch = double_target(architecture), batch_of(9, 3, 6)
    texts = [seeded(target, batch, seed)[0][:, 9:] for seed in (7, 8)]
    assert (texts[0] == texts[1]).float().mean() < 0.25


@pytest.mark.parametrize(("law", "kind", "budget"), every_two_meet(LAWS, ["pard", "dflash"], BUDGETS))
def test_warped_laws_are_drawn_from_as_plain_generate_draws(law, kind, budget):
    target = double_target()
    for lengths in ((6,), (2, 5)):
        assert_every_drafter_writes_it(target, batch_of(*lengths), kind, budget, **LAWS[law])


@pytest.mark.parametrize("budget", BUDGETS)
def test_tiny_targets_in_float32_do_it_too(budget):
    target = tiny_target("qwen3")
    for seed in range(3):
        assert_every_drafter_writes_it(target, batch_of(8, 5), "pard", budget, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_targets(name, kind):
    target = hybrid_target(name).double()
    if name == "qwen3_next":
        target.set_experts_implementation("eager")
    assert_every_drafter_writes_it(target, batch_of(6), kind, budget=0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ROPE_TARGETS)
def test_rotary_embeddings_that_change_on_the_way(name, budget):
    target = ROPE_TARGETS[name]().double()
    if name == "phimoe":
        target.set_experts_implementation("eager")
    for lengths, new in (((21,), 24), ((10, 28), 12), ((33, 20), 9)):
        batch = batch_of(*lengths)
        plain = seeded(fresh(target), batch, max_new_tokens=new)
        drafter = knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), budget)
        assert_plain_text(fresh(target), batch, drafter, plain, max_new_tokens=new)
        if lengths == (21,) and name != "dynamic":
            assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("vocab_size", [17, 999, 4096, 50257])
def test_vocabularies_of_any_size(vocab_size):
    """Of how many numbers are drawn at once it depends how some generators draw them."""
    target = double_target(vocab_size=vocab_size, hidden_size=16)
    batch = {name: ids.clamp(max=vocab_size - 1) for name, ids in batch_of(5, 4, 3).items()}
    plain = seeded(target, batch, max_new_tokens=10)
    drafter = tiny_drafter("dflash", target)
    make_lasting_oracle(drafter, unpadded(plain[0], batch["attention_mask"]), [0.9] * 4)
    assert_plain_text(target, batch, drafter, plain, max_new_tokens=10)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("kind", [*KINDS, "pard2"])
@pytest.mark.parametrize("lengths", [(6,), (3, 7)])
def test_trees_with_an_ngram_model(kind, lengths):
    target, batch = double_target(), batch_of(*lengths)
    plain = seeded(target, batch)
    texts = unpadded(plain[0], batch["attention_mask"])
    for drafter in (untrained(kind, target, 12), knowing(kind, target, texts, 12)):
        for known in (texts, list(map(another, texts))):
            drafter.ngram = NgramModel.from_token_stream(known, vocab_size=64, order=4)
            assert_plain_text(target, batch, drafter, plain)
    assert drafter.last_stats.tau > 1.3


def test_an_ngram_model_that_knows_the_text_is_of_use():
    target, batch = double_target(), batch_of(6)
    plain = seeded(target, batch)
    drafter, taus = untrained("dart", target, 12), []
    drafter.generation_config.ngram_first_level = 0
    for text in (another(plain[0][0]), plain[0][0]):
        drafter.ngram = NgramModel.from_token_stream([text], vocab_size=64, order=4)
        assert_plain_text(target, batch, drafter, plain)
        taus.append(drafter.last_stats.tau)
    assert taus[1] > taus[0] + 0.2


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_drafter_that_knows_some_of_the_tokens(budget):
    target = double_target()
    drafter = DartDrafter.for_target(target, draft_token_ids=list(range(0, 64, 3)), draft_length=3)
    drafter.generation_config.tree_budget = budget
    for law in ({}, LAWS["top-k"], LAWS["several"]):
        for lengths in ((6,), (3, 7)):
            batch = batch_of(*lengths)
            assert_plain_text(target, batch, drafter, seeded(target, batch, **law), **law)
    assert max(drafter.last_stats.drafted_per_round) > 2


def test_the_text_does_not_depend_on_how_much_is_drafted():
    target, batch = double_target(), batch_of(6, 4)
    plain = seeded(target, batch)
    texts = unpadded(plain[0], batch["attention_mask"])
    for depth in (1, 2, 5, 9):
        for budget in (0, 1, 3, 24):
            drafter = knowing("pard", target, texts, budget, rates=[0.8] * depth)
            assert_plain_text(target, batch, drafter, plain)
            assert drafter.last_stats.tau > 1.3


@pytest.mark.parametrize("budget", BUDGETS)
def test_texts_of_every_length(budget):
    target = double_target()
    for lengths in ((6,), (2, 5)):
        batch = batch_of(*lengths)
        longest, _ = seeded(target, batch, max_new_tokens=14)
        drafter = knowing("dflash", target, unpadded(longest, batch["attention_mask"]), budget, rates=[1.0] * 4)
        for length in range(1, 14):
            plain = seeded(target, batch, max_new_tokens=length)
            assert torch.equal(plain[0], longest[:, : plain[0].shape[1]])
            assert_plain_text(target, batch, drafter, plain, max_new_tokens=length)


@pytest.mark.parametrize("budget", BUDGETS)
def test_calls_go_on_from_each_other_whether_drafted_or_not(budget):
    """The generator stands where plain `generate` leaves it, so whatever draws from it next draws the same."""
    target, drafter, found = double_target(), untrained("pard", double_target(), budget), []
    batches = [batch_of(6), batch_of(3, 8, 5), batch_of(2), batch_of(7)]
    for is_drafted in ((False,) * 4, (True,) * 4, (True, False, True, False), (False, True, False, True)):
        torch.manual_seed(11)
        drawn = []
        for batch, drafts in zip(batches, is_drafted, strict=True):
            drawn += [call(target, batch, assistant_model=drafter if drafts else None), torch.rand(3)]
        found.append(drawn)
    for drawn in found[1:]:
        assert all(map(torch.equal, drawn, found[0]))


@pytest.mark.parametrize("lengths", [(6,), (3, 8)])
def test_a_state_that_the_caller_has_set_is_where_it_begins(lengths):
    target, batch = double_target(), batch_of(*lengths)
    drafter = untrained("dflash", target)
    torch.manual_seed(5)
    torch.randn(1234)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    texts = []
    for assistant in (None, drafter):
        torch.set_rng_state(state)
        first = call(target, batch, assistant_model=assistant)
        second = call(target, batch, assistant_model=assistant)
        texts.append((first, second, torch.get_rng_state()))
    expected, found = texts
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])


def test_a_forked_generator_is_the_callers_own_again_afterwards():
    target, batch = double_target(), batch_of(6)
    drafter = untrained("pard", target)
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        plain = seeded(target, batch)
        assert_plain_text(target, batch, drafter, plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_text_takes_no_random_numbers():
    target, batch = double_target(), batch_of(4, 7)
    drafter = untrained("pard", target, 10)
    before = torch.get_rng_state()
    call(target, batch, assistant_model=drafter, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_drafter_without_a_law_costs_drafts_and_nothing_else():
    target, batch = double_target(), batch_of(4, 7)
    plain = seeded(target, batch)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for budget in BUDGETS:
            drafter = untrained("dflash", target, budget)
            draft = drafter.draft
            drafter.draft = lambda *arguments, draft=draft, bad=bad: torch.full_like(draft(*arguments), bad)
            assert_plain_text(target, batch, drafter, plain)
