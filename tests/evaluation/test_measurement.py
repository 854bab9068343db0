"""Entries take turns, repeats draw the same, and what was measured survives what can't be."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from compiled_cases import HOUR, compile_slowly
from hf_pardraft import PardDrafter
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.entries import COMPILED, Entry, plain_entry, prompt_lookup_entry
from hf_pardraft.evaluation.measurement import measure, race
from hf_pardraft.evaluation.report import Report
from hf_pardraft.evaluation.rows import compare, summarise
from hf_pardraft.evaluation.runner import evaluate_conditions
from hf_pardraft.user_input.models import up_to_end
from tiny_models import random_prompt, tiny_drafter, tiny_target

PROMPTS = [random_prompt(4, seed=1), random_prompt(6, seed=2)]


def entries_for(target):
    return [plain_entry(), Entry("drafted", tiny_drafter("dflash", target))]


def test_entries_are_warmed_up_take_turns_and_are_watched_in_the_end():
    target, calls = tiny_target(), []

    @contextmanager
    def noted(entry):
        calls.append(entry.name)
        yield

    measured = measure(target, entries_for(target), PROMPTS, Condition(max_new_tokens=3, repeats=2), noted)
    assert calls == ["plain", "drafted"] * (1 + len(PROMPTS) * 2 + 1)
    for each in measured:
        assert [len(repeats) for repeats in each.runs] == [2, 2]
        assert len(each.watched) == 2
        assert all(run.seconds > 0 for repeats in each.runs for run in repeats)


def test_compiling_counts_nowhere(monkeypatch):
    """Neither in the calls that are timed, nor in the parts of those that are watched, nor for a last batch of another size."""
    compile_slowly(monkeypatch)
    target = tiny_target()
    prompts = [random_prompt(5, seed) for seed in range(3)]
    drafted = Entry("drafted", tiny_drafter("dflash", target), COMPILED)
    condition = Condition(batch_size=2, max_new_tokens=6, repeats=1)
    _, measured = measure(target, [plain_entry(), drafted], prompts, condition)
    assert [len(watched.texts) for watched in measured.watched] == [2, 1]
    assert all(sum(watched.seconds.values()) < HOUR / 2 for watched in measured.watched)
    assert all(run.seconds < HOUR / 2 for runs in measured.runs for run in runs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repeats_write_the_same(temperature):
    target = tiny_target()
    condition = Condition(batch_size=2, temperature=temperature, max_new_tokens=8, repeats=2)
    plain, drafted = measure(target, entries_for(target), PROMPTS, condition)
    for each in (plain, drafted):
        first, second = each.runs[0]
        assert first.texts == second.texts == each.watched[0].texts
    assert plain.runs[0][0].texts == drafted.runs[0][0].texts


def test_every_round_is_counted():
    target = tiny_target()
    entries = [*entries_for(target), prompt_lookup_entry()]
    for each in measure(target, entries, PROMPTS[:1], Condition(max_new_tokens=12, repeats=1)):
        watched = each.watched[0]
        assert sum(watched.tokens_per_round) == len(watched.texts[0]) == 12
        assert len(watched.tokens_per_round) == watched.rounds


def test_what_was_measured_survives_what_can_not_be():
    target, report = tiny_target(), Report({})
    entries = [*entries_for(target), prompt_lookup_entry()]
    rows_seen = []

    @contextmanager
    def out_of_memory_in_the_second(entry):
        if len(rows_seen) == 2:
            raise torch.OutOfMemoryError("too many")
        yield

    conditions = [Condition(batch_size=size, max_new_tokens=4, repeats=1) for size in (1, 2)]
    for _ in evaluate_conditions(target, entries, PROMPTS, conditions, report, out_of_memory_in_the_second):
        rows_seen.append(len(report.rows))
    assert rows_seen == [0, 3, 3]
    assert [row.name for row in report.rows] == ["plain", "drafted", "prompt lookup"]
    reasons = {entry["name"]: entry["reason"] for entry in report.skipped}
    assert reasons["drafted"] == "out of memory"
    assert "one text at a time" in reasons["prompt lookup"]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_entries_are_compared_by_the_clock_alone(batch_size):
    target, condition = tiny_target(), Condition(batch_size, max_new_tokens=6, repeats=2)
    raced = race(target, entries_for(target), PROMPTS, condition)
    assert not any(each.watched for each in raced)
    rows = compare(raced, condition)
    assert [row.name for row in rows] == ["plain", "drafted"]
    assert (rows[0].speedup, rows[0].tau) == (1.0, 1.0)
    assert all(row.identical and row.tokens_per_second > 0 and row.tau >= 1 for row in rows)


def test_what_is_sampled_is_another_text_on_each_batch_and_the_same_in_every_repeat():
    target = tiny_target()
    # What the target's own settings would cut the law short by.
    target.generation_config.top_k = 1
    entries = [*entries_for(target), Entry("tree", tiny_drafter("pard", target), {"tree_budget": 6})]
    condition = Condition(max_new_tokens=12, repeats=2, temperature=1.0)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    raced = race(target, entries, PROMPTS[:1] * 2, condition)
    assert torch.equal(torch.get_rng_state(), state)
    for each in raced:
        first, second = ([run.texts for run in repeats] for repeats in each.runs)
        assert first[0] == first[1] != second[0] == second[1]
    rows = compare(raced, condition)
    assert [row.identical for row in rows] == [None] * 3
    assert rows[0].tau == 1.0
    assert all(row.tokens_per_second > 0 and row.tau >= 1 for row in rows)
    later = race(target, entries, PROMPTS[:1], Condition(max_new_tokens=12, repeats=1, temperature=1.0, seed=1))
    assert [each.runs[0][0].texts for each in later] == [each.runs[1][0].texts for each in raced]


def test_padding_after_an_end_of_text_is_not_counted():
    assert up_to_end([4, 5, 2, 0, 0], {2}) == [4, 5, 2]
    assert up_to_end([4, 5], {2}) == [4, 5]


@pytest.mark.parametrize("asked", ["another", "none"])
def test_what_ends_a_text_is_what_the_call_says_and_not_the_target(asked):
    target = tiny_target()
    text = target.generate(PROMPTS[0], do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    end, place = next((token, place) for place, token in enumerate(text) if 2 < place < 9 and token not in text[:place])
    target.generation_config.eos_token_id = end if asked == "none" else 0
    arguments = {"eos_token_id": -1 if asked == "none" else end, "pad_token_id": 1}
    condition = Condition(batch_size=2, max_new_tokens=12, repeats=1, generate_arguments=arguments)
    for each in race(target, entries_for(target), PROMPTS, condition):
        first, second = each.runs[0][0].texts
        assert list(first) == (text if asked == "none" else text[: place + 1])
        assert len(second) == 12


def test_what_drafts_as_it_pays_is_counted_at_full_depth_too():
    target = tiny_target("qwen3")
    drafter = PardDrafter.from_causal_lm(target, mask_token_id=63)
    drafter.generation_config.num_assistant_tokens = 4
    schedules = {name: Entry(name, drafter, {"draft_schedule": name}) for name in ("auto", "fixed")}
    condition = Condition(max_new_tokens=16, repeats=1)
    plain, auto, fixed = measure(target, [plain_entry(), *schedules.values()], PROMPTS, condition)
    rows = [summarise(each, plain, condition) for each in (plain, auto, fixed)]
    assert rows[2].tau > 1.2
    assert [row.full_depth_tau for row in rows] == [None, rows[2].tau, None]
    assert all(row.identical for row in rows)
    assert auto.entry.setting == {"draft_schedule": "auto"}
    # What is written there has to be plain's, too.
    auto.at_full_depth[0] = replace(auto.at_full_depth[0], texts=((1,),))
    assert not summarise(auto, plain, condition).identical
