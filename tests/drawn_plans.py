"""Rounds whose plans are drawn at random: whatever a schedule may choose, the text must be the same."""

import random

from hf_pardraft.generation import hooks
from hf_pardraft.generation.scheduling.fixed import FixedSchedule
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan


class DrawnSchedule(FixedSchedule):
    """Another plan in each round, as random numbers say; none in a third of them."""

    def __init__(self, depth: int, budget: int, *, is_compiled: bool, seed: int = 0) -> None:
        super().__init__(Plan(depth, budget))
        self.random, self.full, self.is_compiled = random.Random(seed), self.plan, is_compiled

    def next_plan(self, batch: int, room: int, length: int) -> Plan:
        self.plan = self._drawn()
        self.is_pausing = self.plan == NOTHING
        return super().next_plan(batch, room, length)

    def _drawn(self) -> Plan:
        if self.random.random() < 1 / 3:
            return NOTHING
        if self.is_compiled:
            return self.random.choice([Plan(max(self.deepest // 2, 1)), Plan(self.deepest), self.full])
        budget = self.random.randint(1, self.full.budget) if self.full.budget and self.random.random() < 0.5 else 0
        return Plan(self.random.randint(1, self.deepest), budget)


def draw_plans(monkeypatch, is_compiled: bool = False) -> list[DrawnSchedule]:
    """Let all calls follow drawn plans; returns the list that their schedules are put in."""
    schedules = []

    def schedule_for(target, drafter, settings, generation_config, batch):
        schedules.append(DrawnSchedule(settings.depth, settings.tree_budget, is_compiled=is_compiled))
        return schedules[-1]

    monkeypatch.setattr(hooks, "schedule_for", schedule_for)
    return schedules
