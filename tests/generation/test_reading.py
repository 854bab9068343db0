"""What the target takes to read a draft, and how much of one is worth it."""

import math
import random

import pytest
import torch

from hf_pardraft.generation.scheduling import reading
from hf_pardraft.generation.scheduling.fixed import FixedSchedule
from hf_pardraft.generation.scheduling.knowledge import Knowledge
from hf_pardraft.generation.scheduling.plans import Plan, all_plans
from hf_pardraft.generation.scheduling.reading import ReadingChoice, ReadingCosts, best_count, values_of_reading
from hf_pardraft.generation.scheduling.schedule import Schedule
from simulated_rounds import PartlyReadWorld
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target


class Clock:
    """A clock that goes on when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def dear_reading(clock: Clock | None = None) -> ReadingChoice:
    """Where 33 slots take the target ten times as long as one, and drafts are looked at."""
    choice = ReadingChoice(clock or Clock(), looks=True)
    for slots in (1, 33):
        choice.costs.note(slots, 0.05 * (0.7 + 0.3 * slots))
    choice.know(rate=1 / 0.05, most=32)
    choice.begin_round(1, is_a_try=False)
    return choice


def schedule_of(knowledge: Knowledge, clock: Clock, costs: dict[int, float]) -> Schedule:
    """A schedule that knows what forwards of so many slots take."""
    for slots, seconds in costs.items():
        knowledge.costs_for(1).reading.note(slots, seconds)
    schedule = Schedule(knowledge, all_plans(8, 32), Plan(8), clock, looks=True)
    schedule.next_plan(1, 8, 64)
    return schedule


@pytest.mark.parametrize(
    ("probabilities", "seconds", "rate", "expected"),
    [
        ([[0.01, 0.001]], float, 1.0, 0),
        ([[0.99, 0.98]], lambda slots: 1 + 0.1 * slots, 1.0, 2),
        # Of a batch all read equally many, for which the mean is asked.
        ([[0.9], [0.0]], float, 0.4, 1),
        ([[0.9], [0.0]], float, 0.5, 0),
    ],
)
def test_nothing_is_read_where_the_draft_says_it_will_not_be_accepted(probabilities, seconds, rate, expected):
    assert best_count(values_of_reading(probabilities, seconds, rate)) == expected


def test_what_a_part_of_a_draft_is_worth():
    """Tokens an item, less those that are to be had in the same time."""
    values = values_of_reading([[0.5, 0.9], [0.7, 0.1]], lambda slots: 0.2 * slots, rate=2.0)
    assert values == pytest.approx([0 - 0.4, 0.8 - 0.8, 0.8 + 0.3 - 1.2])


def test_looks_pay_where_they_save_more_than_they_take():
    reading = ReadingCosts()
    assert reading.looks_pay
    for _ in range(ReadingCosts.REMEMBERED_LOOKS):
        reading.note_look(0.001, saved=0.0)
    assert not reading.looks_pay
    # A process that is stopped in the middle of one says nothing, and a clock that goes back neither.
    for seconds in (100.0, 0.001, -1.0, math.nan):
        reading.note_look(seconds, saved=0.009)
    assert reading.looks_pay


def test_costs_of_forwards_are_interpolated():
    costs = ReadingCosts()
    costs.note(1, 1.0)
    assert costs.of(4) is None
    assert not costs.are_noticeable(9)
    for seconds in (5.0, 500.0, 5.0, 0.0, math.nan):
        costs.note(9, seconds)
    assert costs.of(5) == pytest.approx(3.0)
    assert costs.are_noticeable(9)


@pytest.mark.parametrize("seed", range(8))
def test_a_size_that_was_read_in_faster_hours_does_not_seem_better_for_it(seed):
    """With other tenants on the machine for thirty forwards of forty, all of 17 slots, and some of 9 while there are none."""
    costs, generator = ReadingCosts(), random.Random(seed)
    for number in range(400):
        is_slow, is_smaller = number % 40 < 30, number % 40 in (35, 38)
        seconds = (0.010 if is_smaller else 0.012) * (1.6 if is_slow else 1.0) * math.exp(generator.gauss(0, 0.05))
        costs.note(9 if is_smaller else 17, seconds)
    assert costs.of(17) / costs.of(9) == pytest.approx(1.2, rel=0.1)


def test_more_slots_take_no_less_time():
    """A size of which one lucky forward is known would seem the best one to read."""
    costs = ReadingCosts()
    for slots, count, seconds in ((1, 9, 0.008), (9, 9, 0.012), (11, 1, 0.009), (17, 9, 0.013)):
        for _ in range(count):
            costs.note(slots, seconds)
    of_sizes = [costs.of(slots) for slots in range(1, 24)]
    assert of_sizes == sorted(of_sizes)
    assert costs.of(9) == pytest.approx(0.012, rel=0.05)


def test_a_clock_by_which_large_forwards_took_far_longer_makes_no_other_cost_less_than_nothing():
    costs = ReadingCosts()
    for slots, seconds in ((9, 0.003), (17, 0.01)):
        costs.note(slots, seconds)
    assert all(costs.of(slots) > 0 for slots in range(1, 40))
    for slots in range(1, 10):
        assert slots <= costs.more(slots, 17) <= 17


def test_looks_that_save_nothing_become_rare():
    clock, looked = Clock(), []
    choice = dear_reading(clock)
    for number in range(128):
        choice.begin_round(number, is_a_try=False)
        looked.append(choice.looks_at(8))
        if looked[-1]:
            clock.now += 0.001
            choice.worth_it([[0.99] * 8], 8)
        choice.begin()
        choice.end_look(of_text=0.0)
    assert looked[1:] == [number % ReadingChoice.LOOKS == 0 for number in range(1, 128)]


def test_what_the_text_suggests_is_put_into_drafts_as_long_as_more_of_it_is_accepted_than_that_takes():
    clock, looked = Clock(), []
    choice = ReadingChoice(clock, looks=True)
    # A token of each item takes 10 ms otherwise. A look takes 1 ms, so it pays if it brings more than a tenth of a token.
    choice.know(rate=100.0, most=8)
    for number in range(384):
        choice.begin_round(number, is_a_try=False)
        looked.append(choice.looks_at(8, has_text=True))
        if looked[-1]:
            clock.now += 0.001
            choice.worth_it([[0.99] * 8], 8)
        choice.begin()
        # In the middle of the text it repeats itself.
        choice.end_look(of_text=0.5 if 128 <= number < 256 else 0.05)
    seldom = [number % ReadingChoice.LOOKS == 0 for number in range(128)]
    assert looked[1:128] == seldom[1:]
    # Of the last looks a few have to tell it.
    assert all(looked[128 + 5 * ReadingChoice.LOOKS : 256])
    assert looked[256 + 2 * ReadingCosts.REMEMBERED_LOOKS :] == seldom[2 * ReadingCosts.REMEMBERED_LOOKS :]


def test_equal_work_holds_what_the_text_suggests_always():
    reading = FixedSchedule(Plan(4, 8)).reading
    for number in range(20):
        reading.begin_round(number, is_a_try=False)
        assert reading.looks_at(8, has_text=True)
        assert not reading.looks_at(8)
        reading.begin()
        reading.end_look(of_text=0.0)


def test_a_try_is_read_whole():
    choice, hopeless = dear_reading(), [[0.01] * 8]
    assert choice.looks_at(8)
    assert choice.worth_it(hopeless, 8) == 0
    assert not choice.is_whole
    choice.begin_round(2, is_a_try=True)
    assert not choice.looks_at(8)
    assert choice.worth_it(hopeless, 8) == 8
    assert choice.is_whole


def test_more_is_read_now_and_then_than_seems_worth_it_but_never_for_more_than_twice_as_long():
    choice, read = dear_reading(), []
    for number in range(64):
        choice.begin_round(number, is_a_try=False)
        read.append(choice.worth_it([[0.01] * 32], 32))
    assert [count > 0 for count in read] == [number % 16 == 0 for number in range(64)]
    assert choice.costs.of(max(read) + 1) <= 2 * choice.costs.of(1) < choice.costs.of(max(read) + 2)


@pytest.mark.parametrize("read", [1, 3, 8])
def test_what_is_read_of_drafts_does_not_change_what_they_are_thought_to_cost(read):
    knowledge, clock = Knowledge(), Clock()
    schedule = schedule_of(knowledge, clock, {1: 0.01, 3: 0.03, 9: 0.09})
    for _ in range(40):
        schedule.plan = Plan(8)
        schedule.reading.begin()
        clock.now += 0.01 * (read + 1)
        schedule.reading.end(read + 1)
        clock.now += 0.005
        schedule.end_round(is_ordinary=True)
    assert knowledge.costs_for(1).of(Plan(8)) == pytest.approx(0.01 * 9 + 0.005)


def test_a_plan_is_thought_to_cost_what_its_rounds_do_without_looks_at_drafts():
    knowledge, clock = Knowledge(), Clock()
    schedule = schedule_of(knowledge, clock, {1: 0.01, 9: 0.09})
    schedule.reading.know(rate=1 / 0.015, most=8)
    for _ in range(40):
        schedule.plan = Plan(8)
        assert schedule.reading.looks_at(8)
        clock.now += 0.002
        schedule.reading.worth_it([[0.01] * 8], 8)
        schedule.reading.begin()
        clock.now += 0.09
        schedule.reading.end(9)
        schedule.end_round(is_ordinary=True)
    assert knowledge.costs_for(1).of(Plan(8)) == pytest.approx(0.09)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slot", "gain"), [(0.1, 1.0), (0.3, 1.2)])
def test_where_reading_is_dear_a_draft_read_in_part_is_faster_than_any_fixed_depth(slot, gain, seed):
    world = PartlyReadWorld(seed, slot)
    world.speed(10)
    assert world.speed(20) >= gain * max(world.fixed_speed(depth) for depth in range(9))


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0}])
@pytest.mark.parametrize("budget", [0, 12])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_the_text_is_plain_generates_however_much_is_read(monkeypatch, kind, budget, sampling):
    target, batch = tiny_target("llama", dtype=torch.float64), 3
    prompt = random_prompt(6).expand(batch, -1)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, **sampling}
    torch.manual_seed(3)
    plain = target.generate(prompt, **options)
    drafter = make_oracle(tiny_drafter(kind, target).double(), list(plain), rates=[0.8] * 4)
    luck, read = random.Random(0), []

    def chosen(probabilities, seconds, rate):
        read.append(luck.randint(0, len(probabilities[0])))
        return [float(count == read[-1]) for count in range(len(probabilities[0]) + 1)]

    def next_plan(self, batch, room, length):
        self.plan = self.best = self.plans[-1].within(room)
        self.num_rounds += 1
        self.reading.begin_round(self.num_rounds, is_a_try=False)
        self.reading.rate = 1.0
        return self.plan

    monkeypatch.setattr(reading, "values_of_reading", chosen)
    monkeypatch.setattr(ReadingChoice, "_may_be_cut", lambda self, num_nodes: True)
    monkeypatch.setattr(ReadingCosts, "looks_pay", True)
    settings = drafter.generation_config
    settings.draft_schedule, settings.tree_budget, settings.num_assistant_tokens = "auto", budget, 4
    # All drafts are looked at: none is left out because the clock says so.
    monkeypatch.setattr(Schedule, "next_plan", next_plan)
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: False)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
    assert {0, 1, 3} <= set(read)
    assert {0, 1, 2} <= set(drafter.last_stats.drafted_per_round)
