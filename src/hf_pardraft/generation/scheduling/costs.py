"""What rounds cost, compared with each other. Pure: seconds are told, and no clock is read."""

import math
from collections import deque
from collections.abc import Sequence

from .beside_plain import BesidePlain, Mean
from .estimates import interpolated, lower_median, weighted_median
from .growth import Growth
from .plans import NOTHING, Plan
from .reading import ReadingCosts


def medians_of(block: Sequence[tuple[Plan, float]]) -> dict[Plan, tuple[float, int]]:
    """Of each plan's values, the median and how many there are."""
    by_plan: dict[Plan, list[float]] = {}
    for plan, value in block:
        by_plan.setdefault(plan, []).append(value)
    return {plan: (lower_median(values), len(values)) for plan, values in by_plan.items()}


def level_of(block: dict[Plan, tuple[float, int]], logs: dict[Plan, float]) -> float:
    """By how much a block's medians are above the costs of their plans, on average."""
    total = sum(count for _, count in block.values())
    return sum(count * (median - logs[plan]) for plan, (median, count) in block.items()) / total


def compared_in(
    block: dict[Plan, tuple[float, int]], plan: Plan, logs: dict[Plan, float]
) -> tuple[float, float] | None:
    """What a block says of the cost of one of its plans, by the other ones' costs, and its weight; `None` if they have none."""
    others = {other: found for other, found in block.items() if other != plan and other in logs}
    if not others:
        return None
    (median, count), num_others = block[plan], sum(count for _, count in others.values())
    return median - level_of(others, logs), count * num_others / (count + num_others)


