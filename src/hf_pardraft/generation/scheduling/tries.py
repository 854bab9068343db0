"""What to try besides the best plan, and what that may lose. Pure."""

import math
from collections.abc import Sequence

from .checks import TextChecks
from .costs import Costs
from .knowledge import Knowledge
from .plans import NOTHING, Plan
from .rounds import LONG_ROUND, RoundKind
from .worth import PlanWorth


class Tries:
    """Plans that are not the best one: a round of them now and then tells what they cost and bring.

    Costs are those of the present batch size, and losses are in rounds of the best plan there.

    Args:
        knowledge: of earlier calls, with the purse that pays for tries.
        worth: of plans, by what is known now.
        rounds: how they are measured.
        checks: of the text, if it isn't drafted.
        plans, first: see [`Schedule`].

    Attributes:
        due: what is to be tried whenever it was tried last.
        again: what was tried in the last round and shall be again.
        next, loss: what to try next, and what that is thought to lose.
        is_free: whether that is not paid for, since it may save more.
    """

    # Rounds before a plan is tried again.
    REST = TextChecks.REST
    # Factor by which even a bad estimate of a cost is wrong at most.
    DOUBT = 1.5
    # Rounds of the best plan that one round more may lose to check the first verdict on drafting.
    CHECK = 1.5
    # Drafts of the first call up to which its verdict that nothing is to be drafted, which lasts, is checked as well: each of
    # them may lose less than the one before.
    CHECKS = 8
    # Rounds of the best plan that one round may lose to see whether a text is another than those before.
    CHECK_OF_TEXT = 0.2
    # Drafts by which a drafter is judged for sure.
    SURE = 32

    def __init__(
        self,
        knowledge: Knowledge,
        worth: PlanWorth,
        rounds: RoundKind,
        checks: TextChecks,
        plans: Sequence[Plan],
        first: Plan,
    ) -> None:
        self.knowledge, self.worth, self.rounds, self.checks = knowledge, worth, rounds, checks
        self.plans, self.first = plans, first
        self.due: Plan | None = None
        self.again: Plan | None = None
        # Rounds that it was tried for.
        self.num_tried = 0
        self.next, self.loss, self.is_free = NOTHING, math.inf, False
        # Whether what is tried next is tried in a text that isn't drafted.
        self.is_a_check = False
        self.is_first_call = knowledge.earlier.num_notes == 0

    def choose(self, costs: Costs, best: Plan, plans: Sequence[Plan]) -> None:
        """Find what to try next, of these plans."""
        self.is_free, self.is_a_check = False, self._is_undrafted_text(best)
        check = self._check(costs, best) or self._check_of_text(best)
        if check is not None:
            self.next, self.loss = check, -math.inf
            return
        tries = [self.due] if self.due is not None else [p for p in plans if self._is_worth_a_try(p, costs, best)]
        self.next = max(tries, key=lambda plan: self._priority(plan, costs, best), default=best)
        self.loss = self._price(self.next, costs, best) if tries else math.inf

    def _check(self, costs: Costs, best: Plan) -> Plan | None:
        """What to try at once, since too little is known of drafts for a verdict; `None` if that would lose too much."""
        plan, most, num_drafted = self.first, self.CHECK, self.knowledge.earlier.num_notes
        if costs.count(self.first) != 1 or costs.guesses:
            if best.depth or not (self.is_first_call and 0 < num_drafted < self.CHECKS):
                return None
            known = (p for p in self.plans if p.depth and (costs.count(p) or not p.budget))
            # Off a CPU there may be but one tree, which a batch of fewer items has not met yet.
            plan = max(known, key=self.worth.rate, default=self.first)
            most = self.CHECK / num_drafted
        return plan if self.worth.loss(plan, best) < most else None

    def _check_of_text(self, best: Plan) -> Plan | None:
        """What to try where a text begins that is not to be drafted by what earlier ones taught: it may be another."""
        num_drafted = self.knowledge.chain.num_notes
        if best.depth or self.worth.batch > 1 or not self.rounds.may_be_left or num_drafted >= TextChecks.AT_FIRST:
            return None
        self.is_free = self.checks.pay(best)
        if self.is_free:
            return self.first
        plan = self.worth.best_drafted
        return plan if self.worth.loss(plan, best) < self.CHECK_OF_TEXT else None

    @property
    def is_affordable(self) -> bool:
        """Whether the purse pays for what is to be tried next."""
        put_by = self.knowledge.savings.put_by if self.is_a_check else 0.0
        return self.loss <= self.knowledge.purse + put_by

    def begins_a_call(self, costs: Costs) -> bool:
        """Whether to begin a call that is best left to plain `generate`, so as to try what was tried least; that is paid for."""
        # Of the plan to begin with and the smallest tree.
        plan = min([self.first, *(plan for plan in self.plans if plan.budget)][:2], key=costs.count)
        price = TextChecks.START * self._certainty
        if price + self._price(plan, costs, NOTHING) > self.knowledge.purse:
            return False
        self.knowledge.purse -= price
        self.due = plan
        return True

    def note(
        self,
        plan: Plan,
        seconds: float,
        is_ordinary: bool,
        is_a_try: bool,
        costs: Costs,
        best: Plan,
        accepted: Sequence[int] = (),
    ) -> None:
        """Learn that a round has followed a plan, or tried it; before its costs are noted.

        Args:
            plan, best: which was, and which is best.
            seconds, is_ordinary: that the round took, and whether others like it take as long.
            is_a_try: whether it was tried.
            costs: of rounds.
            accepted: of each item's draft, how many tokens.
        """
        self.num_tried = self.num_tried + 1 if plan == self.again else 1
        is_over = self.num_tried >= self.rounds.of_a_try(seconds, self._is_about_cost(plan, costs, best))
        says_little = is_a_try and self._says_little(plan, seconds, is_ordinary, costs, best)
        is_check = is_a_try and self._is_undrafted_text(best) and self.rounds.may_be_left and self.worth.seconds
        goes_on = is_check and len(accepted) == 1 and self.checks.goes_on(self.num_tried, accepted[0], seconds)
        self.again = plan if goes_on or (says_little and not is_over) else None
        self.due = None if plan == self.due else self.due

    def pay(self, plan: Plan, best: Plan, seconds: float, of_best: float, accepted: Sequence[int]) -> None:
        """What a try has cost is taken from the purse, by what is expected, not by what bad luck made of it.

        Args:
            plan: what was tried.
            best: what would have been followed.
            seconds: that such a round takes.
            of_best: seconds that a round of the best plan takes.
            accepted: of each item's draft, how many tokens.
        """
        if self.is_free:
            return
        committed, worth = 1.0 + sum(accepted) / max(len(accepted), 1), self.worth
        luck = max(committed / worth.committed[plan], 1.0) if plan in worth.committed else committed
        price = max(seconds / of_best - luck * worth.tokens.get(plan, 1.0) / worth.tokens[best], 0.0)
        savings = self.knowledge.savings
        of_check = min(price, max(savings.put_by, 0.0)) if self.is_a_check else 0.0
        savings.put_by -= of_check
        self.knowledge.purse -= price - of_check

    def _says_little(self, plan: Plan, seconds: float, is_ordinary: bool, costs: Costs, best: Plan) -> bool:
        """Whether a try has to be repeated before it tells what the plan costs.

        The first round after others finds neither its code nor its data in the processor's caches; that matters where rounds are
        short. Where plain `generate` is best, tries are about what is accepted, but for the first.
        """
        is_short = seconds < min(LONG_ROUND, (1 + self.CHECK) * (costs.of(best) or math.inf))
        return not is_ordinary or (self._is_about_cost(plan, costs, best) and is_short)

    def _is_about_cost(self, plan: Plan, costs: Costs, best: Plan) -> bool:
        """Whether a try of this plan is to tell what it costs, besides what is accepted."""
        return best.depth > 0 or not self.worth.seconds or (self.rounds.repeats_tries and not costs.count(plan))

    @property
    def _certainty(self) -> float:
        """A drafter that was judged by little gets its next chance soon."""
        return min(1.0, self.knowledge.chain.num_judged / self.SURE)

    def _price(self, plan: Plan, costs: Costs, best: Plan) -> float:
        """What a try of this plan is thought to lose; of a tree of a size that was never measured, at worst."""
        is_about_cost = self._is_about_cost(plan, costs, best)
        is_repeated = best.depth or self.rounds.repeats_tries
        num_rounds = self.rounds.of_a_try(self.worth.seconds[plan], is_about_cost) if is_repeated else 1
        loss = self.worth.loss(plan, best)
        if plan.budget and not costs.count(plan):
            loss += (self.DOUBT - 1) * self.worth.seconds[plan] / self.worth.seconds[best]
        return num_rounds * loss

    def _is_undrafted_text(self, best: Plan) -> bool:
        return best == NOTHING and self.worth.batch == 1

    def _is_worth_a_try(self, plan: Plan, costs: Costs, best: Plan) -> bool:
        if plan == best:
            return False
        is_deepest = plan.depth == self.plans[-1].depth
        if self._is_undrafted_text(best):
            if not is_deepest and costs.count(plan) >= Costs.BELIEVED:
                # Longer drafts tell what is accepted of it, and what it costs is known.
                return False
            if plan.budget and not costs.count(plan):
                # It would be saved up for, and whether the text is to be drafted at all is told for less.
                return False
        rest = self.REST * (self._certainty if best == NOTHING and is_deepest else 1.0)
        if plan.depth and best.includes(plan):
            # What would be accepted of it is known from the best plan's rounds, and only its cost is to be learned.
            rest *= 1 + min(costs.evidence(plan), Costs.SETTLED)
        may_be_better = self.DOUBT * (plan.depth + 1) / self.worth.seconds[plan] > self.worth.rate(best)
        return costs.rounds_since(plan) >= rest and may_be_better

    def _priority(self, plan: Plan, costs: Costs, best: Plan) -> float:
        """Plans that lose little are tried more often than others."""
        return costs.rounds_since(plan) / (self.worth.loss(plan, best) + 1 / self.REST)
