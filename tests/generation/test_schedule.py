"""The schedule in simulated worlds: near the best plan for all rounds, near plain `generate` where no draft pays."""

import math
import random
import statistics
import sys
import threading
from itertools import groupby

import numpy as np
import pytest

from hf_pardraft.generation.scheduling.acceptance import AcceptanceRates
from hf_pardraft.generation.scheduling.compared import Compared
from hf_pardraft.generation.scheduling.costs import Costs
from hf_pardraft.generation.scheduling.estimates import interpolated, on_a_line, rising
from hf_pardraft.generation.scheduling.fixed import FixedSchedule
from hf_pardraft.generation.scheduling.growth import Growth
from hf_pardraft.generation.scheduling.knowledge import Knowledge, RoundOutcome
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan, all_plans, compiled_plans
from hf_pardraft.generation.scheduling.rounds import CompiledRounds
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.scheduling.spread import Spread, shares_of, shares_with_more, worth_to_a_batch
from hf_pardraft.generation.scheduling.worth import LEAST_SHARE, PlanWorth
from simulated_rounds import PROMPT, UnevenBatch, World, random_world
from threads import in_threads

PLANS = all_plans(8, 32)


def test_it_is_nearly_as_fast_as_the_best_plan_that_a_sweep_finds():
    shares = []
    for seed in range(24):
        world = random_world(seed)
        best = world.best_speed()
        world.speed(8)
        shares.append(world.speed(12) / best)
    assert statistics.median(shares) >= 0.98
    assert min(shares) >= 0.7


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draft", [0.4, 0.8])
def test_a_drafter_that_is_never_right_costs_little_from_the_first_call_on(seed, draft):
    world = World([0.0] * 7, draft=draft, slot=0.02, seed=seed)
    speeds = [world.call()[0] for _ in range(20)]
    assert speeds[0] >= 0.93
    assert statistics.mean(speeds) >= 0.98


def test_a_drafter_that_is_always_right_is_used_in_full():
    world = World([1.0] * 7)
    speed = world.call()[0]
    assert speed >= 0.7 * world.speed_of(Plan(7))
    world.speed(6)
    assert world.speed(6) >= 0.94 * world.speed_of(Plan(7))


def test_a_text_that_becomes_easy_is_found_out_and_one_that_becomes_hard():
    found = []
    for seed in reversed(range(8)):
        world = World([0.0] * 7, slot=0.02, seed=seed)
        world.speed(10)
        world.rates = [0.9] * 7
        world.speed(8)
        found.append(world.speed(4) / world.best_speed())
    assert statistics.mean(found) >= 0.94
    world.rates = [0.0] * 7
    # Each call begins with what earlier ones taught, and finds out; in the end that costs next to nothing.
    assert world.call()[0] >= 0.7
    assert world.speed(10) >= 0.8
    world.speed(50)
    assert world.speed(10) >= 0.97


def test_what_was_learned_is_known_in_the_next_call():
    world = World([0.9] * 7)
    world.speed(3)
    first_plan = world.call()[1][0]
    assert first_plan.depth >= 6
    bad = World([0.0] * 7)
    bad.speed(3)
    # Nothing is drafted, or what seems worth a try once.
    for _ in range(8):
        assert sum(plan != NOTHING for plan in bad.call()[1]) <= 2


def test_another_batch_size_begins_with_what_its_neighbour_taught():
    world = World([0.9] * 7)
    world.speed(3)
    plans = world.call(batch=4)[1]
    # But a round without a draft, which others are compared with, is measured anew.
    assert plans[:2] == [NOTHING] * 2
    assert plans[2].depth >= 6
    assert sorted(world.knowledge.costs) == [1, 4]
    assert world.knowledge.costs_for(3) is world.knowledge.costs_for(4)


@pytest.mark.parametrize("rates", [[0.0] * 7, [0.85] * 7])
def test_a_clock_that_jumps_loses_no_drafts(rates):
    calm, jumping = (World(rates, outliers=outliers) for outliers in ({}, {9: 1e6, 40: 1e9, 90: -50.0, 333: 1e4}))
    assert jumping.speed(6) >= 0.93 * calm.speed(6)


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_texts_that_are_shorter_than_a_draft_do_no_harm(length):
    world = World([0.9] * 7)
    for _ in range(30):
        schedule = Schedule(world.knowledge, world.plans, Plan(7), lambda: world.now)
        for left in range(length, 0, -1):
            plan = schedule.next_plan(1, left - 1, 100 - left)
            world.now += world.cost(plan)
            schedule.note([(0, 1)] if plan.depth else [])
            schedule.end_round(True)
    assert math.isfinite(world.knowledge.purse)


def test_what_a_text_suggests_beyond_a_draft_is_no_part_of_it():
    """Where no chain is compared, as on an accelerator, trees are what is learned from."""
    schedule = Schedule(Knowledge(), [NOTHING, Plan(4, 8)], Plan(4, 8), lambda: 0.0)
    for _ in range(3):
        schedule.next_plan(1, 9, 10)
        schedule.plan = Plan(4, 8)
        schedule.note([(8, 4)])
        schedule.end_round(True)
    schedule.learn()
    assert schedule.knowledge.chain.rates(6)[3] > schedule.knowledge.chain.PRIOR
    assert len(schedule.knowledge.chain.counts) == 4


@pytest.mark.parametrize("seed", range(4))
def test_a_single_tree_is_judged_though_items_end_in_the_first_call(seed):
    """As on an accelerator, where rounds draft nothing or one tree."""
    tree, now, drawn = Plan(4, 8), 0.0, random.Random(seed)
    schedule = Schedule(Knowledge(), [NOTHING, tree], tree, lambda: now)
    batches, followed = [8] * drawn.randint(1, 4) + [4] * 12 + [2] * 12 + [1] * 40, []
    for batch in batches:
        plan = schedule.next_plan(batch, 9, 10)
        now += 3.0 if plan.depth else 1.0
        schedule.note([(0, 1)] * batch if plan.depth else [])
        schedule.end_round(True)
        followed.append(plan)
    assert tree in followed
    assert followed.count(NOTHING) > len(followed) // 2


@pytest.mark.parametrize("stopped", [0.0, math.nan, -1.0])
def test_a_clock_that_says_nothing_does_no_harm(stopped):
    schedule = Schedule(Knowledge(), all_plans(4, 16), Plan(4), lambda: stopped)
    for _ in range(50):
        plan = schedule.next_plan(1, 9, 10)
        schedule.note([(0, 1)] if plan.depth else [])
        schedule.end_round(True)
    assert math.isfinite(schedule.knowledge.purse)


