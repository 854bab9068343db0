"""Rounds whose costs and acceptance follow given laws: what a schedule makes of them, without a model."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_pardraft.generation.scheduling.knowledge import Knowledge
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan, all_plans, compiled_plans
from hf_pardraft.generation.scheduling.schedule import Schedule

# Of a prompt, and to write.
PROMPT, TOKENS = 64, 128
# Tokens that a drafter reads for nothing; any more cost a share of a round each.
FREE, READING = 9, 0.02


@dataclass
class World:
    """A drafter, a target and a machine.

    Attributes:
        rates: for each position, how probably a token is accepted if all before it were.
        draft, slot, tree: what a draft costs, each token that is verified, and the search for a tree.
        tree_gain: how much of a doubling of guesses a doubling of nodes is worth at each position.
        noise: of the logarithm of a round's seconds.
        pace: seconds of a round of cost 1, by the number of the round.
        outliers: by the number of the round, the seconds that a clock is put forward.
        plain: what a step of plain `generate` costs, where a round without a draft costs 1.
        is_compiled: whether rounds are compiled. Each plan takes a second then when it is followed for the first time, and the
            first rounds in a row of any plan are slow.
        cold: how slow these are: by what share of its cost the very first takes longer, of compiled rounds.
    """

    rates: list[float]
    draft: float = 0.6
    slot: float = 0.03
    tree: float = 0.2
    tree_gain: float = 0.4
    noise: float = 0.1
    seed: int = 0
    pace: Callable[[int], float] = lambda number: 0.002
    outliers: dict[int, float] = field(default_factory=dict)
    plain: float = 1.0
    is_compiled: bool = False
    cold: float = 1.0

    def __post_init__(self) -> None:
        self.random, self.now, self.num_rounds, self.written = random.Random(self.seed), 0.0, 0, 0
        self.knowledge, self.depth = Knowledge(self.is_compiled), len(self.rates)
        self.plans = compiled_plans(self.depth, 16) if self.is_compiled else all_plans(self.depth, 32)
        self.compiled: set[Plan] = set()

    def cost(self, plan: Plan) -> float:
        drafting = self.draft + self.tree * (plan.budget > 0) if plan.depth else 0.0
        return 1.0 + drafting + self.slot * plan.num_nodes

    def rate(self, plan: Plan, position: int) -> float:
        guesses = 1 + self.tree_gain * math.log2(1 + plan.budget / 4)
        return 1 - (1 - self.rates[position]) ** guesses

    def accepted(self, plan: Plan) -> tuple[int, int]:
        """Tokens of a draft that are accepted, and those that would be of a chain."""
        count = of_chain = 0
        while count < plan.depth and (luck := self.random.random()) < self.rate(plan, count):
            of_chain += of_chain == count and luck < self.rate(Plan(plan.depth), count)
            count += 1
        return count, of_chain

    def speed_of(self, plan: Plan, calls: int = 60) -> float:
        """Tokens over cost if each round follows this plan."""
        tokens = cost = 0.0
        for _ in range(calls):
            left = TOKENS
            while left > 0:
                followed = plan.within(left - 1)
                left -= self.accepted(followed)[0] + 1
                cost += self.cost(followed)
            tokens += TOKENS - left
        return tokens / cost

    def call(self, batch: int = 1) -> tuple[float, list[Plan]]:
        """A call by the schedule: its tokens over its cost, noise not counted, and its plans."""
        first = Plan(self.depth)
        schedule = Schedule(self.knowledge, self.plans, first, lambda: self.now, is_compiled=self.is_compiled)
        left, pending, cost, followed = TOKENS, 24, 0.0, []
        is_plains = schedule.ends_too_soon(batch, PROMPT, TOKENS) or schedule.leaves_to_plain(batch, PROMPT)
        while left > 0:
            if is_plains or schedule.leaves_rest_to_plain():
                self.now += self.plain * left * self.pace(self.num_rounds)
                schedule.note_plain(left)
                return TOKENS / (cost + self.plain * left), followed
            self.written = TOKENS - left
            plan = schedule.next_plan(batch, left - 1, PROMPT + self.written)
            accepted = [self.accepted(plan) for _ in range(batch)]
            price, is_ordinary = self.cost(plan), not plan.depth or pending <= self.depth + 1
            if plan.depth:
                price, pending = price + READING * max(0, pending - FREE), 0
            self.now += price * self.pace(self.num_rounds) * math.exp(self.random.gauss(0, self.noise))
            self.now += self.outliers.get(self.num_rounds, 0.0)
            is_new = self.is_compiled and schedule.chosen not in self.compiled
            if self.is_compiled:
                self.compiled.add(schedule.chosen)
                in_a_row = next((n for n, before in enumerate(reversed(followed)) if before != plan), len(followed))
                self.now += is_new + self.cold * price * self.pace(self.num_rounds) * 2.0 ** (1 - in_a_row)
            self.num_rounds, cost = self.num_rounds + 1, cost + price
            outcomes, of_chains = (
                [(counts[kind], min(counts[kind] + 1, plan.depth)) for counts in accepted] if plan.depth else []
                for kind in (0, 1)
            )
            schedule.note(outcomes, of_chains if plan.budget else None)
            schedule.end_round(is_ordinary, is_new)
            tokens = sum(count for count, _ in accepted) // batch + 1
            left, pending = left - tokens, pending + tokens
            followed.append(plan)
        schedule.learn()
        schedule.end_call(TOKENS)
        return (TOKENS - left) / cost, followed

    def speed(self, calls: int) -> float:
        return sum(self.call()[0] for _ in range(calls)) / calls

    def best_speed(self) -> float:
        """Of the best plan for all rounds, found by trying them all."""
        candidates = sorted(self.plans, key=lambda plan: self.speed_of(plan, calls=10))[-3:]
        return max(map(self.speed_of, {*candidates, NOTHING}))


class UnevenBatch:
    """A batch whose items advance apart, each as well as its text is drafted, and leave when they are over.

    Args:
        rates: for each position, how probably an average item accepts a token if all before it were.
        spread: standard deviation of the logarithm of the items' exponents, to whose power these are theirs.
        draft, slot: what a draft costs, and each token that an item reads; a round of one item without a draft costs 1.
        batch: items.
        seed: of the texts and of the noise.
        cold: what a draft costs more after one of another depth, or none.
    """

    PADDING, TREE, PLAIN, NOISE = 0.15, 0.4, 0.95, 0.05
    # Share of the tokens that a chain gets wrong of which a tree of 4 nodes holds the right one, and what each doubling adds.
    CAUGHT = 0.09
    # Seconds of a round of cost 1; and of a draft's cost the part that one item alone has.
    PACE, ALONE = 0.004, 0.6

    def __init__(
        self, rates: list[float], spread: float, draft: float, slot: float, batch: int, seed: int, cold: float = 0.0
    ) -> None:
        self.rates, self.spread, self.draft, self.slot, self.batch, self.seed = rates, spread, draft, slot, batch, seed
        self.cold = cold
        self.random, self.now, self.num_calls = random.Random(seed), 0.0, 0
        self.knowledge, self.plans = Knowledge(), all_plans(len(rates), 32)

    def cost(self, plan: Plan, num_items: int) -> float:
        alone = 1.0 + (self.PADDING if num_items > 1 else 0.0)
        return (
            alone
            + (self.draft * (1.0 if num_items > 1 else self.ALONE) if plan.depth else 0.0)
            + (self.TREE if plan.budget else 0.0)
            + self.slot * num_items * (1 + plan.num_nodes)
        )

    def texts(self, number: int) -> Callable[[Plan, int, int], tuple[int, int]]:
        """Of a call's texts, what an item accepts at a place of a draft, and of a chain: luck is the same for all plans."""
        draws = random.Random(1000 * self.seed + number)
        exponents = [math.exp(draws.gauss(0, self.spread)) for _ in range(self.batch)]
        luck = [[[draws.random() for _ in self.rates] for _ in range(TOKENS)] for _ in range(self.batch)]

        def accepted(plan: Plan, item: int, place: int) -> tuple[int, int]:
            own, counts = [rate ** exponents[item] for rate in self.rates[: plan.depth]], []
            for caught in (self.CAUGHT * math.log2(1 + plan.budget / 4), 0.0):
                of_item = (rate + caught * (1 - rate) for rate in own)
                wrong = (at for at, rate in enumerate(of_item) if luck[item][place][at] >= rate)
                counts.append(min(next(wrong, plan.depth), TOKENS - place))
            return counts[0], counts[1]

        return accepted

    def after(self, places: dict[int, int], found: dict[int, tuple[int, int]]) -> dict[int, int]:
        """Where the items whose texts go on stand after a round in which so much was accepted."""
        new = {item: place + found[item][0] + 1 for item, place in places.items()}
        return {item: place for item, place in new.items() if place < TOKENS}

    def cost_of_fixed(self, plan: Plan, number: int) -> float:
        """Of a call whose rounds all follow this plan."""
        accepted, places, cost = self.texts(number), dict.fromkeys(range(self.batch), 0), 0.0
        while places:
            followed = plan.within(TOKENS - min(places.values()) - 1)
            cost += self.cost(followed, len(places))
            places = self.after(places, {item: accepted(followed, item, place) for item, place in places.items()})
        return cost

    def call(self) -> float:
        """The cost of a call by the schedule, noise not counted."""
        accepted, places, cost = self.texts(self.num_calls), dict.fromkeys(range(self.batch), 0), 0.0
        self.num_calls += 1
        on_a_cpu = {"looks": True, "compares": True}
        schedule = Schedule(self.knowledge, self.plans, Plan(len(self.rates)), lambda: self.now, **on_a_cpu)
        is_plains, last = schedule.leaves_to_plain(self.batch, PROMPT), 0
        while places:
            first = min(places.values())
            if is_plains or (schedule.leaves_rest_to_plain() and len(places) == self.batch):
                rest = self.PLAIN * self.cost(NOTHING, self.batch) * (TOKENS - first)
                self.now += self.PACE * rest
                schedule.note_plain(TOKENS - first)
                return cost + rest
            plan = schedule.next_plan(len(places), TOKENS - first - 1, PROMPT + max(places.values()))
            price = self.cost(plan, len(places)) + (self.cold if plan.depth not in (0, last) else 0.0)
            last = plan.depth
            self.now += self.PACE * math.exp(self.random.gauss(0, self.NOISE)) * price
            cost += price
            found = {item: accepted(plan, item, place) for item, place in places.items()}
            if plan.depth:
                left = {item: min(plan.depth, TOKENS - place) for item, place in places.items()}
                outcomes = [
                    [(of[kind], min(of[kind] + 1, left[item])) for item, of in found.items()] for kind in (0, 1)
                ]
                schedule.note(outcomes[0], outcomes[1] if plan.budget else None, [*places])
            schedule.end_round(is_ordinary=True)
            places = self.after(places, found)
        schedule.learn()
        schedule.end_call(TOKENS)
        return cost

    def share_of_best(self, calls: int, known: int) -> float:
        """Of the speed of the best plan for all rounds of all calls but the first `known` ones, the schedule's."""
        costs = [self.call() for _ in range(calls)]
        best = min(sum(self.cost_of_fixed(plan, number) for number in range(known, calls)) for plan in self.plans)
        return best / sum(costs[known:])


