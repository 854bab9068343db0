"""Simulated acceptance: the profile that was asked for comes out, in every loop, at every temperature, in any shape."""

import pytest
import torch

from acceptance_profile import AcceptanceProfile, expected_tau, rate_for_tau, read_profile
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.entries import Entry, plain_entry
from hf_pardraft.evaluation.measurement import measure
from hf_pardraft.evaluation.rows import summarise
from simulation import Simulation, fair_simulation, write_script
from tiny_models import VOCAB_SIZE, random_prompt, tiny_drafter, tiny_target

PROFILE = AcceptanceProfile(by_position=(0.8, 0.6, 0.5, 0.2))
TOKENS = 200


def simulated(kind, settings, condition, profile=PROFILE, runner_up=0.0, architecture="qwen3", prompts=1):
    # What it would write itself is not seen: two layers, one with a window in Gemma, do.
    target = tiny_target(architecture, max_position_embeddings=1024, num_hidden_layers=2)
    script = write_script(VOCAB_SIZE, 1000, avoid={0, 1})
    simulation = Simulation(target, script, profile, runner_up)
    entries = [plain_entry(), Entry(kind, tiny_drafter(kind, target), settings)]
    texts = [random_prompt(5 + index, seed=index) for index in range(prompts)]
    plain, measured = measure(target, entries, texts, condition, simulation.during)
    return script, plain, measured, summarise(measured, plain, condition)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("pard", {}),
        ("dflash", {}),
        ("dflare", {"tree_budget": 8}),
        ("dart", {}),
        ("pard", {"decode_loop": "stock"}),
        ("dflash", {"speculation_type": "dflash"}),
    ],
)
def test_every_loop_accepts_as_often_as_it_is_told(kind, settings):
    condition = Condition(max_new_tokens=TOKENS, repeats=1)
    script, plain, _, row = simulated(kind, settings, condition)
    assert list(plain.runs[0][0].texts[0]) == script.right[5 : 5 + TOKENS].tolist()
    assert row.identical
    assert row.tau == pytest.approx(expected_tau(PROFILE.rates(4)), rel=0.2)
    if row.acceptance_by_position is not None:
        assert row.acceptance_by_position == pytest.approx(PROFILE.by_position, abs=0.15)


def test_every_loop_meets_the_same_luck():
    condition = Condition(max_new_tokens=60, repeats=1)
    loops = ({}, {"tree_budget": 4, "tree_beam_width": 1, "tree_top_k": 1})
    taus = {simulated("dflash", loop, condition)[3].tau for loop in loops}
    taus.add(simulated("dflash", {"speculation_type": "dflash"}, condition)[3].tau)
    assert len(taus) == 1


def test_luck_can_be_known_before_and_chosen_to_be_fair():
    target = tiny_target(max_position_embeddings=1024)
    script = write_script(VOCAB_SIZE, 200, avoid={0, 1})
    simulation = fair_simulation(target, script, PROFILE, 0.0, first=5, last=105, depth=4)
    assert simulation.tau(5, 105, 4) == pytest.approx(expected_tau(PROFILE.rates(4)), rel=0.01)
    entries = [plain_entry(), Entry("dflash", tiny_drafter("dflash", target))]
    condition = Condition(max_new_tokens=101, repeats=1)
    _, measured = measure(target, entries, [random_prompt(5)], condition, simulation.during)
    # The first round reads the prompt, and the last is cut short.
    counts = measured.watched[0].tokens_per_round[1:-1]
    assert sum(counts) / len(counts) == pytest.approx(simulation.tau(5, 5 + sum(counts), 4))


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_a_temperature_changes_nothing(verification):
    condition = Condition(temperature=1.0, max_new_tokens=TOKENS, repeats=1)
    _, _, measured, row = simulated("pard", {"verification": verification}, condition)
    assert row.tau == pytest.approx(expected_tau(PROFILE.rates(4)), rel=0.2)
    assert len(measured.runs[0][0].texts[0]) == TOKENS


def test_items_of_a_batch_each_follow_the_script():
    condition = Condition(batch_size=3, max_new_tokens=60, repeats=1)
    script, _, measured, row = simulated("dflash", {}, condition, architecture="gemma3", prompts=3)
    for index, text in enumerate(measured.runs[0][0].texts):
        assert list(text) == script.right[5 + index : 65 + index].tolist()
    assert row.tau == pytest.approx(expected_tau(PROFILE.rates(4)), rel=0.2)


def test_second_choices_help_trees_alone():
    condition = Condition(max_new_tokens=80, repeats=1)
    profile = AcceptanceProfile(rate=0.5)
    chain = simulated("pard", {}, condition, profile, runner_up=0.9)[3]
    tree = simulated("pard", {"tree_budget": 12}, condition, profile, runner_up=0.9)[3]
    assert chain.tau == pytest.approx(expected_tau([0.5] * 4), rel=0.2)
    assert tree.tau > 1.2 * chain.tau


def test_the_models_are_left_as_they_were():
    target = tiny_target()
    drafter, prompt = tiny_drafter("dflash", target), random_prompt(5)
    before = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10)
    simulation = Simulation(target, write_script(VOCAB_SIZE, 100, set()), PROFILE)
    for setting in ({}, {"speculation_type": "dflash"}):
        with pytest.raises(KeyError), simulation.during(Entry("x", drafter, setting)):
            raise KeyError
    after = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10)
    assert torch.equal(before, after)
    assert "draft" not in vars(drafter)


def test_profiles_as_they_are_typed(tmp_path):
    assert read_profile(["0.7"]).rates(3) == [0.7] * 3
    assert read_profile(["0.8", "0.4", "0"]).rates(3) == pytest.approx([0.8, 0.5, 0.0])
    assert read_profile(["0.8", "0.4"]).rates(1) == [0.8]
    assert expected_tau(read_profile(["tau=2.5"]).rates(7)) == pytest.approx(2.5)
    assert expected_tau([0.5, 0.5]) == 1.75
    measured = read_profile(["0.8", "0.4", "0"])
    assert read_profile(["0.8,0.4,0"]) == read_profile(["0.8,", "0.4", "0"]) == measured
    for content in ("[0.8, 0.4, 0]", "0.8\n0.4\n0\n", "0.8 0.4 0"):
        (tmp_path / "profile").write_text(content)
        assert read_profile([str(tmp_path / "profile")]) == measured
    for typed in ("0.7", "tau=2.5", "0.8 0.4 0"):
        assert str(read_profile(typed.split())) == typed
    assert rate_for_tau(1.0, 4) == pytest.approx(0.0, abs=1e-9)
    assert rate_for_tau(5.0, 4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["1.2"], "between 0 and 1"),
        (["often"], "expected a number, got 'often'"),
        (["0.5", "0.6"], "can't rise"),
        (["tau=0.5"], "at least one token"),
        (["nan"], "between 0 and 1"),
        ([], "between 0 and 1"),
    ],
)
def test_a_profile_that_can_not_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        read_profile(values)


def test_a_profile_has_to_say_something_about_every_position():
    with pytest.raises(ValueError, match="2 positions, and 3 tokens are drafted"):
        read_profile(["0.5", "0.4"]).rates(3)
    with pytest.raises(ValueError, match="tau of at most 4"):
        read_profile(["tau=6"]).rates(3)
