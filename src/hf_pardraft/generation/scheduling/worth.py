"""What plans are worth by what is known: the tokens and the seconds of a round, in this call. Pure."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .costs import Costs
from .estimates import along
from .knowledge import Knowledge
from .plans import NOTHING, Plan
from .reading import ReadingCosts, best_count, values_of_reading
from .spread import shares_of, shares_with_more, worth_to_a_batch

# Seconds that a round with more than its own token takes besides the forward, roughly.
ALONE = 1e-3
# How much faster than plain `generate` rounds without a draft have to be for what the text suggests, to be stayed with.
LEAST_TEXT_GAIN = 1.05
# Share by which drafts of a batch may well be better than its first rounds say: until whole calls tell.
DOUBT_OF_BATCH = 0.15
# The same of the first round alone: all errors of its tokens, and of its costs.
DOUBT_OF_ONE = 1.0
# Share of a round's time that is the same for a batch of any size, before that is known.
UNKNOWN_SHARE = 0.5
# The same at least.
LEAST_SHARE = 0.1


def seconds_of_reading(slots: int, reading: ReadingCosts) -> float:
    """Of the target's forward over so many slots, and of what comes with it if there are others than its own token's."""
    return reading.of(slots) + (ALONE if slots > 1 else 0.0)


class PlanWorth:
    """Tokens and seconds of a round of each plan, as of when they were worked out last.

    Args:
        knowledge: of earlier calls and this one.
        plans: all of them, the largest last.
        reads_again: whether the target reads the accepted part of a draft again if some was rejected, and writes one token more.

    Attributes:
        committed: the tokens of a round, of an average item; before there is anything to know, as if all drafts were right.
        tokens: what they are worth: to one item as many, to a batch fewer, see [`worth_to_a_batch`].
        seconds: what it costs; empty until then.
    """

    def __init__(self, knowledge: Knowledge, plans: Sequence[Plan], reads_again: bool) -> None:
        self.knowledge, self.plans, self.reads_again = knowledge, plans, reads_again
        self.committed: dict[Plan, float] = {plan: plan.depth + 1.0 for plan in plans}
        self.tokens = self.committed
        self.seconds: dict[Plan, float] = {}
        # Items of the batch that these are of; and what is known of rounds of fewer.
        self.batch = 1
        self.fewer: list[tuple[int, float]] = []

    def work_out(self, costs: Costs, batch: int) -> None:
        """Go by what is known now, for a batch of so many items."""
        self.seconds = {plan: costs.of(plan) for plan in self.plans}
        self.expect(batch)

    def expect(self, batch: int) -> None:
        """Go by what is known of drafts now, and leave the seconds as they were."""
        self.batch = batch
        self.fewer = self._of_fewer_items() if self.seconds else []
        depth, has_chains = self.plans[-1].depth, any(plan.depth and not plan.budget for plan in self.plans)
        of_chain = self.knowledge.expected_tokens(depth)
        if self.reads_again:
            # What is read again is followed by one token more, unless all were accepted: a chain's last token, if it is, comes
            # in the place of that one.
            of_chain = [1.0, *(shorter + 1 for shorter in of_chain[:-1])]
        tokens = {plan: of_chain[plan.depth] for plan in self.plans}
        gains: dict[int, float] = {}
        if has_chains:
            trees = [plan for plan in self.plans if plan.budget]
            # Where a batch would lose much by trees that are too large, these have to show by themselves what they gain.
            gains = self.knowledge.tree_gains(depth, [plan.budget for plan in trees], are_nested=batch == 1)
            tokens |= {plan: tokens[plan] * gains[plan.budget] for plan in trees}
        self.committed, self.tokens = tokens, tokens if batch == 1 else self._to_a_batch(tokens, of_chain[depth])

    def _to_a_batch(self, tokens: dict[Plan, float], of_longest: float) -> dict[Plan, float]:
        """What rounds are worth to a batch that commit so many tokens to an average item, and with the longest chains so many."""
        rates = self.knowledge.chain.rates(self.plans[-1].depth)
        of_chains = shares_of(self.knowledge.spread_of(self.batch).rates_of_items(rates))
        worth = dict(tokens)
        for plan in (plan for plan in tokens if plan.depth):
            shares = of_chains[plan.depth - 1]
            if plan.budget:
                shares = shares_with_more(shares, of_longest - 1, tokens[plan] - of_longest)
            worth[plan] = worth_to_a_batch(tokens[plan], self.added_by_items(plan, len(shares)), shares)
        return worth

    def added_by_items(self, plan: Plan, count: int) -> list[float]:
        """Of a round's time, the part that an item takes alone, and the parts that further ones add, up to all in `count` steps.

        By what rounds of fewer items have taken, or else by what each token more to read costs.
        """
        seconds = self.seconds[plan] if self.seconds else 1.0
        fewer = [(size, factor * seconds * self._share_of(size, plan)) for size, factor in self.fewer or [(1, 1.0)]]
        # None is thought to take longer than one of more items.
        points = [*((size, min(of_fewer, seconds)) for size, of_fewer in fewer), (self.batch, seconds)]
        (size, first), (above, second) = points[:2]
        points.insert(0, (0, max(first - size * (second - first) / (above - size), 0.0)))
        values = along(points, (self.batch * step / count for step in range(1, count + 1)))
        steps = [0.0, *accumulate((value / seconds for value in values), max)]
        return [now - before for before, now in pairwise(steps)]

    def _of_fewer_items(self) -> list[tuple[int, float]]:
        """The sizes, among batches half as large and less, at which rounds were measured; and the factor by which they took
        longer than each token more to read lets one think.

        It is that of all plans together, so mostly of the one that is followed: rounds of fewer items are measured in other
        hours, and by a factor of its own a plan would seem better for a batch than another for having had the better hour.
        """
        found = []
        for size, costs in sorted([*self.knowledge.costs.items()]):
            counts = {plan: costs.count(plan) for plan in self.plans} if 2 * size <= self.batch else {}
            counts = {plan: count for plan, count in counts.items() if count >= Costs.BELIEVED}
            if counts:
                longer = (
                    count * costs.of(plan) / (self.seconds[plan] * self._share_of(size, plan))
                    for plan, count in counts.items()
                )
                found.append((size, sum(longer) / sum(counts.values())))
        return found

    def _share_of(self, size: int, plan: Plan) -> float:
        """What a round of so many items takes of the time of a round of all, by what each token more to read costs."""
        if self.seconds:
            chains = [other for other in self.plans if other.depth and not other.budget]
            largest = plan if plan.budget else max(chains, default=self.plans[-1])
            more = max(self.seconds[largest] - self.seconds[NOTHING], 0.0)
            of_items = more * (1 + plan.num_nodes) / max(largest.num_nodes, 1)
            fixed = max(1 - of_items / self.seconds[plan], LEAST_SHARE)
        else:
            fixed = UNKNOWN_SHARE
        return fixed + (1 - fixed) * size / self.batch

    def rate(self, plan: Plan) -> float:
        """Tokens a second and item."""
        return self.tokens[plan] / self.seconds[plan]

    def loss(self, plan: Plan, best: Plan) -> float:
        """What a round of this plan is thought to lose, in rounds of the best one."""
        return self.seconds[plan] / self.seconds[best] - self.tokens[plan] / self.tokens[best]

    def seconds_of_drafted(self, num_tokens: float) -> float:
        """What the best plan takes for so few tokens, an item's, of which a round commits no more than are left."""
        rounds = {plan: max(num_tokens / self.tokens[plan], 1.0) for plan in self.plans if plan.depth}
        return min(count * self.seconds[plan] for plan, count in rounds.items())

    @property
    def best_drafted(self) -> Plan:
        """The best plan that drafts."""
        return max((plan for plan in self.plans if plan.depth), key=self.rate)

    def seconds_of_rest(self, costs: Costs) -> float:
        """Of each token of one text that is written without drafts, be that by our rounds or by plain `generate`."""
        lead = max(costs.lead_of_plain(is_of_batch=False), self.knowledge.text_gain.factor, 1.0)
        return self.seconds[NOTHING] / lead

    @property
    def clearly_drafted(self) -> bool:
        """Whether a batch's rounds with drafts are faster than plain `generate`, be that as fast as it may be."""
        return self.rate(self.best_drafted) > Costs.MOST_LEAD * (1 + DOUBT_OF_BATCH) * self.rate(NOTHING)

    def is_surely_plain(self, costs: Costs, clearly: float = 1.0) -> bool:
        """Whether no draft pays, by more than costs may be wrong: what is left to plain `generate` teaches nothing.

        It has to be so many times as fast, `clearly`.
        """
        if costs.plain_is_slower(self.batch > 1) or self._text_is_read(costs):
            return False
        rest = self.rate(NOTHING) * costs.lead_of_plain(self.batch > 1)
        rates = {plan: clearly * self.rate(plan) for plan in self.plans if plan.depth}
        # Most are told by the best plan alone.
        return max(rates.values()) < rest and all(
            rate * (1 + self._doubt(plan, costs)) < rest for plan, rate in rates.items()
        )

    def _doubt(self, plan: Plan, costs: Costs) -> float:
        """The share by which a plan may well be better than is believed.

        Of one text for its costs; of a batch for how unevenly it is served, and because texts may begin badly.
        """
        if self.batch == 1:
            return costs.doubt(plan, NOTHING)
        return max(DOUBT_OF_BATCH, DOUBT_OF_ONE / math.sqrt(max(self.knowledge.earlier.num_notes, 1)))

    def _text_is_read(self, costs: Costs) -> bool:
        """Whether rounds without a draft are faster than plain `generate` for reading what the text itself suggests."""
        lead = costs.lead_of_plain(is_of_batch=False)
        return self.batch == 1 and self.knowledge.text_gain.factor > LEAST_TEXT_GAIN * lead

    def seconds_alone(self, count: int, reading: ReadingCosts) -> float:
        """Of a round that reads so many tokens instead of a draft."""
        return seconds_of_reading(count + 1, reading) + max(self.seconds[NOTHING] - reading.of(1), 0.0)

    def count_alone(self, probabilities: Sequence[float], best: Plan, reading: ReadingCosts) -> int:
        """How many tokens that the text alone suggests to read instead of a draft; 0 where the best plan is better.

        Args:
            probabilities: of each token, that it and all before it will be accepted.
            best: the plan that is followed otherwise.
            reading: what the target's forwards cost.
        """
        if not self.seconds or reading.of(1) is None:
            return 0
        # Mostly not even all of it, read as fast as one token of it, would be.
        if best.depth and 1 + sum(probabilities) <= self.rate(best) * self.seconds_alone(1, reading):
            return 0
        values = values_of_reading([probabilities], lambda slots: seconds_of_reading(slots, reading), self.rate(best))
        count = best_count(values)
        if count == 0 or best == NOTHING:
            return count
        tokens = 1 + sum(probabilities[:count])
        rate = tokens / self.seconds_alone(count, reading)
        return count if rate > self._tokens_beside(tokens, probabilities[0], best) / self.seconds[best] else 0

    def _tokens_beside(self, of_text: float, probability: float, best: Plan) -> float:
        """What a round of the best plan commits where the text alone would bring so many tokens, the first so probably.

        A tree holds what the text suggests, and what was drafted where that is wrong.
        """
        drafted = self.tokens.get(Plan(best.depth), 1.0) - 1
        in_tree = of_text + (1 - probability) * drafted if best.budget else 1.0
        return max(self.tokens[best], in_tree)
