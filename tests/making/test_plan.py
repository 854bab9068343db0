"""How the hours are shared out."""

import pytest

from hf_pardraft.making.plan import (
    StepCosts,
    evaluation_plan,
    evaluation_seconds,
    held_out,
    next_count,
    training_plan,
    training_seconds,
)


def test_text_begins_with_a_few_dialogues_and_grows_as_fast_as_they_were():
    assert next_count(0, 0, 0.0, 400.0, 0.0) == 8
    # 300 seconds are left.
    assert next_count(8, 8, 100.0, 400.0, 0.1) == 8 + 30
    # What a few dialogues say is a rough guess.
    assert next_count(8, 8, 1.0, 4000.0, 8.0) == 64
    # Those that failed are not asked for again.
    assert next_count(6, 8, 100.0, 400.0, 0.1) == 8 + 30


@pytest.mark.parametrize("spent", [381.0, 400.0, 900.0])
def test_no_more_text_is_begun_when_its_time_is_nearly_up(spent):
    assert next_count(80, 80, spent, 400.0, 10.0) is None


def test_no_more_text_is_asked_for_where_none_comes():
    assert next_count(8, 8, 10.0, 400.0, 0.0) is None
    assert next_count(0, 8, 10.0, 400.0, 0.0) is None


@pytest.mark.parametrize(
    ("count", "number", "step"), [(2, 1, 2), (8, 4, 2), (40, 4, 10), (80, 4, 20), (640, 32, 20), (9000, 32, 20)]
)
def test_one_dialogue_in_twenty_is_held_out(count, number, step):
    assert held_out(count) == [step * place for place in range(number)]


def test_as_many_steps_as_fit_beside_their_evaluations():
    plan = training_plan(StepCosts(step=2.0, evaluation=10.0, around=30.0), 2040.0, num_examples=1000, batch_size=8)
    # 2,000 seconds, a tenth of them for evaluations.
    assert (plan.steps, plan.eval_steps) == (900, 45)
    assert plan.epochs == 900 / 125
    assert not plan.is_capped


def test_no_text_is_learned_by_heart():
    plan = training_plan(StepCosts(step=1.0, evaluation=10.0, around=0.0), 100000.0, num_examples=17, batch_size=8)
    assert (plan.steps, plan.epochs, plan.is_capped) == (60, 20.0, True)


@pytest.mark.parametrize("allowed", [0.0, 5.0])
def test_a_step_is_done_however_little_time_there_is(allowed):
    plan = training_plan(StepCosts(step=7.0, evaluation=3.0, around=9.0), allowed, num_examples=3, batch_size=8)
    assert (plan.steps, plan.eval_steps) == (1, 1)


def test_long_answers_need_time_and_short_ones_many_prompts():
    # 100 tokens a second in a batch are 25 one by one, of five passes 5.
    assert evaluation_plan(64 * 25.6, 100.0, 32).new_tokens == 256
    hurried = evaluation_plan(20.0, 100.0, 32)
    assert (hurried.prompts, hurried.new_tokens) == (1, 64)
    assert evaluation_plan(200.0, 100.0, 32).prompts == 15
    assert evaluation_plan(1e6, 100.0, 4).prompts == 4


def test_what_a_stage_leaves_the_next_one_has():
    assert training_seconds(1000.0, 300.0) == 600.0
    assert training_seconds(1000.0, 850.0) == 300.0
    assert evaluation_seconds(1000.0, 900.0) == 100.0
    assert evaluation_seconds(1000.0, 1400.0) == 50.0
