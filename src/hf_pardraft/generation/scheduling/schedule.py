"""The choice of each round's plan: the most tokens per second, by what rounds have cost and what was accepted. Pure."""

from collections.abc import Callable, Sequence

from .costs import Costs
from .knowledge import Knowledge
from .plans import NOTHING, Plan


class FixedSchedule:
    """The same plan in every round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def next_plan(self, batch: int, room: int) -> Plan:
        return self.plan.within(room)

    def note(self, outcomes: Sequence[tuple[int, int]]) -> None:
        """Nothing is learned."""

    def end_round(self, is_ordinary: bool) -> None:
        """Nothing is measured."""


class Schedule:
    """Chooses a plan for each round of a call.

    What a plan is worth is known from tokens (what was accepted of such drafts) over cost. The best plan is followed, except
    that others are tried now and then, as long as the knowledge's purse pays for what that may lose: a drafter that is never
    right then costs little, and one that comes to know a text is found out.

    Args:
        knowledge: of earlier calls; it grows.
        plans: what to choose from.
        first: the plan to begin with where nothing is known.
        clock: tells seconds.
    """

    # Rounds before a plan is tried again. And what even a bad estimate of a cost may be wrong by.
    REST = 8
    DOUBT = 1.5
    # A first verdict on drafting is checked, unless a round more would lose more rounds than this.
    CHECK = 1.5

    def __init__(self, knowledge: Knowledge, plans: list[Plan], first: Plan, clock: Callable[[], float]) -> None:
        self.knowledge, self.plans, self.first, self.clock = knowledge, plans, first, clock
        self.last_tried: dict[Plan, int] = {}
        self.num_rounds = 0
        self.plan = self.best = NOTHING
        self.is_a_try = False
        self.costs: Costs = Costs()
        self.outcomes: Sequence[tuple[int, int]] = []
        self.tokens: dict[Plan, float] = {plan: plan.depth + 1.0 for plan in plans}
        self.started = clock()

    def next_plan(self, batch: int, room: int) -> Plan:
        """What to do in the round that now begins.

        Args:
            batch: items that go on.
            room: the most tokens that are worth drafting.
        """
        self.costs = self.knowledge.costs_for(batch)
        self.num_rounds += 1
        choice = self._choice()
        self.is_a_try, self.plan = choice != self.best, choice.within(room)
        return self.plan

    def note(self, outcomes: Sequence[tuple[int, int]]) -> None:
        """Learn what was accepted in this round; see [`Acceptance.note`]."""
        self.outcomes = outcomes
        if self.plan.depth and outcomes:
            self.knowledge.accepted_of(self.plan.budget).note(outcomes)

    def end_round(self, is_ordinary: bool) -> None:
        """Learn how long the round took.

        Args:
            is_ordinary: whether others like it would take as long: nothing was compiled, no prompt was read.
        """
        now = self.clock()
        seconds, self.started = now - self.started, now
        charged = self.costs.charged(self.plan, seconds)
        if is_ordinary and self.plan in self.plans:
            self.costs.note(self.plan, seconds)
            self.last_tried[self.plan] = self.num_rounds
        best = self.costs.of(self.best)
        if best:
            self.knowledge.put_in(charged / best)
            if self.is_a_try:
                # By what is expected, not by what luck made of it.
                cost = self.costs.of(self.plan) if is_ordinary else charged
                self.knowledge.purse -= max(cost / best - self.tokens.get(self.plan, 1.0) / self.tokens[self.best], 0.0)

    def _choice(self) -> Plan:
        costs = self.costs
        self.best = NOTHING
        if costs.of(NOTHING) is None or costs.of(self.first) is None:
            # Two rounds that need no draft, since one may be an outlier, then one that does.
            return self.first if len(costs.paces) > 1 else NOTHING
        self.tokens = self._expected_tokens()
        self.best = max(self.plans, key=self._rate)
        if costs.count(self.first) == 1 and self._loss(self.first) < self.CHECK and not costs.guesses:
            return self.first
        tries = [plan for plan in self.plans if plan != self.best and self._is_worth_a_try(plan)]
        next_try = max(tries, key=self._priority, default=self.best)
        # Where the purse is too small for it, it is saved up for: the cheapest tries are not the ones that say most.
        return next_try if self._loss(next_try) <= self.knowledge.purse else self.best

    def _expected_tokens(self) -> dict[Plan, float]:
        """Tokens that a round of each plan commits to an item."""
        knowledge, depth = self.knowledge, self.plans[-1].depth
        of_chain = knowledge.chain.expected_tokens(depth)
        return {
            plan: knowledge.accepted_of(plan.budget).expected_tokens(depth)[-1] if plan.budget else of_chain[plan.depth]
            for plan in self.plans
        }

    def _rate(self, plan: Plan) -> float:
        return self.tokens[plan] / self.costs.of(plan)

    def _loss(self, plan: Plan) -> float:
        """What a round of this plan is thought to lose, in rounds of the best one."""
        return self.costs.of(plan) / self.costs.of(self.best) - self.tokens[plan] / self.tokens[self.best]

    def _rested(self, plan: Plan) -> int:
        return self.num_rounds - self.last_tried.get(plan, 0)

    def _is_worth_a_try(self, plan: Plan) -> bool:
        return self._rested(plan) >= self.REST and self.DOUBT * (plan.depth + 1) / self.costs.of(plan) > self._rate(
            self.best
        )

    def _priority(self, plan: Plan) -> float:
        """Plans that lose little are tried more often than others."""
        return self._rested(plan) / (self._loss(plan) + 1 / self.REST)
