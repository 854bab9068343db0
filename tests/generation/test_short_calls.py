"""Calls that end before drafts make up for what our loop takes to begin are left to plain `generate`."""

import inspect
from contextlib import nullcontext

import pytest
import torch

from hf_pardraft.generation import checks, hooks, plain
from hf_pardraft.generation.scheduling.beginnings import Beginnings
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.pairing import target_checks
from simulated_rounds import PROMPT, World
from tiny_models import random_prompt, tiny_drafter, tiny_target

# Rounds without a draft that take as long as a call is set up in.
SET_UP = 2.0


def call(world: World, num_tokens: int, most: int | None = None, set_up: float = SET_UP) -> bool:
    """A call that writes so many tokens, of `most` that it may write; whether it was found to be too short."""
    schedule = Schedule(world.knowledge, world.plans, Plan(world.depth), lambda: world.now)
    is_short = schedule.ends_too_soon(1, PROMPT, most or num_tokens)
    if is_short or schedule.leaves_to_plain(1, PROMPT):
        world.now += num_tokens * world.pace(0)
        schedule.note_plain(num_tokens)
        return is_short
    world.now += set_up * world.pace(0)
    left = num_tokens
    while left > 0:
        plan = schedule.next_plan(1, left - 1 if left < num_tokens else 0, PROMPT + num_tokens - left)
        world.now += world.cost(plan) * world.pace(0)
        count = world.accepted(plan)[0]
        schedule.note([(count, min(count + 1, plan.depth))] if plan.depth else [])
        schedule.end_round(left < num_tokens, left == num_tokens)
        left -= count + 1
    schedule.learn()
    schedule.end_call(num_tokens)
    return False


@pytest.mark.parametrize(("num_tokens", "set_up", "is_left"), [(4, 2.0, True), (4, 0.1, False), (64, 2.0, False)])
def test_a_call_is_too_short_if_drafts_save_less_than_it_takes_to_begin(num_tokens, set_up, is_left):
    world = World([0.9] * 4, draft=0.3)
    for _ in range(10):
        call(world, 64, set_up=set_up)
    assert [call(world, num_tokens, set_up=set_up) for _ in range(8)].count(True) in ([7, 8] if is_left else [0])


def test_texts_that_end_long_before_they_have_to_are_short():
    world = World([0.9] * 4, draft=0.3)
    for _ in range(20):
        call(world, 4, most=256)
    assert call(world, 4, most=256)
    for _ in range(Beginnings.REMEMBERED):
        call(world, 256, most=256)
    assert not call(world, 256, most=256)


def test_short_calls_of_plain_generate_do_not_say_what_its_steps_take():
    world = World([0.9] * 4, draft=0.3)
    for _ in range(10):
        call(world, 64)
    costs = world.knowledge.costs_for(1)
    before = costs.plain.count
    assert sum(call(world, 4) for _ in range(8)) >= 7
    assert costs.plain.count == before


def test_a_long_prompt_is_read_by_the_drafter_first():
    world = World([0.9] * 4, draft=0.3)
    for _ in range(10):
        call(world, 16, set_up=0.1)
    beginnings, seconds = world.knowledge.beginnings, world.knowledge.costs_for(1).of(NOTHING)
    world.knowledge.purse = 0.0
    schedule = Schedule(world.knowledge, world.plans, Plan(4), lambda: world.now)
    assert not schedule.ends_too_soon(1, 300, 8)
    beginnings.note_reading(20 * seconds, 300)
    assert schedule.ends_too_soon(1, 300, 8)
    assert not schedule.ends_too_soon(1, 8, 8)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_calls_without_room_for_a_draft_are_plain_generates_from_the_first_on(monkeypatch, kind, num_tokens):
    target, prompt = tiny_target(), random_prompt(7)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.draft_schedule = "auto"
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": num_tokens}
    plain = target.generate(prompt, **options)
    monkeypatch.setattr(hooks, "_decode", lambda *args, **kwargs: pytest.fail("our loop began"))
    for _ in range(2):
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
        assert drafter.last_stats.tokens_per_round == [1] * num_tokens
    drafter.generation_config.draft_schedule = "fixed"
    with pytest.raises(pytest.fail.Exception, match="our loop began"):
        target.generate(prompt, assistant_model=drafter, **options)


def test_what_makes_plain_steps_faster_is_not_set_up_for_a_few_of_them(monkeypatch):
    target, prompt = tiny_target(), random_prompt(7)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    entered = []
    monkeypatch.setattr(plain, "packed_layers", lambda *args, **kwargs: entered.append(args) or nullcontext())
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    for num_tokens, is_set_up in ((1, False), (2, False), (24, True)):
        entered.clear()
        mask = torch.ones_like(prompt)
        target.generate(prompt, attention_mask=mask, assistant_model=drafter, max_new_tokens=num_tokens)
        assert bool(entered) is is_set_up


def test_forwards_are_asked_once_for_what_they_take(monkeypatch):
    asked, real = [], inspect.signature
    monkeypatch.setattr(target_checks.inspect, "signature", lambda forward: asked.append(forward) or real(forward))
    target = tiny_target()
    assert target_checks.takes_positions(target)
    asked.clear()
    assert target_checks.takes_positions(tiny_target())
    assert asked == []


def reading_ahead(usual):
    """A forward in which each token sees the last one."""
    return lambda states, *args, **kwargs: usual(states + states[:, -1:], *args, **kwargs)


def with_a_replaced_forward(target, drafter, monkeypatch):
    monkeypatch.setattr(target.model.layers[0].mlp, "forward", reading_ahead(target.model.layers[0].mlp.forward))


def with_a_changed_head(target, drafter, monkeypatch):
    target.resize_token_embeddings(target.config.vocab_size + 8)


def with_a_mode_of_training(target, drafter, monkeypatch):
    target.train()
    target.activation_checkpointing_enable()


def with_another_time_step(target, drafter, monkeypatch):
    target.config.time_step_limit = (0.1, 1.0)


def with_weights_left_out(target, drafter, monkeypatch):
    drafter.to("meta")


CHANGES = {
    with_a_replaced_forward: "does not read them as it reads one by one",
    with_a_changed_head: "vocabulary mismatch",
    with_a_mode_of_training: "gradient checkpointing",
    with_another_time_step: "time_step_limit",
    with_weights_left_out: "meta device",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_what_was_changed_between_two_calls_is_checked_in_the_next(monkeypatch, change, num_tokens):
    target, prompt = tiny_target(), random_prompt(7)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": num_tokens}
    for _ in range(2):
        target.generate(prompt, assistant_model=drafter, **options)
    change(target, drafter, monkeypatch)
    with pytest.raises(ValueError, match=CHANGES[change]):
        target.generate(prompt, assistant_model=drafter, **options)


def test_a_hook_between_two_calls_is_warned_of_in_the_next(monkeypatch):
    said = []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    target, prompt = tiny_target(), random_prompt(7)
    drafter = tiny_drafter("dflash", target)
    options = {"attention_mask": torch.ones_like(prompt), "assistant_model": drafter, "max_new_tokens": 1}
    target.generate(prompt, **options)
    hook = target.model.layers[0].register_forward_hook(lambda module, given, found: None)
    target.generate(prompt, **options)
    hook.remove()
    target.generate(prompt, **options)
    assert ["forward hooks of a caller's own" in text for text in said] == [True]
