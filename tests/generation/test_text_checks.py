"""Texts that aren't drafted are checked now and then, as much as the last texts say that drafts may save of them."""

import statistics

import pytest

from hf_pardraft.generation.scheduling.checks import TextChecks
from hf_pardraft.generation.scheduling.costs import Costs
from hf_pardraft.generation.scheduling.knowledge import Knowledge, RoundOutcome
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan
from hf_pardraft.generation.scheduling.savings import TextSavings
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.scheduling.worth import PlanWorth
from simulated_rounds import TOKENS, World

CHAIN = Plan(4)


def speeds(world: World, easy: float, since: int, calls: int) -> tuple[list[float], list[float]]:
    """Of calls with hard texts, and of each fourth, whose text is easy from so many tokens on: once 16 are over."""
    hard, accepted, found = world.rates, world.accepted, ([], [])
    for number in range(calls):
        is_easy = number % 4 == 3

        def of_text(plan, is_easy=is_easy):
            world.rates = [easy] * len(hard) if is_easy and world.written >= since else hard
            return accepted(plan)

        world.accepted = of_text
        speed, _ = world.call()
        if number >= 16:
            found[is_easy].append(speed)
    return found


def test_the_few_texts_that_are_easy_are_drafted_among_hard_ones_that_are_not():
    found = [speeds(World([0.3] * 7, seed=seed), 0.95, since=0, calls=40) for seed in range(8)]
    assert min(statistics.harmonic_mean(easy) for _, easy in found) > 2.5
    assert statistics.mean(statistics.harmonic_mean(hard) for hard, _ in found) > 0.85


@pytest.mark.parametrize(("rate", "draft"), [(0.3, 0.6), (0.1, 0.3)])
def test_texts_that_become_easy_are_found_out_where_some_did_before(rate, draft):
    found = [speeds(World([rate] * 7, draft=draft, seed=seed), 0.95, since=24, calls=40) for seed in range(8)]
    assert statistics.mean(statistics.harmonic_mean(easy) for _, easy in found) > 1.15
    assert statistics.mean(statistics.harmonic_mean(hard) for hard, _ in found) > 0.9


def test_what_a_text_saved_counts_if_it_is_more_than_calls_differ_by_anyway():
    savings = TextSavings()
    assert savings.mean(1.0) == 0.0
    for share in (0.6, 0.19, -0.4):
        savings.note(share)
    assert savings.mean(0.0) == pytest.approx(0.6 / (3 + TextSavings.PRIOR_WEIGHT))


def test_before_texts_have_told_a_drafter_that_is_right_now_and_then_is_trusted_to_save_a_little():
    savings = TextSavings()
    savings.note(0.0)
    never, seldom, often, mostly = (savings.mean(rate) for rate in (0.0, 0.05, 0.1, 0.9))
    assert 0.0 == never < seldom < often == mostly < TextSavings.PRIOR
    for _ in range(TextSavings.REMEMBERED):
        savings.note(0.0)
    assert savings.mean(0.9) < TextSavings.PRIOR / 8


def test_only_so_much_is_put_by_for_checks():
    savings = TextSavings()
    savings.put_in(10, 0.3)
    assert savings.put_by == pytest.approx(10 * 0.3 * TextSavings.SHARE)
    savings.put_in(10_000, 0.3)
    assert savings.put_by == TextSavings.MOST_PUT_BY


def worth_of(knowledge: Knowledge, seconds: float = 2.0) -> PlanWorth:
    """Rounds without a draft take a second, and others so long."""
    costs = knowledge.costs_for(1)
    for _ in range(Costs.BELIEVED):
        costs.note(NOTHING, 1.0)
        costs.note(CHAIN, seconds)
    worth = PlanWorth(knowledge, [NOTHING, CHAIN], False)
    worth.work_out(costs, 1)
    return worth


def never_right(num_rounds: int = 200) -> Knowledge:
    knowledge = Knowledge()
    knowledge.note(0, *[RoundOutcome([(0, 1)])] * num_rounds)
    return knowledge


