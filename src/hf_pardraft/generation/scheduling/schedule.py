"""The choice of each round's plan: the most tokens per second, by what rounds have cost and what was accepted. Pure."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from .confidence import Calibration, ReadingCosts, worth_reading
from .costs import Costs
from .knowledge import Knowledge
from .plans import NOTHING, Plan


class FixedSchedule:
    """The same plan in every round.

    Attributes:
        deepest: the most tokens that are drafted.
        is_pausing, looks: never.
        calibration: what was accepted in this call, so that calls are alike.
    """

    is_pausing = looks = False

    def __init__(self, plan: Plan) -> None:
        self.plan, self.deepest = plan, plan.depth
        self.calibration = Calibration()

    def leaves_to_plain(self, batch: int) -> bool:
        """It drafts."""
        return False

    def leaves_rest_to_plain(self) -> bool:
        """It goes on drafting."""
        return False

    def looks_at_draft(self, num_nodes: int) -> bool:
        """It reads what it drafts."""
        return False

    def worth_reading(self, probabilities: Sequence[Sequence[float]], most: int) -> int:
        """As many nodes as there may be."""
        return most

    def begin_reading(self) -> None:
        """Nothing is measured."""

    def end_reading(self, slots: int) -> None:
        """Nothing is measured."""

    def note_plain(self, num_rounds: int) -> None:
        """Nothing is learned."""

    def next_plan(self, batch: int, room: int) -> Plan:
        """The plan, as far as there is room for it."""
        return self.plan.within(room)

    def note(self, outcomes: Sequence[tuple[int, int]], of_chains: Sequence[tuple[int, int]] | None = None) -> None:
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
        plans: what to choose from, the largest last.
        first: the plan to begin with where nothing is known.
        clock: tells seconds.
        looks: whether a look at the drafter's probabilities is free: on an accelerator the host would have to wait for them.
        reads_again: whether the target reads the accepted part of a draft again if some was rejected, and writes one token more.

    Attributes:
        deepest: the most tokens that are drafted.
        is_pausing: whether nothing is drafted now because that is best, and not for want of room.
        calibration: what was accepted of other drafts, see [`Calibration`].
    """

    # Rounds before the choice is thought over, and before a plan is tried again. By what even a bad estimate of a cost is wrong.
    HELD, REST = 16, 8
    DOUBT = 1.5
    # In one of so many rounds all that is drafted is read; in one of so many the target's forward is timed by itself.
    READS_ALL, TIMED = 16, 4
    # A first verdict on drafting is checked, unless a round more would lose more rounds than this.
    CHECK = 1.5
    # Plain `generate` is left alone with what drafts are too slow for if they were judged by so many, or for sure by more.
    # Beginning a call in our loop costs so many rounds.
    JUDGED, SURE, START = 3, 32, 3.0
    # Seconds of a round without a draft beside which it doesn't matter whose it is, if the batch has one item.
    LONG = 0.02

    def __init__(
        self,
        knowledge: Knowledge,
        plans: list[Plan],
        first: Plan,
        clock: Callable[[], float],
        looks: bool = False,
        reads_again: bool = False,
    ) -> None:
        self.knowledge, self.plans, self.first, self.clock = knowledge, plans, first, clock
        knowledge.begin_text()
        self.looks, self.calibration = looks, knowledge.calibration
        self.reads_again, self.deepest = reads_again, plans[-1].depth
        self.last_tried: dict[Plan, int] = {}
        self.num_rounds, self.reconsidered, self.num_surprises, self.batch = 0, -self.HELD, 0, 1
        self.next_try, self.next_loss = NOTHING, math.inf
        self.plan = self.best = NOTHING
        self.is_a_try = self.is_pausing = self.is_noticeable = self.is_timed = self.rests_with_plain = False
        # By plan, as of when the choice was thought over last.
        self.seconds: dict[Plan, float] = {}
        self.costs, self.num_tokens = Costs(), 1.0
        self.tokens: dict[Plan, float] = {plan: plan.depth + 1.0 for plan in plans}
        self.started = self.reading_since = clock()
        self.reading = ReadingCosts()

    def leaves_to_plain(self, batch: int) -> bool:
        """Whether plain `generate` is better for a call of so many items, and nothing is to be tried in it."""
        self.costs, self.batch = self.knowledge.costs_for(batch), batch
        if not self._is_known or self.knowledge.earlier.num_judged < self.JUDGED:
            return False
        self._estimate()
        self.best = NOTHING
        if max(map(self._rate, self.plans)) > self._rate(NOTHING):
            return False
        price, plan = self.START * self._certainty, self._least_known
        if price + self._loss(plan) > self.knowledge.purse:
            return True
        self.knowledge.purse -= price
        self.last_tried[plan] = -self.REST
        return False

    def leaves_rest_to_plain(self) -> bool:
        """Whether plain `generate` is better for the rest of a call, too: to be asked before each round."""
        return self.rests_with_plain and self.next_loss > self.knowledge.purse

    def note_plain(self, num_rounds: int) -> None:
        """Learn that plain `generate` has written so many tokens instead."""
        self.knowledge.put_in(num_rounds)

    def next_plan(self, batch: int, room: int) -> Plan:
        """What to do in the round that now begins.

        Args:
            batch: items that go on.
            room: the most tokens that are worth drafting.
        """
        costs = self.knowledge.costs_for(batch)
        self.reading = self.knowledge.reading_for(batch)
        if costs is not self.costs:
            self.costs, self.reconsidered = costs, -self.HELD
        self.num_rounds += 1
        self.batch = batch
        self.plan, self.is_a_try, self.num_tokens = NOTHING, False, 1.0
        if room:
            choice = self._choice()
            self.is_a_try, self.is_pausing, self.plan = choice != self.best, choice == NOTHING, choice.within(room)
        return self.plan

    # Of what is drafted, what seems worth the target's time.

    def looks_at_draft(self, num_nodes: int) -> bool:
        """Whether to ask [`worth_reading`] about this round's draft: where the target takes clearly longer for all of it."""
        return self.is_noticeable and self.reading.are_noticeable(num_nodes + 1)

    def worth_reading(self, probabilities: Sequence[Sequence[float]], most: int) -> int:
        """How many nodes of each item's draft to read, see [`confidence.worth_reading`]; now and then `most`, to learn from."""
        if not self.looks_at_draft(most) or self.num_rounds % self.READS_ALL == 0:
            return most
        best = [sorted(of_item, reverse=True)[:most] for of_item in probabilities]
        return worth_reading(best, self.reading.of, self._rate(self.best))

    def begin_reading(self) -> None:
        """The target begins to read."""
        # Of rounds like those before a few will do.
        self.is_timed = self.looks and (self.is_a_try or self.num_rounds % self.TIMED == 0)
        if self.is_timed:
            self.reading_since = self.clock()

    def end_reading(self, slots: int) -> None:
        """It has read so many slots of each item, and no prompt."""
        if self.is_timed:
            self.reading.note(slots, self.clock() - self.reading_since)

    def note(self, outcomes: Sequence[tuple[int, int]], of_chains: Sequence[tuple[int, int]] | None = None) -> None:
        """Learn what was accepted in this round; see [`Knowledge.note`]."""
        self.num_tokens = 1.0 + sum(count for count, _ in outcomes) / max(len(outcomes), 1)
        if self.plan.depth and outcomes:
            self.knowledge.note(self.plan.budget, outcomes, of_chains)

    def end_round(self, is_ordinary: bool) -> None:
        """Learn how long the round took.

        Args:
            is_ordinary: whether others like it would take as long: nothing was compiled, no prompt was read.
        """
        now = self.clock()
        seconds, self.started = now - self.started, now
        if self.is_a_try or not self.seconds:
            self._pay(seconds, is_ordinary)
        else:
            self.knowledge.put_in(1.0)
        if is_ordinary and self.plan in self.plans:
            self.costs.note(self.plan, seconds)
            self.last_tried[self.plan] = self.num_rounds

    def _pay(self, seconds: float, is_ordinary: bool) -> None:
        """What a try has cost is taken from the purse, by what is expected, not by what bad luck made of it."""
        best, charged = self.costs.of(self.best), self.costs.charged(self.plan, seconds)
        if not best:
            return
        self.knowledge.put_in(charged / best)
        if self.is_a_try:
            cost = (self.costs.of(self.plan) if is_ordinary else None) or charged
            tokens = max(self.tokens.get(self.plan, 1.0), self.num_tokens)
            self.knowledge.purse -= max(cost / best - tokens / self.tokens[self.best], 0.0)

    def _choice(self) -> Plan:
        # What another batch size taught may be wrong for this one, about the round above all that others are compared with.
        if self.costs.count(NOTHING) < 2 or not self._is_known:
            self.best, self.tokens = NOTHING, self._expected_tokens()
            # Two rounds that need no draft, since one may be an outlier, then one that does.
            return self.first if self.costs.count(NOTHING) > 1 else NOTHING
        # A text that has just begun may be another than the last.
        held = min(self.HELD, 2 + self.num_rounds // 2)
        if self.num_rounds >= self.reconsidered + held or self.costs.num_surprises != self.num_surprises:
            self._reconsider()
        # Where the purse is too small for it, it is saved up for: the cheapest tries are not the ones that say most.
        if self.next_loss > self.knowledge.purse:
            return self.best
        self.reconsidered = -self.HELD
        return self.next_try

    def _reconsider(self) -> None:
        """Find the best plan by what is known now, and what to try next."""
        self.reconsidered, self.num_surprises = self.num_rounds, self.costs.num_surprises
        self._estimate()
        self.best = max(self.plans, key=self._rate)
        matters = self.batch > 1 or self.seconds[NOTHING] < self.LONG
        is_judged = self.knowledge.chain.num_judged >= self.JUDGED
        self.rests_with_plain = self.best == NOTHING and is_judged and matters
        self.is_noticeable = self.looks and self.reading.are_noticeable(self.plans[-1].num_nodes + 1)
        needs_check = self.costs.count(self.first) == 1 and not self.costs.guesses
        if needs_check and self._loss(self.first) < self.CHECK:
            self.next_try, self.next_loss = self.first, -math.inf
            return
        tries = [plan for plan in self.plans if plan != self.best and self._is_worth_a_try(plan)]
        self.next_try = max(tries, key=self._priority, default=self.best)
        self.next_loss = self._loss(self.next_try) if tries else math.inf

    def _estimate(self) -> None:
        """What plans cost and bring, by what is known now."""
        self.tokens = self._expected_tokens()
        self.seconds = {plan: self.costs.of(plan) for plan in self.plans}

    @property
    def _is_known(self) -> bool:
        """Whether there is something to choose by."""
        return self.costs.of(NOTHING) is not None and self.costs.of(self.first) is not None

    def _expected_tokens(self) -> dict[Plan, float]:
        """Tokens that a round of each plan commits to an item."""
        depth, has_chains = self.plans[-1].depth, any(plan.depth and not plan.budget for plan in self.plans)
        of_chain = self.knowledge.expected_tokens(depth)
        if self.reads_again:
            # Unless the last token is accepted too, what is read again is followed by one token more.
            of_chain = [1.0, *(after + 1 - (after - before) for before, after in pairwise(of_chain))]
        tokens = {plan: of_chain[plan.depth] for plan in self.plans}
        for plan in self.plans:
            if plan.budget and has_chains:
                tokens[plan] = 1 + (tokens[plan] - 1) * self.knowledge.gain_of(plan.budget).factor
        if self.batch > 1:
            tokens = {plan: self.knowledge.slowest_of(self.batch).slowed(count) for plan, count in tokens.items()}
        return tokens

    def _rate(self, plan: Plan) -> float:
        return self.tokens[plan] / self.seconds[plan]

    def _loss(self, plan: Plan) -> float:
        """What a round of this plan is thought to lose, in rounds of the best one."""
        return self.seconds[plan] / self.seconds[self.best] - self.tokens[plan] / self.tokens[self.best]

    def _rested(self, plan: Plan) -> int:
        return self.num_rounds - self.last_tried.get(plan, 0)

    @property
    def _least_known(self) -> Plan:
        """Of the plan to begin with and the smallest tree, what was tried less often."""
        return min([self.first, *(plan for plan in self.plans if plan.budget)][:2], key=self.costs.count)

    @property
    def _certainty(self) -> float:
        """A drafter that was judged by little gets its next chance soon."""
        return min(1.0, self.knowledge.chain.num_judged / self.SURE)

    def _is_worth_a_try(self, plan: Plan) -> bool:
        rest = self.REST * (self._certainty if self.best == NOTHING and plan.depth == self.deepest else 1.0)
        if plan.depth and self.best.includes(plan):
            # What would be accepted of it is known from the best plan's rounds, and only its cost is to be learned.
            rest *= 1 + self.costs.count(plan)
        may_be_better = self.DOUBT * (plan.depth + 1) / self.seconds[plan] > self._rate(self.best)
        return self._rested(plan) >= rest and may_be_better

    def _priority(self, plan: Plan) -> float:
        """Plans that lose little are tried more often than others."""
        return self._rested(plan) / (self._loss(plan) + 1 / self.REST)
