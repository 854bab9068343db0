"""Whatever happens in calls, in whichever order, the schedule of their rounds has an answer."""

import math
import random

import pytest

from hf_pardraft.generation.scheduling.knowledge import Knowledge
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan, all_plans, compiled_plans
from hf_pardraft.generation.scheduling.schedule import Schedule

# What rounds choose from: on a CPU, compiled and not, and elsewhere.
PLANS = {
    "uncompiled": lambda depth, budget: all_plans(depth, max(budget, depth + 1)),
    "uncompiled chains": lambda depth, _budget: all_plans(depth, 0),
    "compiled": compiled_plans,
    "one tree": lambda depth, budget: [NOTHING, Plan(depth, budget)],
    "one chain": lambda depth, _budget: [NOTHING, Plan(depth)],
}


class RandomCalls:
    """Calls with one drafter, in which anything may happen: items end, less is drafted, clocks jump, plain steps take over."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.is_compiled = kind == "compiled" or (kind.startswith("one") and seed % 2 == 0)
        depth, budget = self.random.choice([1, 2, 4, 7, 16]), self.random.choice([1, 4, 16, 64])
        self.plans, self.knowledge = PLANS[kind](depth, budget), Knowledge(self.is_compiled)
        self.first = Plan(depth) if Plan(depth) in self.plans else self.plans[-1]
        self.pace, self.noise = 10 ** self.random.uniform(-4, 0), self.random.choice([0.0, 0.05, 0.3])

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def probabilities(self, count: int) -> list[float]:
        return sorted((self.random.random() for _ in range(count)), reverse=True)

    def wait(self, rounds: float) -> None:
        self.now += self.pace * rounds * math.exp(self.random.gauss(0, self.noise))

    def call(self) -> list[Plan]:
        looks, compares = self.chance(0.5) and not self.is_compiled, self.chance(0.5)
        options = {
            "looks": looks,
            "compares": compares,
            "reads_again": self.chance(0.3),
            "is_compiled": self.is_compiled,
        }
        schedule = Schedule(self.knowledge, self.plans, self.first, lambda: self.now, **options)
        batch, rate, left = self.random.choice([1, 1, 2, 3, 8, 64]), self.random.random(), self.random.randint(1, 150)
        length, num_steps, followed = self.random.randint(1, 4000), left, []
        is_plains = schedule.leaves_to_plain(batch, length)
        while left > 0 and batch > 0:
            if is_plains or schedule.leaves_rest_to_plain():
                self.wait(left)
                schedule.note_plain(left)
                if schedule.looks_back:
                    schedule.note_text(self.random.randint(0, 3), self.random.randint(1, 4))
                return followed
            room = self.random.randint(0, left - 1) if self.chance(0.3) else left - 1
            followed.append(self.round(schedule, schedule.next_plan(batch, room, length), batch, rate))
            left, length = left - 1 - followed[-1].depth, length + 1
            batch -= self.random.randint(1, max(batch // 2, 1)) if self.chance(0.1) else 0
        schedule.learn()
        schedule.end_call(num_steps)
        return followed

    def round(self, schedule: Schedule, plan: Plan, batch: int, rate: float) -> Plan:
        if batch == 1 and self.chance(0.1) and schedule.worth_reading_alone(self.probabilities(6)):
            schedule.drop_plan()
            plan = schedule.plan
        read = plan.num_nodes
        if plan.depth and schedule.reading.looks_at(read):
            read = schedule.reading.worth_it([self.probabilities(read)] * batch, read)
        schedule.reading.begin()
        self.wait(1 + 0.02 * read * batch)
        schedule.reading.end((read + 1) * batch)
        self.now += self.random.choice([-1, 5, 100]) if self.chance(0.02) else 0
        accepted = [next((n for n in range(plan.depth) if not self.chance(rate)), plan.depth) for _ in range(batch)]
        outcomes = [(count, min(count + 1, plan.depth)) for count in accepted]
        schedule.note(outcomes, [(0, 1)] * batch if plan.budget and schedule.compares else None)
        schedule.end_round(self.chance(0.9), self.chance(0.05), self.random.choice([1, 1, 1, 4]))
        return plan


@pytest.mark.parametrize("kind", PLANS)
def test_no_course_of_calls_ends_in_an_error(kind):
    for seed in range(150):
        calls = RandomCalls(kind, seed)
        for _ in range(5):
            for plan in calls.call():
                # Of the plans there are, or less of one where there is no room for it.
                assert plan == NOTHING or any(plan == other.within(plan.depth) for other in calls.plans)