class PartlyReadWorld:
    """A text with easy and hard places, a drafter that knows which is which, and a target for which each slot to read is dear.

    Chains of up to 8 tokens, and trees that are no better. A forward over one slot costs 1, and `slot` for each more.
    """

    EASY, HARD, DRAFT, TREE, NOISE = 0.97, 0.3, 0.15, 0.05, 0.08

    def __init__(self, seed: int, slot: float) -> None:
        self.random, self.slot, self.now = random.Random(seed), slot, 0.0
        self.knowledge, self.plans = Knowledge(), all_plans(8, 32)

    def cost(self, plan: Plan, read: int) -> float:
        return 1.0 + self.slot * read + (self.DRAFT if plan.depth else 0.0) + (self.TREE if plan.budget else 0.0)

    def accepted(self, depth: int, rate: float) -> int:
        return next((count for count in range(depth) if self.random.random() >= rate), depth)

    def place(self) -> float:
        """How probably a token of a draft is accepted if all before it were, here."""
        return self.random.choice([self.EASY, self.HARD])

    def fixed_speed(self, depth: int, rounds: int = 4000) -> float:
        """Tokens over cost of chains that are read whole."""
        tokens = sum(1 + self.accepted(depth, self.place()) for _ in range(rounds))
        return tokens / (rounds * self.cost(Plan(depth), depth))

    def wait(self, cost: float) -> None:
        self.now += 0.05 * cost * math.exp(self.random.gauss(0, self.NOISE))

    def call(self) -> float:
        """The cost of a call by the schedule, noise not counted."""
        schedule = Schedule(self.knowledge, self.plans, Plan(8), lambda: self.now, looks=True)
        left, cost, is_plains = TOKENS, 0.0, schedule.leaves_to_plain(1, PROMPT)
        while left > 0:
            if is_plains or schedule.leaves_rest_to_plain():
                self.now += 0.05 * left
                schedule.note_plain(left)
                return cost + left
            plan, rate = schedule.next_plan(1, left - 1, PROMPT + TOKENS - left), self.place()
            # All nodes of a tree but the likeliest of each depth are hopeless.
            probabilities = [rate ** (depth + 1) for depth in range(plan.depth)]
            probabilities += [1e-6] * (plan.num_nodes - plan.depth)
            read = plan.num_nodes
            if plan.depth and schedule.reading.looks_at(read):
                read = schedule.reading.worth_it([probabilities], read)
            self.wait(self.cost(plan, 0) - 1)
            schedule.reading.begin()
            self.wait(self.cost(NOTHING, read))
            schedule.reading.end(read + 1)
            cost += self.cost(plan, read)
            depth = min(read, plan.depth)
            count = self.accepted(depth, rate)
            outcome = [(count, min(count + 1, depth))]
            schedule.note(outcome, outcome if plan.budget else None)
            schedule.end_round(is_ordinary=True)
            left -= count + 1
        schedule.learn()
        return cost

    def speed(self, calls: int) -> float:
        """Tokens over cost."""
        return calls * TOKENS / sum(self.call() for _ in range(calls))


def random_world(seed: int) -> World:
    """A world as they may be: from a drafter that is never right to one that is hardly ever wrong, on machines of all kinds."""
    draws = random.Random(seed)
    depth, rate = draws.choice([4, 7, 8, 15]), draws.uniform(0, 0.97)
    rates = [min(0.97, rate * draws.uniform(0.8, 1.05) ** position) for position in range(depth)]
    costs = {"draft": draws.uniform(0.2, 1.5), "slot": draws.choice([0.01, 0.03, 0.06, 0.15])}
    return World(rates, **costs, tree_gain=draws.uniform(0, 0.6), noise=draws.choice([0.03, 0.1, 0.2]), seed=seed)
