"""draft_schedule in calls of generate: which calls are scheduled, and that no schedule changes the text."""

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from compiled_cases import assert_same, oracle
from drawn_plans import draw_plans
from hf_pardraft.generation import hooks
from hf_pardraft.generation.dispatch import clock_for
from hf_pardraft.generation.scheduling.fixed import FixedSchedule
from hf_pardraft.generation.scheduling.plans import MOST_NODES, NOTHING, Plan
from hf_pardraft.generation.scheduling.rounds import CompiledRounds, UncompiledRounds
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.settings import read_settings
from tiny_models import batch_of, random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart")
RATES = [0.8, 0.7, 0.7, 0.6]


def options_for(batch, **options):
    return {**batch, "do_sample": False, "max_new_tokens": 40, **options}


@pytest.mark.parametrize("lengths", [(6,), (6, 3, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_drafted_in_each_round_the_text_is_plain_generates(monkeypatch, kind, lengths):
    target, batch = tiny_target("qwen3"), batch_of(*lengths)
    drafter = oracle(kind, target, batch, rates=RATES, settings={"tree_budget": 12}, longest=40)
    plain = target.generate(**options_for(batch))
    draw_plans(monkeypatch)
    assert torch.equal(target.generate(**options_for(batch), assistant_model=drafter), plain)
    assert {0} < {*drafter.last_stats.drafted_per_round}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_drafted_sampled_text_is_plain_generates(monkeypatch, kind):
    target, batch = tiny_target("qwen3"), batch_of(6, 3)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.tree_budget = 12
    draw_plans(monkeypatch)
    texts = []
    for assistant in (None, drafter):
        torch.manual_seed(4)
        texts.append(target.generate(**options_for(batch, do_sample=True, top_k=9), assistant_model=assistant))
    assert torch.equal(*texts)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_rounds_with_and_without_drafts_write_the_same(monkeypatch, kind, budget):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target, batch = tiny_target("qwen3"), batch_of(6, 3)
    drafter = oracle(kind, target, batch, rates=RATES, settings={"tree_budget": budget}, longest=40)
    draw_plans(monkeypatch, is_compiled=True)
    assert_same(target, batch, drafter, max_new_tokens=40)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_automatic_schedule_writes_plain_generates_text_call_after_call(monkeypatch, kind, options):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target, batch = tiny_target("llama"), batch_of(6, 3)
    settings = {"draft_schedule": "auto"}
    drafter = oracle(kind, target, batch, rates=RATES, settings=settings, longest=40)
    plain = target.generate(**options_for(batch))
    for _ in range(3):
        assert torch.equal(target.generate(**options_for(batch, **options), assistant_model=drafter), plain)


def schedules_of(monkeypatch) -> list[Schedule | FixedSchedule]:
    """The schedules of all calls from here on."""
    made, schedule_for = [], hooks.schedule_for

    def noted(*arguments):
        made.append(schedule_for(*arguments))
        return made[-1]

    monkeypatch.setattr(hooks, "schedule_for", noted)
    return made


def test_what_is_known_lasts_from_call_to_call_for_one_pair_and_kind_of_rounds(monkeypatch):
    made, batch = schedules_of(monkeypatch), batch_of(5)
    targets = tiny_target("llama"), tiny_target("llama", seed=3)
    drafter = tiny_drafter("pard", targets[0])
    drafter.generation_config.draft_schedule = "auto"
    for target in (targets[0], targets[0], targets[1]):
        target.generate(**options_for(batch), assistant_model=drafter)
    for temperature in (0.7, 0.72, 1.0, 1e9):
        targets[0].generate(**options_for(batch, do_sample=True, temperature=temperature), assistant_model=drafter)
    same, again, other, sampled, alike, warm, hot = (schedule.knowledge for schedule in made)
    assert same is again
    # Else a client of a server who never asks for the same temperature twice would begin anew each time.
    assert sampled is alike
    assert len({id(knowledge) for knowledge in (same, other, sampled, warm, hot)}) == 5


def test_what_asks_for_compiled_rounds_and_cannot_have_them_is_scheduled_as_uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    made, target, batch = schedules_of(monkeypatch), tiny_target("llama"), batch_of(5)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    static = {"cache_implementation": "static", "return_dict_in_generate": True}
    for options in ({}, static, {**static, "output_hidden_states": True}):
        target.generate(**options_for(batch, **options), assistant_model=drafter)
    uncompiled, compiled, fallen_back = made
    assert fallen_back.knowledge is uncompiled.knowledge is not compiled.knowledge
    assert [type(schedule.rounds) for schedule in made] == [UncompiledRounds, CompiledRounds, UncompiledRounds]
    # As many nodes as uncompiled rounds may read, not those of the one tree that would be compiled.
    assert fallen_back.plans == uncompiled.plans != compiled.plans


def test_a_call_that_asks_for_a_depth_or_a_budget_gets_just_that(monkeypatch):
    made, target, prompt = schedules_of(monkeypatch), tiny_target("llama"), random_prompt(5)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    for options in ({"num_assistant_tokens": 2}, {"tree_budget": 6}, {"tree_budget": 0}, {"draft_schedule": "fixed"}):
        config = GenerationConfig(max_new_tokens=6, do_sample=False, **options)
        target.generate(prompt, assistant_model=drafter, generation_config=config)
    assert all(isinstance(schedule, FixedSchedule) for schedule in made)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, tree_budget=6, draft_schedule="auto")
    target.generate(prompt, assistant_model=drafter, generation_config=config)
    assert isinstance(made[-1], Schedule)
    assert made[-1].plans[-1] == Plan(4, 6)


@pytest.mark.parametrize(
    ("own", "call", "expected"),
    [
        ({}, {}, ("auto", MOST_NODES, True)),
        ({"tree_budget": 0}, {}, ("auto", 0, False)),
        ({"tree_budget": 9}, {}, ("auto", 9, False)),
        ({"draft_schedule": "fixed"}, {}, ("fixed", 0, False)),
        ({"draft_schedule": "fixed", "tree_budget": 9}, {"draft_schedule": "auto"}, ("auto", 9, False)),
        ({}, {"tree_budget": 9}, ("fixed", 9, False)),
        ({}, {"verification": "rejection"}, ("fixed", 0, False)),
        ({}, {"decode_loop": "stock"}, ("fixed", 0, False)),
        ({}, {"verification": "rejection", "draft_schedule": "auto"}, ("fixed", 0, False)),
    ],
)
def test_which_calls_are_scheduled_and_may_grow_trees(monkeypatch, own, call, expected):
    monkeypatch.setattr("hf_pardraft.generation.settings.DEFAULT_SCHEDULE", "auto")
    drafter = tiny_drafter("dflash", tiny_target("llama"))
    for name, value in own.items():
        setattr(drafter.generation_config, name, value)
    settings = read_settings(drafter, GenerationConfig(**call))
    assert (settings.draft_schedule, settings.tree_budget, settings.may_do_without_trees) == expected


@pytest.mark.parametrize("value", ["adaptive", True, 3])
def test_another_schedule_is_refused_before_any_work(monkeypatch, value):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = value
    monkeypatch.setattr(type(target), "forward", lambda *rest, **more: pytest.fail("the target was run"))
    with pytest.raises(ValueError, match=r"draft_schedule must be one of .*generation config"):
        target.generate(random_prompt(5), assistant_model=drafter, max_new_tokens=6, do_sample=False)


def test_a_target_that_takes_no_trees_gets_chains_unless_trees_were_asked_for(monkeypatch):
    made, target, prompt = schedules_of(monkeypatch), tiny_target("llama"), random_prompt(5)
    target.config._attn_implementation = "flash_attention_2"
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    monkeypatch.setattr(hooks, "_decode", lambda *rest, **more: None)
    target.generate(prompt, assistant_model=drafter, max_new_tokens=6, do_sample=False)
    assert {plan.budget for plan in made[0].plans} == {0}
    drafter.generation_config.tree_budget = 8
    with pytest.raises(ValueError, match="trees and batches need an attention mask"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize(
    ("settings", "plans"),
    [
        ({}, [NOTHING, Plan(2), Plan(4), Plan(4, 16)]),
        ({"tree_budget": 0}, [NOTHING, Plan(2), Plan(4)]),
        ({"tree_budget": 0, "num_assistant_tokens": 1}, [NOTHING, Plan(1)]),
    ],
)
def test_compiled_rounds_choose_among_few_shapes(monkeypatch, settings, plans):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    made, target, batch = schedules_of(monkeypatch), tiny_target("llama"), batch_of(5)
    drafter = tiny_drafter("pard", target)
    for name, value in {"draft_schedule": "auto", **settings}.items():
        setattr(drafter.generation_config, name, value)
    target.generate(**options_for(batch, cache_implementation="static"), assistant_model=drafter)
    assert made[0].plans == plans


def test_ranks_of_a_split_target_decide_alike(monkeypatch):
    made, target, batch = schedules_of(monkeypatch), tiny_target("llama"), batch_of(5)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    monkeypatch.setattr(type(target), "tp_size", 2)
    target.generate(**options_for(batch), assistant_model=drafter)
    assert isinstance(made[0], FixedSchedule)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("end", [None, 7])
def test_a_call_that_is_left_to_plain_generate_is_just_that(monkeypatch, sampling, end):
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target = tiny_target(eos_token_id=end)
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule = "auto"
    options = options_for(batch_of(5, 5, 5), return_dict_in_generate=True, output_scores=True, **sampling)
    torch.manual_seed(3)
    plain = target.generate(**options)
    torch.manual_seed(3)
    found = target.generate(**options, assistant_model=drafter)
    assert torch.equal(found.sequences, plain.sequences)
    assert all(map(torch.equal, found.scores, plain.scores))
    stats, rows = drafter.last_stats, plain.sequences[:, 5:].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
    assert (stats.rounds, sum(stats.tokens_per_round), stats.tau) == (len(rows[0]), sum(lengths), 1.0)
    assert stats.items_per_round == [sum(length > step for length in lengths) for step in range(len(rows[0]))]


def test_rounds_on_a_cpu_are_timed_by_this_threads_own_time(monkeypatch):
    """A machine that does other work must not decide what is drafted."""
    target, drafter = tiny_target("llama"), tiny_drafter("pard", tiny_target("llama"))
    for places in ({}, {"": "cpu"}):
        target.hf_device_map = places
        assert clock_for(target, drafter) is time.thread_time
    target.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert clock_for(target, drafter) is time.perf_counter
    del target.hf_device_map
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(resolution=0.0156))
    assert clock_for(target, drafter) is time.perf_counter