class Costs(BesidePlain):
    """Seconds of ordinary rounds by plan, at one batch size.

    A machine that slows down slows all plans down. So plans are compared with each other within a few rounds alone, a *block*:
    otherwise each plan in turn would look better for having last been tried in a faster hour. The model is that the logarithm
    of a round's seconds is its plan's cost plus its block's level plus noise, once what a longer text adds is taken off. Seconds
    are told as of the last block, for a text as long as the one that is written.
    """

    # Rounds of a block.
    BLOCK = 16
    # Blocks with several plans that are remembered.
    REMEMBERED = 24
    # Measurements of a plan that are believed whatever those of others say.
    BELIEVED = 3
    # Factor by which fewer may be above what those of others say.
    DOUBT = 1.5
    # Share by which a round of a plan takes more or less time than another.
    NOISE = 0.3
    # Share by which a cost that is sure may well be wrong: plans that are best in turn differ by a few percent.
    SURE = 0.02
    # Measurements to which one more adds little.
    SETTLED = 24
    # A round takes at most so many times as long as was thought, for all that we want to know: a suspended process, a debugger.
    OUTLIER = 8.0
    # However short a text is, at least one in so many of a round's seconds is left.
    MOST_ADDED = 4.0

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Plan, int] = {}
        # Plans that were chosen. Others may be measured, too, by rounds of longer ones, where less than these was left to write.
        self.chosen: set[Plan] = set()
        # How many rounds had been measured at the last one of each.
        self.last: dict[Plan, int] = {}
        self.guesses: dict[Plan, float] = {}
        # Logarithms of seconds: of the rounds of the block that has begun; and of earlier blocks, by plan, the median and how
        # many there were. Calls in other threads may add to it: what is worked on is a copy, and replaced as a whole.
        self.block: list[tuple[Plan, float]] = []
        self.blocks: deque[dict[Plan, tuple[float, int]]] = deque(maxlen=self.REMEMBERED)
        # Whether they were measured before, and forgotten.
        self.is_renewed = False
        # What a longer text adds, and a token of it as of the last block; the length of the one that is written, and of the
        # first, as of which all is kept.
        self.growth, self.per_token, self.length, self.first_length = Growth(), 0.0, 0, 0
        # What the target's forwards take.
        self.reading = ReadingCosts()
        # Rounds by which each plan was compared with others.
        self.evidence: dict[Plan, float] = {}
        # Logarithms of costs, and the level of the last block.
        self.logs: dict[Plan, float] = {}
        self.level = 0.0
        # Share by which a round takes more or less time than others of its plan in a block.
        self.noise = Mean()
        self.num_notes = self.num_surprises = 0
        self._known: dict[Plan, float | None] = {}

    def guess(self, like: "Costs", share: float) -> None:
        """Believe the costs at another batch size until there are own ones.

        Args:
            like: these costs.
            share: what a draft takes here of the time that it takes there, at least.
        """
        # Calls in other threads may teach meanwhile, and a cost be counted that is not known yet.
        measured = {plan: cost for plan in [*like.counts] if (cost := like.of(plan)) is not None}
        known = {**like.guesses, **measured}
        undrafted = known.get(NOTHING, 0.0)
        self.guesses = {
            plan: undrafted + share * (cost - undrafted) for plan, cost in known.items() if plan not in self.counts
        }
        self._known = {}

    @property
    def know_drafts(self) -> bool:
        """Whether there is anything to say of rounds with drafts, or there is to be what is measured anew."""
        return self.is_renewed or any(plan.depth for plan in [*self.guesses, *self.counts])

    def renewed(self) -> "Costs":
        """To be measured again, with what there is to choose from."""
        costs = Costs()
        costs.chosen, costs.is_renewed = {*self.chosen}, True
        return costs

    def count(self, plan: Plan) -> int:
        """How often the plan was measured."""
        return self.counts.get(plan, 0)

    def rounds_since(self, plan: Plan) -> int:
        """How many rounds were measured since the last one of this plan."""
        return self.num_notes - self.last.get(plan, 0)

    def doubt(self, plan: Plan, other: Plan) -> float:
        """The share by which the ratio of two plans' measured costs may well be wrong; of a guess nobody knows."""
        compared = [self.evidence[each] for each in (plan, other) if each in self.evidence]
        return self.NOISE / math.sqrt(1 + min(compared)) if compared and self.count(plan) and self.count(other) else 0.0

    @property
    def are_sure(self) -> bool:
        """Whether the measured plans were compared with others often enough for a machine as uneven as this one."""
        others = sorted([*self.counts], key=self.count)[:-1]
        compared = min((self.evidence.get(plan, 0.0) for plan in others), default=0.0)
        return self.noise.count > 0 and self.noise.value < self.SURE * math.sqrt(1 + compared)

    def is_settled(self, plan: Plan) -> bool:
        """Whether one round more says little of the plan."""
        return self.count(plan) >= self.SETTLED

    def of(self, plan: Plan) -> float | None:
        """The cost of a plan; a guess from others where it was not measured, `None` where there is nothing to guess from."""
        known = self._known
        if plan not in known:
            known[plan] = self._estimate(plan)
        seconds = known[plan]
        if seconds is None:
            return None
        return self._longer(seconds, self._added(self.length)) + (0.0 if plan.depth else self.upkeep)

    def _added(self, length: int) -> float:
        """Seconds that a text of this length adds to a round, compared with one of the first length."""
        return self.per_token * (length - self.first_length)

    def _longer(self, seconds: float, by: float) -> float:
        """A round that takes so much more, or less, for the length of its text, within reason."""
        return max(seconds + by, seconds / self.MOST_ADDED)

    def _estimate(self, plan: Plan) -> float | None:
        medians = {other: math.exp(log + self.level) for other, log in self.logs.items()}
        own = medians.pop(plan, None)
        if own is not None and self.count(plan) >= self.BELIEVED:
            return self._smoothed(plan, own, medians)
        if own is None and plan in self.guesses:
            return max([self.guesses[plan], *(cost for other, cost in medians.items() if plan.includes(other))])
        costs = {**self.guesses, **medians}
        others = self._like_others(plan, costs)
        if own is None or others is None:
            return others if own is None else own
        # One or two rounds may have been outliers, dearer than others say. Drafts can't say what a round without one costs.
        limit = self.DOUBT * others if plan.depth else math.inf
        return min([own, limit, *(cost for other, cost in costs.items() if other.includes(plan))])

    def _like_others(self, plan: Plan, costs: dict[Plan, float]) -> float | None:
        """What others say of a plan: a draft takes longer than another by what the target takes to read more, if it is known."""
        drafts = [other for other in costs if other.depth and other != plan] if plan.depth else []
        if drafts:
            near = min(drafts, key=lambda other: (abs(other.num_nodes - plan.num_nodes), -other.num_nodes))
            of_plan, of_near = (self.reading.of(1 + each.num_nodes) for each in (plan, near))
            if of_plan is not None:
                return max(costs[near] + of_plan - of_near, of_plan)
        return interpolated(sorted((other.num_nodes, cost) for other, cost in costs.items()), plan.num_nodes)

    def _smoothed(self, plan: Plan, own: float, medians: dict[Plan, float]) -> float:
        """A plan's own cost, and a little of what other sizes of its kind say."""
        points = [
            (other.num_nodes, median)
            for other, median in medians.items()
            if (other.budget > 0) == (plan.budget > 0) and other.depth and plan.depth
        ]
        others, count = interpolated(sorted(points), plan.num_nodes), min(self.count(plan), self.SETTLED)
        return own if others is None else (count * own + self.BELIEVED * others) / (count + self.BELIEVED)

    def note(self, plan: Plan, seconds: float | None, length: int = 0) -> None:
        """Learn from a round before which the text was so long, and which took so many seconds if it was an ordinary one.

        A length of 0 is one that doesn't matter.
        """
        self.length = length
        self.last[plan] = self.num_notes
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            return
        if length:
            self.first_length = self.first_length or length
            self.growth.note(plan, length, seconds)
            seconds = self._longer(seconds, -self._added(length))
        self.block.append((plan, math.log(seconds)))
        if plan == NOTHING:
            self.note_undrafted(seconds)
        is_news = self.count(plan) < self.BELIEVED
        self.counts[plan] = self.count(plan) + 1
        self.num_surprises += is_news
        self.num_notes += 1
        is_full = self.num_notes % self.BLOCK == 0
        if is_news or is_full:
            block = tuple(self.block)
            medians = medians_of(block)
            self._compare({plan} if is_news else {*medians}, medians)
            self._known, self.per_token = {}, self.growth.per_token
            # A call in another thread may have begun the next block meanwhile.
            if is_full and block:
                self.noise.note(sum(abs(log - medians[plan][0]) for plan, log in block) / len(block), len(block))
                if len(medians) > 1:
                    self.blocks.append(medians)
                self.block = []

    def note_plain(self, seconds: float, num_steps: int) -> None:
        """Learn what so many steps of plain `generate` have taken each, which wrote what comes after the present length."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        middle = self.length + num_steps // 2
        self.note_steps(self._longer(seconds, -self._added(middle)), num_steps)

    def note_upkeep(self, seconds: float, num_rounds: int) -> None:
        """Learn from a round without a draft in which the drafter read what so many such rounds have written."""
        usual = self.of(NOTHING)
        if usual is not None and math.isfinite(seconds):
            usual -= self.upkeep
            self.upkeep = min(max(seconds - usual, 0.0), self.OUTLIER * usual) / num_rounds

    def _compare(self, plans: set[Plan], last: dict[Plan, tuple[float, int]]) -> None:
        """Find the costs of some plans of the last block, and its level, from its medians."""
        logs, evidence, blocks = dict(self.logs), dict(self.evidence), (*self.blocks, last)
        # The one that is known best is what others are compared with.
        known_best = max(logs, key=self.count, default=None)
        for plan in last:
            if plan not in logs or (plan in plans and plan != known_best):
                found = [compared_in(block, plan, logs) for block in blocks if plan in block]
                found = [each for each in found if each is not None]
                evidence[plan] = sum(weight for _, weight in found)
                logs[plan] = weighted_median(found) if found else logs.get(plan, last[plan][0] - self.level)
        self.logs, self.evidence = logs, evidence
        if last:
            self.level = level_of(last, logs)

    def charged(self, plan: Plan, seconds: float) -> float:
        """What a round did cost, ordinary or not, within reason."""
        usual = max(self.of(plan) or 0.0, self.of(NOTHING) or 0.0)
        return min(max(seconds, 0.0), self.OUTLIER * usual)