def test_a_call_is_begun_to_be_checked_if_that_costs_less_than_it_may_save():
    knowledge = never_right()
    checks = TextChecks(knowledge.savings, worth_of(knowledge), CHAIN)
    # Three drafts lose a round each, nearly.
    checks.may_save = TextChecks.START + 3.1
    assert checks.begin_a_call()
    assert checks.stay(2, lead=1.2)
    assert not checks.stay(3, lead=1.2)
    checks.may_save = TextChecks.START + 2.5
    assert not checks.begin_a_call()
    assert not checks.stay(0, lead=1.2)


def test_a_text_is_not_left_as_long_as_what_is_put_by_pays_for_the_next_check():
    knowledge = never_right()
    checks, stays = TextChecks(knowledge.savings, worth_of(knowledge), CHAIN), 0
    knowledge.savings.put_by = 5.0
    while checks.stay(20, lead=1.1):
        stays += 1
    # Eight rounds that are slower by a tenth, and two drafts that lose a round each, have to be left for.
    assert knowledge.savings.put_by == pytest.approx(8 * 0.1 + 2, abs=0.2)
    assert stays == pytest.approx((5.0 - knowledge.savings.put_by) / 0.1)


def test_what_a_text_saved_is_what_its_rounds_took_beside_steps_of_plain_generate():
    knowledge = Knowledge()
    checks = TextChecks(knowledge.savings, worth_of(knowledge), CHAIN)
    for number, (now, length) in enumerate([(0.0, 64), (10.0, 65), (20.0, 85), (40.0, 125)], start=1):
        checks.begin_round(number, now, length)
    checks.end(num_plain=0, rest=1.0)
    # Sixty tokens in thirty seconds, for which sixty steps were to be made; the prompt's round is no matter of drafts.
    assert [*knowledge.savings.last] == pytest.approx([0.5])
    checks.end(num_plain=60, rest=1.0)
    assert [*knowledge.savings.last] == pytest.approx([0.5, 0.25])


def schedule_of(knowledge: Knowledge) -> Schedule:
    """In the first round of a text; one without a draft takes a second, and others two."""
    worth_of(knowledge)
    now = [0.0]
    schedule = Schedule(knowledge, [NOTHING, CHAIN], CHAIN, lambda: now[0])
    assert not schedule.ends_too_soon(1, 64, TOKENS)
    schedule.now = now
    return schedule


def a_round(schedule: Schedule, number: int, num_accepted: int) -> Plan:
    plan = schedule.next_plan(1, 100, 64 + number)
    schedule.now[0] += 2.0 if plan.depth else 1.0
    schedule.note([(num_accepted, min(num_accepted + 1, plan.depth))] if plan.depth else [])
    schedule.end_round(is_ordinary=number > 0)
    return plan


# A round that commits two tokens in the time of two is no faster than two rounds without a draft.
@pytest.mark.parametrize(("num_accepted", "is_followed"), [(4, True), (2, True), (1, False), (0, False)])
def test_a_check_that_was_clearly_faster_is_followed_by_another_at_once(num_accepted, is_followed):
    schedule = schedule_of(never_right())
    for number in range(40):
        if a_round(schedule, number, num_accepted) == CHAIN:
            break
    assert schedule.is_a_try
    assert (schedule.tries.again == CHAIN) == is_followed
    assert (a_round(schedule, number + 1, 0) == CHAIN) == is_followed


@pytest.mark.parametrize("may_save", [100.0, 0.0])
def test_checks_that_may_save_more_than_they_cost_come_first_and_leave_the_purse_as_it_is(may_save):
    knowledge = never_right()
    schedule = schedule_of(knowledge)
    schedule.checks.may_save, knowledge.purse, knowledge.share = may_save, 3.0, 0.0
    plans = [a_round(schedule, number, 0) for number in range(20)]
    assert (plans[:3] == [CHAIN] * TextChecks.AT_FIRST) == (may_save > 0)
    assert CHAIN in plans
    # What is tried later on is paid for.
    of_later = plans[3:].count(CHAIN)
    assert knowledge.purse == pytest.approx(3.0 - of_later, abs=0.2 * of_later)


def test_after_some_checks_in_a_row_it_is_thought_over_what_to_follow():
    schedule = schedule_of(never_right())
    plans = [a_round(schedule, number, 4) for number in range(40)]
    first = plans.index(CHAIN)
    assert plans[first:] == [CHAIN] * (40 - first)
    assert schedule.best == CHAIN
    assert schedule.tries.again is None