def test_a_machine_that_slows_down_for_a_while_changes_nothing():
    steady, uneven = (
        World([0.8] * 7, pace=pace) for pace in (lambda n: 0.002, lambda n: 0.004 if n // 70 % 2 else 0.002)
    )
    assert uneven.speed(25) >= 0.95 * steady.speed(25)


def test_a_good_drafter_is_never_given_up_because_a_machine_is_uneven():
    """Each round's pace is near the last one's, and drifts by a third either way."""
    for seed in range(60):
        draws, level, paces = random.Random(seed), 0.0, []
        for _ in range(500):
            level = 0.9 * level + draws.gauss(0, 0.13)
            paces.append(0.002 * math.exp(level))
        world = World([0.9] * 7, draft=0.15, slot=0.012, tree=0.15, seed=seed, pace=paces.__getitem__)
        best = world.speed_of(Plan(7), calls=10)
        assert min(world.call()[0] for _ in range(4)) > 0.5 * best


def test_the_same_clock_and_outcomes_give_the_same_plans():
    assert random_world(3).call()[1] == random_world(3).call()[1]


def test_plain_generate_is_left_alone_with_calls_in_which_nothing_is_tried():
    world = World([0.0] * 7)
    rounds = [len(world.call()[1]) for _ in range(60)]
    # The first call finds out; most others are left whole, and the rest after a try or two.
    assert 4 <= rounds[0] <= 40
    assert statistics.mean(count == 0 for count in rounds) >= 0.5
    assert max(rounds[10:]) <= 4
    assert sum(rounds[10:]) > 0
    good = World([0.9] * 7)
    good.speed(3)
    assert len(good.call()[1]) > 10


def test_the_rest_is_drafted_where_our_loop_costs_nothing_that_matters():
    slow = World([0.0] * 7, pace=lambda number: 0.1)
    plans = slow.call()[1]
    assert len(plans) == 128
    assert statistics.mean(plan == NOTHING for plan in plans) >= 0.9


def test_a_batch_is_judged_by_what_each_of_its_items_gets():
    shares = [0.5, 1, 1, 1.5]
    assert worth_to_a_batch(1.0, [0.4, 0.3, 0.2, 0.1], shares) == pytest.approx(1.0)
    # Rounds as long as the slowest item needs; rounds that cost in proportion to who is left; and what lies between.
    assert worth_to_a_batch(3.0, [1, 0, 0, 0], shares) == pytest.approx(2.0)
    assert worth_to_a_batch(3.0, [0.25] * 4, shares) == pytest.approx(4 / (1 / 2 + 2 / 3 + 1 / 4))
    # The last one alone for the rounds that only it needs, two for those of the middle ones, and so on.
    seconds = {1: 0.4, 3: 0.9, 4: 1.0}
    taken = seconds[4] / 4 + seconds[3] * (1 / 3 - 1 / 4) + seconds[1] * (1 / 2 - 1 / 3)
    assert worth_to_a_batch(3.0, [0.4, 0.3, 0.2, 0.1], shares) == pytest.approx(1 / taken)


def drafted(rates: list[float], drawn: random.Random) -> tuple[int, int]:
    """What becomes of a draft whose tokens are accepted at these rates, see `AcceptanceRates.note`."""
    accepted = next((place for place, rate in enumerate(rates) if drawn.random() >= rate), len(rates))
    return accepted, min(accepted + 1, len(rates))


@pytest.mark.parametrize("depth", [2, 8])
def test_drafts_of_one_depth_tell_how_unevenly_those_of_any_other_serve_a_batch(depth):
    drawn, spread, known = random.Random(0), Spread(4), AcceptanceRates()
    rates, exponents = [0.8] + [0.65] * 7, [2.0, 1.2, 0.8, 0.5]
    for _ in range(2000):
        outcomes = [drafted([rate**exponent for rate in rates[:depth]], drawn) for exponent in exponents]
        spread.note(range(4), outcomes, known.rates(depth))
        known.note(outcomes)
    slowest = []
    for longest in (2, 4, 8):
        items = [[rate**exponent for rate in rates[:longest]] for exponent in exponents]
        accepted = [sum(math.prod(item[:place]) for place in range(1, longest + 1)) for item in items]
        expected = [4 * each / sum(accepted) for each in accepted]
        found = shares_of(spread.rates_of_items(known.rates(longest)))[longest - 1]
        assert sum(found) == pytest.approx(4)
        assert found == pytest.approx(expected, abs=0.08)
        slowest.append(found[0])
    # It gains the least by longer drafts.
    assert slowest == sorted(slowest, reverse=True)


def test_trees_bring_each_item_of_a_batch_as_many_tokens_more():
    items = [[0.4, 0.4], [0.9, 0.9]]
    chains = shares_of(items)[1]
    assert chains == pytest.approx([2 * each / (0.56 + 1.71) for each in (0.56, 1.71)])
    mean = (0.56 + 1.71) / 2
    trees = shares_with_more(chains, mean, 0.3)
    assert trees == pytest.approx([each / (mean + 0.3) for each in (0.86, 2.01)])
    # A tree that isn't as deep may accept less than the chain in its place; no item less than nothing.
    assert shares_with_more(chains, mean, -0.2) == pytest.approx([each / (mean - 0.2) for each in (0.36, 1.51)])
    assert shares_with_more([0.0, 2.0], 1.0, -0.5) == [0.0, 3.0]
    assert shares_with_more([1.0, 1.0], 0.0, 0.0) == [1.0, 1.0]


def test_one_lucky_round_of_a_tree_does_not_make_items_alike_that_chains_serve_unevenly():
    """Where nearly all of a batch's drafts are right, what trees gain on average says little of the slow items."""
    knowledge, plans = Knowledge(), [NOTHING, Plan(8), Plan(8, 16)]
    worth, costs = PlanWorth(knowledge, plans, reads_again=False), knowledge.costs_for(16)
    for _ in range(50):
        knowledge.note(0, RoundOutcome([(8, 8)] * 14 + [(7, 8), (0, 1)]))
    chains = [(8, 8)] * 10 + [(5, 6)] * 5 + [(0, 1)]
    knowledge.note(16, RoundOutcome([(8, 8)] * 15 + [(1, 2)], chains))
    for plan in plans:
        costs.note(plan, 1.0)
    worth.work_out(costs, 16)
    # Rounds take as long for any number of items, so that the slow one decides: it gets as many tokens more as others do.
    more = worth.committed[Plan(8, 16)] - worth.committed[Plan(8)]
    assert 0.5 < more < 1.5
    assert worth.tokens[Plan(8, 16)] - worth.tokens[Plan(8)] == pytest.approx(more, rel=0.01)


def test_a_batch_with_a_slow_item_is_worth_more_to_a_tree_than_its_mean_says():
    knowledge, plans = Knowledge(), [NOTHING, Plan(8), Plan(8, 16)]
    for _ in range(100):
        knowledge.note(16, RoundOutcome([(7, 8)] * 3 + [(1, 2)], [(6, 7)] * 3 + [(0, 1)]))
    worth, costs = PlanWorth(knowledge, plans, reads_again=False), knowledge.costs_for(4)
    for plan in plans:
        costs.note(plan, 1.0)
    worth.work_out(costs, 4)
    gain = knowledge.tree_gains(8, [16], are_nested=False)[16]
    assert worth.tokens[Plan(8, 16)] > 1.2 * gain * worth.tokens[Plan(8)]


def test_items_are_thought_to_be_less_uneven_than_a_few_rounds_made_them():
    spread = Spread(4)
    before = spread.exponents
    assert before == sorted(before, reverse=True)
    assert math.prod(before) == pytest.approx(1)
    # Of many items the slowest is thought to be slower than of few.
    assert Spread(64).exponents[0] > before[0] > 1 > before[-1] > Spread(64).exponents[-1]
    for _ in range(3):
        spread.note(range(4), [(0, 1), (2, 3), (2, 3), (4, 4)], [0.7] * 4)
    # By itself the slowest item would get nothing.
    slowest = [shares_of(each.rates_of_items([0.6] * 4))[3][0] for each in (spread, Spread(4))]
    assert 0.4 < slowest[0] < slowest[1]


def test_the_next_batch_is_thought_to_be_as_uneven_the_more_was_drafted():
    few, many = Spread(4), Spread(4)
    outcomes = [(0, 1), (2, 3), (2, 3), (4, 4)]
    for spread, num_rounds in ((few, 3), (many, 400)):
        for _ in range(num_rounds):
            spread.note(range(4), outcomes, [0.7] * 4)
        spread.begin()
    assert many.exponents[0] > 1.2 * few.exponents[0] > 1.2 * Spread(4).exponents[0]
    # Of fewer items, as uneven.
    many.note(range(3), [(1, 2)] * 3, [0.7] * 4)
    assert len(many.exponents) == 3
    assert many.exponents[0] > 1.5 > 1 > many.exponents[-1]


@pytest.mark.parametrize(
    ("num_rounds", "spread", "slowest"), [(1, 0.0, (1, 2)), (2, 0.0, (1, 2)), (20, 0.0, (1, 1.5)), (20, 0.3, (1.7, 3))]
)
def test_luck_does_not_make_items_seem_more_uneven_from_call_to_call(num_rounds, spread, slowest):
    drawn, believed = random.Random(0), Spread(64)
    for _ in range(100):
        exponents = [math.exp(drawn.gauss(0, spread)) for _ in range(64)]
        for _ in range(num_rounds):
            believed.note(range(64), [drafted([0.75**each] * 4, drawn) for each in exponents], [0.75] * 4)
        believed.begin()
    least, most = slowest
    assert least <= believed.exponents[0] < most


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_an_item_that_is_mostly_judged_by_its_first_tokens_is_compared_with_others_by_these(depth):
    drawn, spread, rates, exponents = random.Random(0), Spread(3), [0.5] + [0.95] * 7, [2.0, 1.0, 0.5]
    for _ in range(4000):
        spread.note(range(3), [drafted([rate**each for rate in rates[:depth]], drawn) for each in exponents], rates)
    assert spread.exponents == pytest.approx(exponents, rel=0.18)


@pytest.mark.parametrize("outcome", [(0, 1), (4, 4)])
def test_items_of_which_each_gets_all_or_nothing_are_alike(outcome):
    spread = Spread(3)
    rate = outcome[0] / outcome[1]
    spread.note(range(3), [outcome] * 3, [rate] * 4)
    shares = shares_of(spread.rates_of_items([rate] * 4))
    assert len(shares) == 4
    assert all(of_depth == pytest.approx([1.0] * 3, abs=0.01) for of_depth in shares)


def test_the_last_items_of_a_batch_say_nothing_of_the_next():
    knowledge = Knowledge()
    for _ in range(60):
        knowledge.note(0, RoundOutcome([(4, 4)] * 7 + [(0, 1)]))
    before, found = knowledge.earlier.rates(4), knowledge.spread_of(8).found
    for _ in range(200):
        knowledge.note(0, RoundOutcome([(0, 1)], items=[7]))
    assert knowledge.earlier.rates(4) == before
    # Of this item it is known better now how little it gets.
    others, (*counts, _) = {**knowledge.spread_of(8).found}, knowledge.spread_of(8).found[7]
    assert counts == [0, 260]
    assert others == {**found, 7: others[7]}
    assert knowledge.chain.rates(4)[0] < 0.1


def test_what_is_left_of_a_batch_is_drafted_by_what_became_of_its_own_drafts():
    knowledge = Knowledge()
    of_all = {0: (4, 4), 1: (0, 1), 2: (4, 4), 3: (4, 4), 4: (2, 3), 5: (4, 4), 6: (4, 4), 7: (0, 1)}
    knowledge.note(0, *(RoundOutcome([*of_all.values()]) for _ in range(20)))
    assert knowledge.chain.rates(1)[0] > 0.7
    # Six of eight, and then three of them, of which two get nothing.
    for left, rate in ([0, 1, 2, 3, 4, 7], 0.7), ([1, 4, 7], 1 / 3), ([1], 0.0):
        knowledge.note(0, *[RoundOutcome([of_all[item] for item in left], items=left)] * 2)
        assert knowledge.chain.rates(1)[0] == pytest.approx(rate, abs=0.1)
    knowledge.begin_text()
    assert knowledge.chain.rates(1)[0] > 0.7


def test_a_plan_that_was_measured_little_is_thought_to_lie_on_the_line_of_the_others_by_its_nodes():
    costs, plan, plans = Costs(), Plan(4), all_plans(8, 32)
    truth = {each: 0.010 + 0.002 * each.num_nodes for each in plans}
    for _ in range(24):
        for each in (each for each in plans if each != plan):
            costs.note(each, truth[each])
    for num_rounds, least, most in (3, 1.0, 1.06), (60, 1.13, 1.2):
        for _ in range(num_rounds):
            for each in (NOTHING, plan):
                costs.note(each, truth[each] * (1.2 if each == plan else 1))
        assert least < costs.of(plan) / truth[plan] < most
    # What rounds without a draft take is no matter of a line.
    assert costs.of(NOTHING) == pytest.approx(truth[NOTHING], rel=0.01)


def test_no_line_tells_nonsense_of_a_plan_that_is_far_off_it():
    costs, seconds = Costs(), {NOTHING: 1.0, Plan(1): 1.0, Plan(2): 1.0, Plan(4): 1.0, Plan(8): 3.0, Plan(8, 16): 40.0}
    for _ in range(5):
        for plan, each in seconds.items():
            costs.note(plan, each)
    # By the line alone a draft of one or two tokens would take less than nothing.
    assert on_a_line([(plan.num_nodes, each, 1.0) for plan, each in seconds.items() if plan.depth], 1) < 0
    for plan in (NOTHING, Plan(1), Plan(2), Plan(4)):
        assert costs.of(plan) == pytest.approx(seconds[plan], rel=0.35)


def test_a_line_is_found_by_least_squares_and_never_falls():
    points = [(1, 2.0, 1.0), (2, 4.0, 2.0), (4, 5.0, 1.0), (9, 12.0, 0.5)]
    places, values, weights = zip(*points, strict=True)
    slope, start = np.polyfit(places, values, 1, w=np.sqrt(weights))
    assert on_a_line(points, 3) == pytest.approx(start + 3 * slope)
    falling = [(at, -value, weight) for at, value, weight in points]
    assert on_a_line(falling, 3) == on_a_line(falling, 30) == pytest.approx(-np.average(values, weights=weights))
    assert on_a_line([(1, 1.0, 1.0), (2, 3.0, 1.0), (2, 5.0, 1.0)], 1) is None


def test_once_a_fifth_of_a_batch_is_gone_the_others_are_drafted_by_their_own_drafts():
    knowledge = Knowledge()
    of_all = [(4, 4)] * 6 + [(0, 1)] * 4
    knowledge.note(0, *[RoundOutcome(of_all)] * 20)
    rates = []
    for left in (range(1, 10), range(2, 10)):
        knowledge.note(0, RoundOutcome([of_all[item] for item in left], items=[*left]))
        rates.append(knowledge.chain.rates(1)[0])
    assert rates == pytest.approx([0.6, 0.5], abs=0.02)


def test_a_batch_tries_half_as_much():
    saved = []
    for batch in (1, 4):
        knowledge = Knowledge()
        schedule = Schedule(knowledge, all_plans(4, 16, batch), Plan(4), lambda: 0.0)
        before = knowledge.purse
        schedule.next_plan(batch, 4, 64)
        schedule.note_plain(100)
        saved.append(knowledge.purse - before)
    assert saved == pytest.approx([100 * Knowledge.SHARE, 50 * Knowledge.SHARE])


@pytest.mark.parametrize(
    ("seconds", "fixed"), [(1.08, 1 - 0.01 * 9 / 1.08), (3.0, 1 - 0.25 * 9 / 3), (20.0, LEAST_SHARE)]
)
def test_how_much_of_a_round_is_the_same_for_fewer_items_follows_from_what_a_token_more_costs(seconds, fixed):
    knowledge = Knowledge()
    worth, costs = PlanWorth(knowledge, [NOTHING, Plan(8)], reads_again=False), knowledge.costs_for(16)
    worth.expect(16)
    for _ in range(8):
        costs.note(NOTHING, 1.0)
        costs.note(Plan(8), seconds)
    for _ in range(100):
        knowledge.note(0, RoundOutcome([(8, 8)] * 15 + [(0, 1)]))
    worth.work_out(costs, 16)
    more = (1 - fixed) / 16
    assert worth.added_by_items(Plan(8), 16) == pytest.approx([fixed + more, *[more] * 15], rel=1e-6)
    assert worth.tokens[NOTHING] == 1
    # The item that gets nothing takes as many rounds as tokens, whoever else is over.
    shares = shares_of(knowledge.spread_of(16).rates_of_items(knowledge.chain.rates(8)))[7]
    items = [1 / (1 + share * (knowledge.expected_tokens(8)[8] - 1)) for share in shares]
    assert worth.tokens[Plan(8)] == pytest.approx(1 / (fixed * max(items) + (1 - fixed) * sum(items) / 16), rel=1e-6)


def test_what_rounds_of_fewer_items_take_is_known_once_such_were_measured():
    knowledge, plan = Knowledge(), Plan(8)
    worth, costs = PlanWorth(knowledge, [NOTHING, plan], reads_again=False), knowledge.costs_for(16)
    for _ in range(8):
        costs.note(NOTHING, 1.0)
        costs.note(plan, 5.0)
    worth.work_out(costs, 16)
    guessed = worth.added_by_items(plan, 16)
    # Two rounds may have been outliers.
    for seconds in (2.0, 2.0, 2.0):
        worth.work_out(costs, 16)
        assert worth.added_by_items(plan, 16) == guessed
        knowledge.costs_for(4).note(plan, seconds)
    worth.work_out(costs, 16)
    # A quarter of a second for each item, and a second whoever is left.
    assert worth.added_by_items(plan, 16) == pytest.approx([1.25 / 5, *[0.25 / 5] * 15])
    for _ in range(3):
        knowledge.costs_for(1).note(plan, 1.4)
        # No longer than more items are thought to take.
        knowledge.costs_for(8).note(plan, 6.0)
    worth.work_out(costs, 16)
    assert worth.added_by_items(plan, 16) == pytest.approx([1.4 / 5, *[0.2 / 5] * 3, *[0.75 / 5] * 4, *[0.0] * 8])
    # Of an item in two, and of two in each step.
    assert worth.added_by_items(plan, 8) == pytest.approx([1.6 / 5, 0.4 / 5, 1.5 / 5, 1.5 / 5, *[0.0] * 4])
    # Batches of nearly the same size say little.
    worth.work_out(costs, 7)
    assert worth.added_by_items(plan, 7) == pytest.approx([1.4 / 5, *[0.6 / 5] * 6])


def test_no_plan_is_better_for_a_batch_for_having_been_measured_with_fewer_items_in_a_better_hour():
    chain, tree = Plan(8), Plan(8, 16)
    tokens = []
    for lucky in (chain, tree):
        knowledge = Knowledge()
        worth, costs = PlanWorth(knowledge, [NOTHING, chain, tree], reads_again=False), knowledge.costs_for(4)
        knowledge.note(0, *[RoundOutcome([(6, 7), (4, 5), (1, 2), (1, 2)])] * 20)
        for _ in range(8):
            for plan, seconds in ((NOTHING, 1.0), (chain, 2.0), (tree, 3.0)):
                costs.note(plan, seconds)
        for _ in range(4):
            for plan, seconds in ((chain, 1.0), (tree, 1.5)):
                knowledge.costs_for(1).note(plan, seconds * (0.7 if plan == lucky else 1.3))
        worth.work_out(costs, 4)
        tokens.append(worth.tokens[tree] / worth.tokens[chain])
    assert tokens[0] == pytest.approx(tokens[1], rel=0.02)


def test_what_is_known_of_fewer_items_is_not_what_was_known_of_a_larger_batch():
    knowledge, plan = Knowledge(), Plan(8)
    worth = PlanWorth(knowledge, [NOTHING, plan], reads_again=False)
    for size in (8, 4):
        for each, seconds in ((NOTHING, 1.0), (plan, 2.0)) * 4:
            knowledge.costs_for(size).note(each, seconds * size)
    worth.work_out(knowledge.costs_for(8), 8)
    # Half of its items are over.
    worth.expect(4)
    assert sum(worth.added_by_items(plan, 4)) == pytest.approx(1.0)


@pytest.mark.parametrize(("plain", "is_left"), [(0.7, True), (1.5, False)])
def test_a_batch_is_left_to_plain_generate_where_its_steps_are_known_to_be_no_slower(plain, is_left):
    world = World([0.0] * 7, plain=plain)
    calls = [world.call(batch=4) for _ in range(30)]
    rounds = [len(plans) for _, plans in calls]
    # The first call finds out what rounds without a draft take, and then what plain `generate` takes.
    assert Costs.ENOUGH < rounds[0] < 60
    assert (statistics.mean(rounds[10:]) < 20) == is_left
    assert statistics.mean(speed for speed, _ in calls[5:]) >= 0.97 / min(plain, 1.0)


def test_drafts_that_are_better_than_rounds_without_one_are_left_for_plain_steps_that_are_better_still():
    world = World([0.3] + [0.0] * 6, draft=0.05, slot=0.05, plain=0.8)
    world.speed(20)
    assert 1 < world.best_speed() < 0.97 / 0.8 < world.speed(20)


def test_and_so_it_is_whatever_the_machine_and_the_texts_were_like():
    found = []
    for seed in range(16):
        world = World([0.3] + [0.0] * 6, draft=0.05, slot=0.05, plain=0.8, seed=seed)
        world.speed(20)
        found.append(world.speed(20))
    assert statistics.mean(found) > 0.97 / 0.8


def test_how_well_a_plan_is_known_that_was_measured_most_grows_with_what_it_was_compared_with():
    costs, plan = Costs(), Plan(4)
    for number in range(160):
        costs.note(NOTHING if number % 8 == 0 else plan, 1.0)
    assert costs.evidence(plan) > 10
    assert costs.doubt(plan, NOTHING) < 0.1


def test_trees_which_take_a_search_besides_are_not_thought_to_lie_on_the_line_of_chains():
    costs, plans = Costs(), [NOTHING, Plan(1), Plan(2), Plan(4), Plan(8), Plan(8, 16)]
    truth = {plan: 1.0 + 0.05 * plan.num_nodes + 0.8 * (plan.budget > 0) for plan in plans}
    for _ in range(30):
        for plan in plans:
            costs.note(plan, truth[plan])
    for plan in plans:
        assert costs.of(plan) == pytest.approx(truth[plan], rel=0.005)


def test_a_fixed_schedule_follows_its_plan_as_far_as_there_is_room():
    schedule = FixedSchedule(Plan(4, 16))
    assert [schedule.next_plan(1, room, 64) for room in (9, 4, 2, 0)] == [
        Plan(4, 16),
        Plan(4, 16),
        Plan(2, 16),
        NOTHING,
    ]
    assert not schedule.leaves_to_plain(64, 64)


def test_plans_are_nothing_chains_and_trees_up_to_what_may_be_drafted():
    assert all_plans(5, 0) == [Plan(0), Plan(1), Plan(2), Plan(4), Plan(5)]
    assert all_plans(1, 20) == [Plan(0), Plan(1), Plan(1, 16), Plan(1, 20)]
    # A batch reads each node for all its items: smaller trees pay.
    assert all_plans(4, 32, batch=2) == [*map(Plan, (0, 1, 2, 4)), Plan(4, 8), Plan(4, 16), Plan(4, 32)]
    assert all_plans(4, 6, batch=2) == [*map(Plan, (0, 1, 2, 4)), Plan(4, 6)]
    assert compiled_plans(7, 16) == [Plan(0), Plan(4), Plan(7), Plan(7, 16)]
    assert compiled_plans(1, 0) == [Plan(0), Plan(1)]


def test_a_tree_is_compared_with_the_chain_of_the_same_rounds():
    knowledge = Knowledge()
    for _ in range(30):
        # Hard stretches are drafted with chains, easy ones with trees: in all rounds chains would commit two tokens.
        knowledge.note(0, RoundOutcome([(0, 1)]))
        knowledge.note(16, RoundOutcome([(3, 4)], of_chains=[(2, 3)]))
        # Of a tree that is read in part nobody knows what all of it would have brought.
        knowledge.note(16, RoundOutcome([(0, 1)], of_chains=[(1, 2)], is_whole=False))
    assert knowledge.tree_gains(4, [16])[16] == pytest.approx(4 / 3, abs=0.05)
    assert knowledge.expected_tokens(4)[4] == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize(("accepted", "gain"), [([8], 1.0), ([0], 1.0), ([0, 1, 2], 1.14), ([2, 3, 4], 1.07)])
def test_trees_are_believed_to_gain_little_where_chains_are_nearly_always_right_or_never(accepted, gain):
    """In between at most 1.4 times as many tokens are accepted, besides which there is the bonus token."""
    knowledge = Knowledge()
    for number in range(300):
        count = accepted[number % len(accepted)]
        knowledge.note(0, RoundOutcome([(count, min(count + 1, 8))]))
    assert knowledge.tree_gains(8, [16, 32]) == pytest.approx({16: gain, 32: gain}, abs=0.03)


def test_what_trees_gain_in_texts_that_repeat_themselves_is_soon_forgotten_in_others():
    """There trees hold what the text suggests, and a drafter's chains none of it."""
    knowledge = Knowledge()
    for _ in range(300):
        knowledge.note(16, RoundOutcome([(4, 5)], of_chains=[(0, 1)]))
    assert knowledge.tree_gains(4, [16])[16] > 4.5
    for _ in range(3):
        knowledge.begin_text()
        for _ in range(40):
            knowledge.note(16, RoundOutcome([(1, 2)], of_chains=[(1, 2)]))
        assert knowledge.tree_gains(4, [16])[16] < 1.2
    # And the other way round.
    knowledge.begin_text()
    for _ in range(40):
        knowledge.note(16, RoundOutcome([(4, 5)], of_chains=[(1, 2)]))
    assert knowledge.tree_gains(4, [16])[16] > 2.2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draft", [0.52, 0.3])
def test_long_compiled_rounds_lose_little_once_texts_no_longer_repeat_themselves(seed, draft):
    """A target for which a chain of six costs 1.76 steps, and a tree of 16 nodes 2.24; and one for which drafts cost less, 1.54
    and 2.02 steps, and in the end bring 0.86 of what rounds without one do."""
    world = World([0.25] * 6, draft=draft, slot=0.04, tree=0.08, noise=0.05, seed=seed, is_compiled=True, cold=0.0)
    world.pace, of_text = lambda number: 0.05, world.accepted

    def of_repetitions(plan):
        return (6, of_text(Plan(6))[1]) if plan.budget and world.random.random() < 0.5 else of_text(plan)

    world.accepted = of_repetitions
    world.speed(6)
    assert world.speed(4) > 1.3
    world.accepted = of_text
    world.speed(2)
    assert world.speed(8) > 0.93


def test_a_call_begins_with_what_earlier_texts_taught_and_follows_its_own():
    knowledge = Knowledge()
    for _ in range(100):
        knowledge.note(0, RoundOutcome([(4, 4)]))
    knowledge.begin_text()
    assert knowledge.chain.rates(1)[0] > 0.9
    for _ in range(10):
        knowledge.note(0, RoundOutcome([(0, 1)]))
    assert knowledge.chain.rates(1)[0] < 0.5
    knowledge.begin_text()
    assert knowledge.chain.rates(1)[0] > 0.8


def test_acceptance_is_counted_where_all_before_was_accepted():
    acceptance = AcceptanceRates()
    for _ in range(400):
        acceptance.note([(2, 3), (0, 1)])
    assert acceptance.rates(3) == pytest.approx([0.5, 1.0, 0.0], abs=0.02)
    assert acceptance.expected_tokens(3) == pytest.approx([1, 1.5, 2.0, 2.0], abs=0.1)


def test_a_run_of_rounds_that_contradicts_what_was_believed_is_believed():
    acceptance = AcceptanceRates(AcceptanceRates())
    for _ in range(200):
        acceptance.note([(4, 4)])
    for _ in range(12):
        acceptance.note([(0, 1)])
    assert acceptance.rates(1)[0] < 0.5


def test_rounds_that_are_told_at_once_teach_what_they_teach_one_by_one():
    single, several, outcomes = Knowledge(), Knowledge(), [(2, 3), (0, 1), (4, 4), (1, 2)]
    for number in range(40):
        # Each item's turn for each outcome comes.
        rounds = [RoundOutcome([outcomes[(number + place + item) % 4] for item in range(3)]) for place in range(4)]
        for each in rounds:
            single.note(0, each)
        several.note(0, *rounds)
    for ours, theirs in ((single.chain, several.chain), (single.earlier, several.earlier)):
        # A part is forgotten after each eighth round, of which four more are known by then.
        assert ours.rates(4) == pytest.approx(theirs.rates(4), rel=0.01)
        assert ours.num_judged == pytest.approx(theirs.num_judged, rel=0.02)
    for item, (*counts, _) in single.spread_of(3).found.items():
        assert counts == [*several.spread_of(3).found[item][:2]]


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_run_of_rounds_is_news_however_many_are_told_at_once(at_once):
    acceptance = AcceptanceRates(AcceptanceRates())
    for _ in range(40):
        acceptance.note([(4, 4)] * at_once, at_once)
    told = [acceptance.note([(0, 1)] * at_once, at_once) for _ in range(16 // at_once)]
    assert sum(told) == 1
    assert told.index(True) * at_once < 8


def test_rounds_with_trees_and_without_them_may_be_told_together():
    knowledge = Knowledge()
    tree = RoundOutcome([(3, 4)], of_chains=[(1, 2)])
    part = RoundOutcome([(0, 1)], of_chains=[(1, 2)], is_whole=False)
    knowledge.note(16, tree, part, RoundOutcome([(2, 3)]))
    gain = knowledge.gain_of(16)
    # Of trees that were read whole; and the chains of all.
    assert (gain.of_tree, gain.of_chain) == (4, 2)
    assert knowledge.earlier.num_judged == 3
    assert knowledge.earlier.rates(1)[0] == pytest.approx((3 + 2 * AcceptanceRates.PRIOR) / 5)


class ChangingTexts(World):
    """Texts whose first tokens are drafted with one rate, and all later ones with another."""

    def rate(self, plan, position):
        return self.rates[0] if self.written < 24 else self.rates[1]


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_batch_whose_texts_begin_badly_is_drafted_all_the_same(seed):
    world = ChangingTexts([0.45, 0.8] + [0.0] * 5, draft=0.5, plain=0.8, seed=seed)
    calls = [world.call(batch=4) for _ in range(12)]
    speeds = [speed for speed, _ in calls[1:]]
    assert statistics.median(speeds) > 1.05 / world.plain
    # By drafts all the time.
    assert sum(sum(plan.depth > 0 for plan in plans) > 0.8 * max(len(plans), 1) for _, plans in calls[1:]) >= 9


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_whose_texts_begin_well_is_left_to_plain_generate_if_whole_calls_are_slower(seed):
    world = ChangingTexts([0.8, 0.3] + [0.0] * 5, draft=0.5, plain=0.8, seed=seed)
    speeds = [world.call(batch=4)[0] for _ in range(12)]
    assert statistics.median(speeds[2:]) >= 0.97 / world.plain


class MixedTexts(World):
    """One text of six is easy to draft."""

    calls = 0

    @property
    def is_easy(self) -> bool:
        return self.calls % 6 == 3

    def rate(self, plan, position):
        return 0.92 if self.is_easy else 0.15

    def call(self, batch=1):
        self.calls += 1
        return super().call(batch)


def test_an_easy_text_among_hard_ones_is_drafted_almost_from_its_beginning():
    easy, hard = [], []
    for seed in range(6):
        world = MixedTexts([0.0] * 7, draft=0.3, slot=0.01, plain=1.3, seed=seed)
        world.speed(12)
        for _ in range(18):
            speed, _ = world.call()
            (easy if world.is_easy else hard).append(speed)
    assert statistics.mean(easy) >= 3.5
    assert statistics.mean(hard) >= 0.9


def test_whole_calls_tell_whether_a_batch_is_drafted():
    costs = Costs()
    for plan, seconds in ((NOTHING, 1.0), (Plan(4), 1.6)):
        costs.note(plan, seconds)
    assert costs.drafted_calls_are_slower(1.0) is None
    for drafted, is_slower in ((1 / Costs.LIKELY_LEAD_OF_BATCH + 0.01, True), (0.6, False)):
        costs.drafted_calls.last.clear()
        costs.note_call(100 * drafted, 100, is_plain=False)
        # Plain `generate` is thought to be faster than rounds without a draft, as long as nobody has seen it.
        assert costs.drafted_calls_are_slower(1.0) is is_slower
    costs.note_call(50.0, 100, is_plain=True)
    assert costs.drafted_calls_are_slower(1.0)


def test_a_batch_is_left_for_clearly_slower_calls_alone_and_the_more_of_them_there_are_the_less_will_do():
    costs, slower = Costs(), 1 + 0.6 * Costs.DOUBT_OF_CALL
    costs.note_call(100.0, 100, is_plain=True)
    verdicts = []
    for _ in range(4):
        costs.note_call(100 * slower, 100, is_plain=False)
        verdicts.append(costs.drafted_calls_are_slower(1.0))
    # The doubt about the mean of n calls is one over the root of n of that about one.
    assert verdicts == [False, False, True, True]


@pytest.mark.parametrize(("unevenness", "is_slower"), [(0.02, True), (0.4, False)])
def test_on_a_machine_whose_speed_changes_calls_have_to_be_slower_by_more(unevenness, is_slower):
    costs = Costs()
    for number in range(8):
        speed = 1 + unevenness * (-1) ** number
        costs.note_call(108 * speed, 100, is_plain=False)
        costs.note_call(100 / speed, 100, is_plain=True)
    assert costs.drafted_calls_are_slower(1.0) is is_slower


def test_a_lucky_hour_of_plain_generate_is_made_good_by_its_next_calls():
    costs = Costs()
    for speed in (1.0, 1.7, 1.0, 1.7):
        costs.note_call(90 * speed, 100, is_plain=False)
    verdicts = []
    for speed in (1.0, 1.7, 1.0, 1.7, 1.7):
        costs.note_call(100 * speed, 100, is_plain=True)
        verdicts.append(costs.drafted_calls_are_slower(1.0))
    assert verdicts[0] is True
    assert verdicts[-1] is False


def test_a_clock_that_sees_no_time_tells_nothing_of_calls():
    costs = Costs()
    costs.note_call(0.0, 100, is_plain=False)
    assert costs.drafted_calls_are_slower(1.0) is None


@pytest.mark.parametrize("seed", [7, 10])
def test_an_uneven_batch_is_not_left_for_good_because_its_first_texts_were_hard(seed):
    # Without a doubt about few calls these had 0.90 and 0.92.
    world = UnevenBatch([0.75, 0.8, *[0.75] * 5, 0.7], spread=0.6, draft=0.35, slot=0.01, batch=16, seed=seed)
    assert world.share_of_best(calls=14, known=3) >= 0.95


class HardTexts(UnevenBatch):
    """One batch among easy ones whose texts no drafter knows."""

    def texts(self, number):
        rates, self.rates = self.rates, [0.1 * rate for rate in self.rates] if number == 3 else self.rates
        try:
            return super().texts(number)
        finally:
            self.rates = rates


def test_one_batch_of_hard_texts_does_not_decide_for_all_that_come_after_it():
    shares = []
    for seed in range(6):
        world = HardTexts([0.75] * 8, spread=0.2, draft=0.35, slot=0.01, batch=16, seed=seed)
        costs = [world.call() for _ in range(12)]
        best = min(sum(world.cost_of_fixed(plan, number) for number in range(5, 12)) for plan in world.plans)
        shares.append(best / sum(costs[5:]))
    assert min(shares) > 0.9


@pytest.mark.parametrize(("num_accepted", "num_rounds", "is_plain"), [(0, 1, True), (1, 2, False), (1, 60, True)])
def test_a_few_rounds_leave_a_batch_only_if_they_are_hopeless(num_accepted, num_rounds, is_plain):
    knowledge = Knowledge()
    for _ in range(num_rounds):
        knowledge.note(0, RoundOutcome([(num_accepted, num_accepted + 1)] * 4))
    costs = knowledge.costs_for(4)
    for plan, seconds in ((NOTHING, 1.0), (Plan(4), 2.2)):
        for _ in range(3):
            costs.note(plan, seconds)
    worth = PlanWorth(knowledge, [NOTHING, Plan(4)], reads_again=False)
    worth.work_out(costs, 4)
    assert worth.is_surely_plain(costs) is is_plain


def test_a_batch_whose_items_advance_apart_is_nearly_as_fast_as_with_the_best_plan():
    rates, costs = [0.72, 0.75, 0.62, 0.6, 0.65, 0.6, 0.6], {"draft": 0.75, "slot": 0.01, "batch": 4}
    shares = [UnevenBatch(rates, spread=0.25, seed=seed, **costs).share_of_best(calls=14, known=3) for seed in range(8)]
    assert statistics.mean(shares) >= 0.95
    assert min(shares) >= 0.9


def test_drafts_that_take_twice_as_long_after_others_do_not_make_what_is_tried_now_and_then_seem_dear():
    rates, costs = [0.9, 0.85] + [0.8] * 5, {"spread": 0.6, "draft": 0.15, "slot": 0.02, "batch": 16}
    batches = [UnevenBatch(rates, seed=seed, cold=0.18, **costs) for seed in range(6)]
    shares = [batch.share_of_best(calls=14, known=4) for batch in batches]
    assert statistics.mean(shares) >= 0.97
    assert min(shares) >= 0.95


def test_to_think_a_plan_over_is_no_part_of_the_round_that_follows(monkeypatch):
    knowledge, now = Knowledge(), [0.0]
    reconsider = Schedule._reconsider

    def slowly(schedule):
        now[0] += 5.0
        reconsider(schedule)

    monkeypatch.setattr(Schedule, "_reconsider", slowly)
    schedule = Schedule(knowledge, PLANS, Plan(8), lambda: now[0])
    for _ in range(40):
        plan = schedule.next_plan(1, 8, 64)
        now[0] += 1.0 + 0.1 * plan.num_nodes
        schedule.note([(plan.depth, plan.depth)] if plan.depth else [], [(2, 3)] if plan.budget else None)
        schedule.end_round(is_ordinary=True)
    costs = knowledge.costs_for(1)
    measured = [plan for plan in PLANS if costs.count(plan)]
    # Plans are thought over before tries above all.
    assert len(measured) > 3
    assert [costs.of(plan) for plan in measured] == pytest.approx(
        [1.0 + 0.1 * plan.num_nodes for plan in measured], rel=0.05
    )


def test_only_calls_that_mostly_draft_tell_what_whole_calls_take_and_not_the_first_that_finds_out_how():
    for num_undrafted, tells in ((2, True), (20, False)):
        knowledge, now = Knowledge(), [0.0]
        for seconds in (3.0, 1.0):
            schedule = Schedule(knowledge, PLANS, Plan(8), lambda now=now: now[0])
            for number in range(30):
                schedule.next_plan(4, 8, 64)
                schedule.plan = NOTHING if number < num_undrafted else Plan(8)
                now[0] += seconds
                schedule.note([(1, 2)] * 4)
                schedule.end_round(is_ordinary=True)
            # The items that are left in the end are not what the call began with.
            schedule.next_plan(2, 8, 64)
            schedule.end_call(60)
        assert knowledge.costs_for(2).drafted_calls.count == 0
        assert knowledge.costs_for(4).drafted_calls.count == (60 if tells else 0)
        if tells:
            assert knowledge.costs_for(4).drafted_calls.mean()[0] == pytest.approx(30 / 60)


@pytest.mark.parametrize(("seconds", "is_left"), [(2.0, False), (4.0, True)])
def test_a_batch_whose_rounds_clearly_pay_is_not_left_to_find_out_what_plain_generate_takes(seconds, is_left):
    """Whole calls and rounds are timed in other hours: what one hour made slow calls look like isn't what drafts bring."""
    knowledge = Knowledge()
    costs = knowledge.costs_for(4)
    knowledge.note(0, *[RoundOutcome([(3, 4)] * 4)] * 8)
    for _ in range(4):
        costs.note(NOTHING, 1.0)
        for plan in PLANS[1:]:
            costs.note(plan, seconds)
    # A round commits four tokens to each item, and the call had one of an hour in which all took five times as long.
    costs.note_call(100 * 5 * seconds / 4, 100, is_plain=False)
    schedule = Schedule(knowledge, PLANS, Plan(8), lambda: 0.0)
    knowledge.purse = 0.0
    assert schedule.leaves_to_plain(4, 64) is is_left
    # Once there was such a call, whole calls tell.
    costs.note_call(100.0, 100, is_plain=True)
    assert Schedule(knowledge, PLANS, Plan(8), lambda: 0.0).leaves_to_plain(4, 64)


def test_a_batch_that_had_to_be_left_lets_plain_generate_be_timed_again():
    knowledge, now = Knowledge(), [0.0]
    costs = knowledge.costs_for(4)
    costs.note(NOTHING, 1.0)
    costs.note_call(90.0, 100, is_plain=False)
    # In a slow hour.
    costs.note_call(150.0, 100, is_plain=True)
    assert costs.drafted_calls_are_slower(1.0) is False
    schedule = Schedule(knowledge, PLANS, Plan(8), lambda: now[0])
    schedule.next_plan(4, 8, 64)
    schedule.end_round(is_ordinary=True)
    now[0] += 80.0
    schedule.note_plain(100)
    assert costs.drafted_calls_are_slower(1.0) is True


def test_one_call_in_a_slow_hour_does_not_tell_that_plain_generate_is_slower_with_a_batch():
    costs = Costs()
    for _ in range(Costs.ENOUGH):
        costs.note(NOTHING, 1.0)
    costs.note_plain(1.5, 128)
    assert not costs.plain_is_slower(is_of_batch=True)
    assert costs.lead_of_plain(is_of_batch=True) == 1.0
    costs.note_plain(1.5, 128)
    assert costs.plain_is_slower(is_of_batch=True)
    # No slow hour lasts for a whole call and makes its steps take that long.
    costs = Costs()
    for _ in range(Costs.ENOUGH):
        costs.note(NOTHING, 1.0)
    costs.note_plain(1.7, 16)
    assert not costs.plain_is_slower(is_of_batch=True)
    costs.note_plain(1.7, 80)
    assert costs.plain_is_slower(is_of_batch=True)


class QuickBatch(UnevenBatch):
    """Rounds without a draft are faster than plain `generate`'s steps."""

    PLAIN = 1.3


def test_a_batch_is_kept_without_drafts_where_these_are_no_slower_than_plain_generate_and_slower_than_nothing():
    rates, costs, shares = [0.6, 0.55, 0.5, 0.5], {"spread": 0.5, "draft": 0.3, "slot": 0.05, "batch": 8}, []
    for seed in range(6):
        batch = QuickBatch(rates, seed=seed, **costs)
        taken = [batch.call() for _ in range(16)][4:]
        shares.append(statistics.mean(taken) / batch.cost_of_fixed(NOTHING, 0))
    assert statistics.mean(shares) <= 1.03


def test_whether_plain_generate_is_still_slower_with_a_batch_is_seen_again():
    costs, waited = Costs(), []
    for _ in range(Costs.ENOUGH):
        costs.note(NOTHING, 1.0)
    costs.note_plain(1.5, 256)
    # Slower thrice, and then it was only a slow hour.
    for seconds in (1.5, 1.5, 0.8, 0.8):
        waited.append(0)
        while costs.plain_is_slower(is_of_batch=True):
            costs.note(NOTHING, 1.0)
            waited[-1] += 1
        costs.note_plain(seconds, 128)
    assert waited == [Costs.LOOKED_AGAIN + 1, 2 * Costs.LOOKED_AGAIN + 1, 4 * Costs.LOOKED_AGAIN + 1, 0]
    assert costs.lead_of_plain(is_of_batch=True) == pytest.approx(1 / 0.8)


def test_plain_generates_first_steps_are_known_however_many_rounds_came_before():
    costs = Costs()
    for _ in range(2 * Costs.LOOKED_AGAIN):
        costs.note(NOTHING, 1.0)
    costs.note_plain(1.5, 256)
    assert costs.plain_is_slower(is_of_batch=True)


def test_plain_generate_is_timed_again_soon_once_a_batchs_rounds_without_a_draft_are_slower():
    """As they were for four calls of a batch of 64, which were kept from it for what it had taken in another hour."""
    costs, num_rounds = Costs(), 0
    for _ in range(500):
        costs.note(NOTHING, 1.0)
    costs.note_plain(1.5, 256)
    assert costs.plain_is_slower(is_of_batch=True)
    while costs.plain_is_slower(is_of_batch=True):
        costs.note(NOTHING, 1.5)
        num_rounds += 1
    assert num_rounds <= 2 * Costs.LAST
    costs.note_plain(1.1, 128)
    assert not costs.plain_is_slower(is_of_batch=True)


def test_a_batch_is_left_to_plain_generate_in_the_middle_of_a_text_if_that_is_clearly_better():
    costs, plan = Costs(), Plan(4)
    for _ in range(2 * Costs.ENOUGH):
        costs.note(NOTHING, 1.0)
        costs.note(plan, 2.1)
    costs.note_plain(1.0, 100)
    for outcomes, is_left in (([(2, 3), (0, 1)], False), ([(1, 2), (0, 1)], True), ([(0, 1)] * 2, True)):
        knowledge = Knowledge()
        for number in range(60):
            # All items fare alike.
            knowledge.note(0, RoundOutcome([outcomes[(number + item) % 2] for item in range(4)]))
        worth = PlanWorth(knowledge, [NOTHING, plan], reads_again=False)
        worth.work_out(costs, batch=4)
        assert worth.rate(plan) < worth.rate(NOTHING)
        assert worth.is_surely_plain(costs) is is_left


def test_plain_generate_is_thought_to_be_faster_until_it_was_timed():
    costs = Costs()
    assert costs.lead_of_plain(is_of_batch=False) == 1.0
    assert costs.lead_of_plain(is_of_batch=True) == Costs.LIKELY_LEAD_OF_BATCH
    for _ in range(Costs.ENOUGH):
        costs.note(NOTHING, 1.0)
    assert costs.lead_of_plain(is_of_batch=False) == Costs.MOST_LEAD
    costs.note_plain(0.9, 100)
    for is_of_batch in (True, False):
        assert costs.lead_of_plain(is_of_batch) == pytest.approx(1 / 0.9)


def test_costs_are_compared_with_those_of_the_same_hour():
    costs, chain, tree = Costs(), Plan(8), Plan(8, 16)
    # The tree is first tried in a fast hour, and then followed in a slow one, in which the chain is tried twice.
    for level, rounds in (
        (1.0, [NOTHING] * 4 + [chain] * 12),
        (0.5, [chain] * 13 + [tree] * 3),
        (4.0, [tree] * 14 + [chain] * 2),
    ):
        for plan in rounds:
            costs.note(plan, level * {NOTHING: 1.0, chain: 2.0, tree: 3.0}[plan])
    assert costs.of(tree) / costs.of(NOTHING) == pytest.approx(3.0, rel=0.05)
    assert costs.of(chain) / costs.of(NOTHING) == pytest.approx(2.0, rel=0.05)
    assert costs.of(chain) == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("per_token", [0.0, 1e-4])
def test_a_longer_text_makes_all_rounds_longer_also_those_of_plans_that_were_tried_early(per_token):
    knowledge, chain, drawn = Knowledge(), Plan(8), random.Random(0)
    costs = knowledge.costs_for(64)
    for _ in range(6):
        knowledge.begin_text()
        for length in range(64, 192, 4):
            plan = NOTHING if length < 72 else chain
            seconds = {NOTHING: 0.03, chain: 0.1}[plan] + per_token * (length - 64)
            costs.note(plan, seconds * math.exp(drawn.gauss(0, 0.03)), length)
    assert costs.growth.per_token == pytest.approx(per_token, rel=0.2, abs=1e-5)
    for costs.length in (64, 192):
        assert costs.of(NOTHING) == pytest.approx(0.03 + per_token * (costs.length - 64), rel=0.1)


def test_neither_other_plans_nor_other_calls_say_how_rounds_grow():
    growth = Growth()
    for call in range(8):
        growth.begin_text()
        # A slower hour with each call, whose prompts are longer; and longer drafts later in the text.
        for length in range(64):
            growth.note(Plan(length // 16), 64 * call + length, (1 + call) * (1 + length // 16))
        # A text that stands still, and a debugger.
        growth.note(NOTHING, 64 * call, 1e6)
    assert growth.per_token == 0


def test_a_few_uneven_rounds_do_not_say_that_rounds_grow():
    growth = Growth()
    # The last one of three comes after others, and finds nothing in the processor's caches.
    for length, seconds in ((20, 2.2e-3), (21, 2.3e-3), (45, 3.6e-3)):
        growth.note(NOTHING, length, seconds)
    for length, seconds in ((22, 6.1e-3), (25, 6.2e-3)):
        growth.note(Plan(7), length, seconds)
    assert growth.per_token == 0


def test_what_a_plan_costs_that_was_never_tried_is_guessed_by_what_the_target_takes_to_read():
    costs, (draft, slot) = Costs(), (3.0, 0.5)
    for plan, seconds in ((NOTHING, 1.0), (Plan(8), 1.0 + draft + 8 * slot)):
        for _ in range(3):
            costs.note(plan, seconds)
    # As if a draft took the longer the more tokens it has, and trees nothing.
    assert costs.of(Plan(2)) == pytest.approx(1.0 + (draft + 8 * slot) / 4)
    assert costs.of(Plan(8, 32)) == pytest.approx(costs.of(Plan(8)))
    for slots in (1, 9):
        costs.reading.note(slots, 1.0 + (slots - 1) * slot)
    costs.note(Plan(4), 1.0 + draft + 4 * slot)
    for plan in (Plan(2), Plan(4), Plan(8, 32)):
        assert costs.of(plan) == pytest.approx(1.0 + draft + plan.num_nodes * slot)
    # Whatever else may be wrong, a round takes no less than the forward in it.
    costs.reading.note(33, 100.0)
    costs.note(Plan(1), 1.0 + draft + slot)
    assert costs.of(Plan(8, 32)) >= 100.0


def test_of_fewer_items_drafts_are_thought_to_take_in_proportion_less_until_they_are_measured():
    knowledge = Knowledge()
    costs = knowledge.costs_for(16)
    for plan, seconds in ((NOTHING, 2.0), (Plan(8), 10.0)):
        for _ in range(3):
            costs.note(plan, seconds)
    few, many = knowledge.costs_for(4), knowledge.costs_for(64)
    assert (few.of(NOTHING), few.of(Plan(8))) == pytest.approx((2.0, 4.0))
    assert (many.of(NOTHING), many.of(Plan(8))) == pytest.approx((2.0, 10.0))
    for _ in range(3):
        few.note(Plan(8), 7.0)
    assert few.of(Plan(8)) == pytest.approx(7.0)


def test_a_batch_that_never_was_measured_with_drafts_is_judged_by_what_is_left_of_it():
    knowledge = Knowledge()
    # Of five items one ends before the first round with a draft that tells anything.
    knowledge.costs_for(5).note(NOTHING, 1.0)
    assert knowledge.costs_for(5).of(Plan(8)) is None
    for plan, seconds in ((NOTHING, 0.8), (Plan(8), 1.7)):
        knowledge.costs_for(4).note(plan, seconds)
    assert knowledge.costs_for(5).of(Plan(8)) == pytest.approx(1.7)
    assert knowledge.costs_for(5).of(NOTHING) == 1.0
    for _ in range(Costs.BELIEVED):
        knowledge.costs_for(5).note(Plan(8), 1.9)
    assert knowledge.costs_for(5).of(Plan(8)) == pytest.approx(1.9)


@pytest.mark.parametrize(("unevenness", "num_compared"), [(0.01, 1), (0.1, 24)])
def test_costs_are_sure_once_plans_were_compared_often_enough_for_a_machine_as_uneven_as_this_one(
    unevenness, num_compared
):
    costs, blocks = Costs(), 0
    while not costs.are_sure and blocks < 40:
        for number in range(Compared.BLOCK):
            plan = Plan(4) if number in (3, 4) else Plan(8)
            costs.note(plan, (1 + plan.depth) * math.exp(unevenness * (-1) ** number))
        blocks += 1
    # Two rounds of one plan among fourteen of another count as two comparisons, roughly.
    assert blocks == pytest.approx(num_compared / 2, abs=3)


def test_nothing_is_tried_while_a_batch_waits_to_be_left_to_plain_generate():
    for seed in range(4):
        plans = World([0.0] * 7, seed=seed, plain=0.7).call(batch=16)[1]
        assert Costs.ENOUGH <= len(plans) < 60
        assert plans[2] == Plan(7)
        assert {*plans[8 : Costs.ENOUGH]} == {NOTHING}


def test_a_plan_that_looked_cheap_when_it_was_tried_is_found_out_while_it_is_followed():
    costs, chain, tree = Costs(), Plan(8), Plan(8, 16)
    for plan, seconds in [(NOTHING, 1.0)] * 2 + [(chain, 2.0)] * 12 + [(tree, 1.5)] * 2:
        costs.note(plan, seconds)
    assert costs.of(tree) < costs.of(chain)
    for _ in range(3):
        for plan, seconds in [(tree, 3.0)] * 14 + [(chain, 2.0)] * 2:
            costs.note(plan, seconds)
    assert costs.of(tree) / costs.of(chain) == pytest.approx(1.5, rel=0.1)


def test_of_two_plans_that_are_known_well_the_better_one_is_followed_however_small_its_lead():
    seconds = {NOTHING: 0.001, Plan(4): 0.001, Plan(8): 0.0018 / 1.01}
    knowledge, now, followed = Knowledge(), 0.0, []
    for plan, of_plan in seconds.items():
        for _ in range(Costs.SETTLED):
            knowledge.costs_for(1).note(plan, of_plan)
    knowledge.note(0, *[RoundOutcome([(8, 8)])] * 200)
    schedule = Schedule(knowledge, [*seconds], Plan(8), lambda: now)
    for _ in range(200):
        knowledge.purse = 0.0
        followed.append(schedule.next_plan(1, 100, 64))
        now += seconds[followed[-1]]
        schedule.note([(followed[-1].depth,) * 2])
        schedule.end_round(is_ordinary=True)
    assert {*followed} == {Plan(8)}


def test_calls_in_several_threads_may_teach_the_same_costs():
    """As those of a server's clients do; threads take turns within a line here."""
    errors, before = [], sys.getswitchinterval()

    def teach(costs, seed):
        drawn = random.Random(seed)
        try:
            for _ in range(200):
                costs.note(drawn.choice(PLANS), drawn.uniform(0.001, 0.003))
                costs.of(drawn.choice(PLANS))
        except Exception as error:  # noqa: BLE001 (a thread's own is seen by nobody)
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            costs = Costs()
            threads = [threading.Thread(target=teach, args=(costs, seed)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


def test_compiled_plans_are_compared_warm():
    """What is cold takes three times as long, so that a few rounds of each plan would say nothing."""
    shares = []
    for seed in range(8):
        world = World([0.6] * 8, draft=0.4, slot=0.05, seed=seed, is_compiled=True)
        _, plans = world.call()
        # What is compiled in any case is compiled in the first call.
        assert {NOTHING, Plan(8), Plan(8, 16)} <= {*plans}
        world.speed(8)
        shares.append(world.speed(12) / world.best_speed())
    assert statistics.median(shares) >= 0.95
    assert min(shares) >= 0.7


def test_very_short_compiled_rounds_are_measured_again_in_the_second_call():
    """In the first one, a young process, those that come later take longer than they ever will again."""
    world = World([0.5] * 8, draft=0.4, slot=0.03, tree=0.1, noise=0.05, is_compiled=True)
    # A round that drafts takes a third longer in the first call.
    usual = world.cost
    world.cost = lambda plan: usual(plan) * (4 / 3 if plan.depth else 1.0)
    calls = 0
    while world.knowledge.costs_for(1).count(Plan(8, 16)) < CompiledRounds.OPENING:
        world.call()
        calls += 1
    assert calls <= 2
    young = world.knowledge.costs_for(1)
    world.cost = usual
    world.speed(8)
    costs = world.knowledge.costs_for(1)
    assert costs is not young
    assert costs.chosen >= young.chosen
    for plan in (Plan(8), Plan(8, 16)):
        assert costs.of(plan) / costs.of(NOTHING) == pytest.approx(usual(plan), rel=0.1)
    # Once is enough, and long rounds are as long in a young process.
    world.call()
    assert world.knowledge.costs_for(1) is costs
    long = World([0.5] * 8, is_compiled=True, pace=lambda number: 0.05)
    long.speed(2)
    costs = long.knowledge.costs_for(1)
    long.speed(2)
    assert long.knowledge.costs_for(1) is costs


def test_rounds_without_a_draft_pay_for_what_the_drafter_has_to_read_meanwhile():
    """Of nine rounds eight take a second, and the ninth three, which no median shows."""
    costs = Costs()
    for number in range(45):
        if number % 9 == 8:
            costs.note_upkeep(3.0, 9)
        else:
            costs.note(NOTHING, 1.0)
    assert costs.of(NOTHING) == pytest.approx(11 / 9, rel=0.01)
    costs.note_upkeep(math.nan, 9)
    costs.note_upkeep(1e9, 9)
    costs.note(NOTHING, 1.0)
    assert costs.of(NOTHING) <= 1 + Costs.OUTLIER / 9


def test_compiled_rounds_soon_find_out_that_drafts_have_become_good():
    """Where nothing is drafted, tries need only say what is accepted, and take few rounds."""
    found = []
    for seed in range(16):
        world = World([0.02] * 8, slot=0.02, noise=0.05, seed=seed, is_compiled=True, pace=lambda number: 0.0005)
        world.speed(12)
        assert world.call()[1].count(NOTHING) > 100
        world.rates = [0.85] * 8
        found.append(next(number for number in range(40) if world.call()[1].count(NOTHING) < 20))
    assert statistics.median(found) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_compiled_drafts_that_are_never_right_cost_little(seed):
    """Though such calls are not left to plain `generate`."""
    world = World([0.0] * 8, seed=seed, is_compiled=True)
    world.speed(12)
    assert world.speed(12) >= 0.97


def test_a_shorter_chain_is_compiled_where_it_seems_worth_that():
    rates, costs = [0.8, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], {"draft": 0.2, "slot": 0.15, "is_compiled": True}
    short = World(rates, **costs)
    short.speed(8)
    assert short.call()[1].count(Plan(4)) > 20
    # A target whose rounds are long takes minutes to compile, in the middle of a call.
    long = World(rates, **costs, pace=lambda number: 0.05)
    long.speed(20)
    assert Plan(4) not in long.compiled
    # Where a few tokens more that are read cost nothing, it would be compiled in vain.
    cheap = World([0.8] * 8, slot=0.005, is_compiled=True)
    cheap.speed(20)
    assert Plan(4) not in cheap.compiled


def test_neither_prompts_nor_compiling_are_charged_to_tries():
    world = World([0.5] * 8, is_compiled=True)
    world.speed(3)
    before = world.knowledge.purse
    schedule = Schedule(world.knowledge, world.plans, Plan(8), lambda: world.now, is_compiled=True)
    schedule.next_plan(1, 20, 64)
    schedule.is_a_try, schedule.plan = True, Plan(8, 16)
    world.now += 60.0
    schedule.note([(0, 1)], [(0, 1)])
    schedule.end_round(False, is_unique=True)
    assert before - world.knowledge.purse < 4


def test_nothing_is_tried_where_there_is_room_for_a_part_of_it_only():
    world = World([0.9] * 7)
    world.speed(4)
    for _ in range(20):
        schedule = Schedule(world.knowledge, world.plans, Plan(7), lambda: world.now)
        for _ in range(12):
            plan = schedule.next_plan(1, 2, 64)
            assert plan in (NOTHING, Plan(1), Plan(2)) or plan == schedule.best.within(2)
            world.now += 0.002 * world.cost(plan)
            schedule.note([(0, 1)] if plan.depth else [])
            schedule.end_round(True)


def test_a_try_in_an_uneven_batch_is_charged_by_what_its_tokens_are_worth_to_the_batch():
    knowledge, best, tried = Knowledge(), Plan(1), Plan(8)
    tries = Schedule(knowledge, PLANS, Plan(8), lambda: 0.0).tries
    worth = tries.worth
    # Half of the items have all of a long draft accepted, and the others, for whose rounds all wait, nothing.
    worth.committed, worth.tokens = {best: 1.5, tried: 5.0}, {best: 1.25, tried: 1.5}
    for accepted, tokens in ([0, 8, 0, 8], 1.5), ([0, 0, 0, 8], 1.5), ([4, 8, 4, 8], 1.5 * 7 / 5):
        knowledge.purse = 3.0
        tries.pay(tried, best, seconds=2.0, of_best=1.0, accepted=accepted)
        assert knowledge.purse == pytest.approx(3.0 - (2.0 - tokens / 1.25))


def test_tries_of_short_rounds_come_in_pairs():
    """The first one finds the processor's caches cold."""
    world = World([0.85] * 7, tree=0.5)
    world.speed(3)
    runs = []
    for _ in range(6):
        plans = world.call()[1]
        # Near the end there is no room for whole drafts.
        numbers = [list(run) for _, run in groupby(range(len(plans)), key=plans.__getitem__)]
        runs += [len(run) for run in numbers if run[0] < len(plans) - 8]
    assert len(runs) > 8
    assert min(runs) >= 2
    # Long ones don't need it.
    slow = World([0.9] * 7, pace=lambda number: 0.1)
    assert slow.call()[1][:4].count(NOTHING) == 2
    assert 1 in [len(list(run)) for _, run in groupby(slow.call()[1])]


def test_outliers_among_the_first_measurements_are_not_believed():
    costs = Costs()
    for plan, seconds in ((NOTHING, 1.0), (NOTHING, 1.1), (Plan(8), 2.0), (Plan(4), 30.0), (Plan(4), 1.8)):
        costs.note(plan, seconds)
    assert costs.of(Plan(4)) == pytest.approx(1.8)
    assert costs.of(Plan(6)) == pytest.approx(1.9)
    assert Costs().of(Plan(4)) is None


def test_a_round_without_a_draft_is_not_guessed_from_drafts():
    """It may have been measured twice alone, and costs no more than drafts do: how much less they don't know."""
    costs = Costs()
    for plan, seconds in (
        (NOTHING, 1.0),
        (NOTHING, 1.0),
        (Plan(7), 1.2),
        (Plan(7), 1.2),
        (Plan(4), 0.8),
        (Plan(4), 0.8),
    ):
        costs.note(plan, seconds)
    assert costs.of(NOTHING) == pytest.approx(0.8)


def test_values_that_have_to_rise_are_pooled_by_their_weights():
    assert rising([]) == []
    points = [(1, 1.0, 5), (2, 4.0, 1), (3, 1.0, 2), (4, 3.0, 1), (5, 3.0, 2)]
    assert rising(points) == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 3.0), (5, 3.0)]
    # One that is below all before it takes them along.
    assert rising([(1, 3.0, 1), (2, 4.0, 1), (3, 2.0, 2)]) == [(1, 2.75), (2, 2.75), (3, 2.75)]


def test_costs_between_measured_sizes_are_interpolated():
    assert interpolated([(0, 1.0)], 3) is None
    assert interpolated([(0, 1.0), (4, 2.0)], 2) == 1.5
    assert interpolated([(0, 1.0), (4, 2.0)], 9) == 2.0
    assert interpolated([(0, 1.0), (4, 2.0), (8, 3.0)], 12) == 4.0
    assert interpolated([(0, 1.0), (4, 2.0), (8, 1.5)], 12) == 1.5
    # Before the first one, too, but a forward over less takes its share of the time at least.
    assert interpolated([(4, 2.0), (8, 3.0)], 2) == 1.5
    assert interpolated([(4, 2.0), (8, 12.0)], 2) == 1.0
    assert interpolated([(0, 2.0), (8, 12.0)], 0) == 2.0


def test_calls_in_several_threads_may_teach_the_same_knowledge():
    knowledge, generator = Knowledge(), random.Random(0)

    def teach():
        for number in range(3000):
            batch = generator.choice((1, 3, 4))
            depth = generator.choice((2, 5, 9))
            counts = [generator.randint(0, depth) for _ in range(batch)]
            outcomes = [(count, min(count + 1, depth)) for count in counts]
            knowledge.note(0, RoundOutcome(outcomes))
            knowledge.note(16, RoundOutcome(outcomes, of_chains=[(0, 1)] * batch))
            knowledge.tree_gains(9, [16, 32])
            knowledge.expected_tokens(9)
            knowledge.costs_for(batch).note(Plan(depth), 1e-3 * depth)
            reading = knowledge.costs_for(batch).reading
            reading.note(generator.randint(1, 9), 1e-3)
            reading.of(5)
            if number % 10 == 0:
                knowledge.begin_text()
        return True

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        # One that fails returns nothing.
        assert in_threads(4, teach) == [True] * 4
    finally:
        sys.setswitchinterval(before)
    assert all(0 <= rate <= 1 for rate in knowledge.chain.rates(9))


def test_a_larger_tree_is_believed_to_gain_what_a_smaller_one_does_until_it_is_tried():
    knowledge = Knowledge()
    for _ in range(300):
        knowledge.note(16, RoundOutcome([(3, 4)], [(0, 1)]))
    knowledge.begin_text()
    gains = knowledge.tree_gains(8, [32, 16, 64])
    assert gains[64] == gains[32] == pytest.approx(gains[16], rel=0.05)
    assert gains[32] > 3
    for _ in range(300):
        knowledge.note(32, RoundOutcome([(1, 2)], [(0, 1)]))
    knowledge.begin_text()
    assert knowledge.tree_gains(8, [16, 32])[32] == pytest.approx(2, rel=0.1)
    assert knowledge.tree_gains(8, [16, 64], are_nested=False)[64] < 1.5


def test_where_a_large_tree_is_best_it_is_found():
    shares = []
    for seed in range(8):
        world = World([0.35] * 8, tree_gain=1.0, slot=0.01, seed=seed)
        world.speed(80)
        shares.append(world.speed(20) / world.best_speed())
    assert statistics.mean(shares) > 0.97
    assert min(shares) > 0.9


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_texts_that_never_have_room_for_all_of_a_draft_come_to_a_choice(is_compiled, is_right):
    # As on an accelerator, where there is one tree.
    knowledge, full, took, drafted = Knowledge(is_compiled), Plan(15, 32), [], []
    for _ in range(20):
        schedule = Schedule(knowledge, [NOTHING, full], full, lambda: sum(took), is_compiled=is_compiled)
        left, rounds = 10, []
        while left > 0 and not schedule.leaves_rest_to_plain():
            plan = schedule.next_plan(1, left - 1, PROMPT)
            took.append(0.05 if plan.depth else 0.03)
            accepted = plan.depth if is_right else 0
            schedule.note([(accepted, min(accepted + 1, plan.depth))] if plan.depth else [])
            schedule.end_round(is_ordinary=True)
            left, rounds = left - accepted - 1, [*rounds, plan.depth > 0]
        schedule.learn()
        drafted.append(sum(rounds))
    assert drafted[-10:] == [int(is_right)] * 10
    assert knowledge.purse > -2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_steps_of_plain_generate_that_a_clock_did_not_see_say_nothing(seconds):
    costs = Costs()
    for _ in range(40):
        costs.note(NOTHING, 0.01)
    before = costs.lead_of_plain(is_of_batch=False)
    costs.note_plain(seconds, 100)
    assert costs.lead_of_plain(is_of_batch=False) == before
    costs.note_plain(0.01, 100)
    assert costs.lead_of_plain(is_of_batch=False) == pytest.approx(1.0)
