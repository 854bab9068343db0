"""What rounds cost, compared with each other. Pure: whoever has a clock tells."""

import math
from collections import deque

from .plans import NOTHING, Plan


def lower_median(values) -> float:
    """The median; of two in the middle the lower one, so that a single outlier among two values is not believed."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Costs:
    """Costs of plans at one batch size, in units that say something about each other only.

    A machine that slows down slows all plans down. So a plan is not known by its seconds but by how its rounds compare with those
    right before, in which another plan was followed; what one gains in such a comparison the other loses, as chess players'
    ratings do (Elo 1978). Of a plan that is followed on and on nothing new is learned, and no other one looks better because it
    was last tried in a faster hour.

    Args:
        like: costs at another batch size, to be believed until there are own ones.
    """

    # Rounds by which the machine's pace is known, and rounds after a change of plan that are compared with those before it.
    PACE, COMPARED = 15, 4
    # Of a surprise (a logarithm), the least share that is believed; and the most that a round may say.
    LEAST_GAIN, MOST = 1 / 30, 0.5
    # Measurements that are believed whatever those of others say; and how far fewer may be from what these say.
    BELIEVED, DOUBT = 3, 1.5
    # A round takes at most so many times as long as was thought, for all that we want to know: a suspended process, a debugger.
    OUTLIER = 8.0

    def __init__(self, like: "Costs | None" = None) -> None:
        self.logs: dict[Plan, float] = {}
        self.counts: dict[Plan, int] = {}
        self.guesses: dict[Plan, float] = {}
        if like is not None:
            self.guesses = {plan: like.of(plan) for plan in {*like.logs, *like.guesses}}
        self.known: dict[Plan, float | None] = {}
        self.paces: deque[float] = deque(maxlen=self.PACE)
        self.followed: Plan | None = None
        self.before: Plan | None = None
        self.pace_before: float | None = None
        self.num_followed = 0

    def count(self, plan: Plan) -> int:
        """How often the plan was measured."""
        return self.counts.get(plan, 0)

    @property
    def pace(self) -> float | None:
        """Seconds that one unit takes now."""
        return lower_median(self.paces) if self.paces else None

    def of(self, plan: Plan) -> float | None:
        """The cost of a plan; a guess from others where it was not measured, `None` where there is nothing to guess from."""
        if plan not in self.known:
            self.known[plan] = self._estimate(plan)
        return self.known[plan]

    def _estimate(self, plan: Plan) -> float | None:
        costs = {other: math.exp(log) for other, log in self.logs.items()}
        own = costs.pop(plan, None)
        if own is None and plan in self.guesses:
            return max([self.guesses[plan], *(cost for other, cost in costs.items() if plan.includes(other))])
        others = interpolated(sorted((other.num_nodes, cost) for other, cost in costs.items()), plan.num_nodes)
        if own is None or others is None or self.count(plan) >= self.BELIEVED:
            return others if own is None else own
        # One or two rounds may have been outliers, and then they cost more than others say.
        return min([own, self.DOUBT * others, *(cost for other, cost in costs.items() if other.includes(plan))])

    def note(self, plan: Plan, seconds: float) -> None:
        """Learn from an ordinary round."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if plan != self.followed:
            self.before, self.pace_before = self.followed, self.pace
            self.followed, self.num_followed = plan, 0
        self.num_followed += 1
        if self.pace_before is None:
            self.logs.setdefault(plan, math.log(self.guesses.get(plan, 1.0)))
            self.counts[plan] = 1
        elif self.num_followed <= self.COMPARED:
            self._compare(plan, math.log(seconds / self.pace_before))
        self.known.clear()
        self.paces.append(seconds / math.exp(self.logs[plan]))

    def _compare(self, plan: Plan, found: float) -> None:
        """Learn that rounds of a plan cost so much (a logarithm) where those before cost what was thought."""
        if self.count(plan) < 2:
            # Of two measurements the first may be an outlier, and outliers cost more.
            self.logs[plan] = min(found, self.logs.get(plan, found)) if self.count(plan) else found
        else:
            surprise = max(-self.MOST, min(found - self.logs[plan], self.MOST))
            self.logs[plan] += self._gain(plan) * surprise
            if self.count(self.before) > 1:
                self.logs[self.before] -= self._gain(self.before) * surprise
        self.counts[plan] = self.count(plan) + 1

    def _gain(self, plan: Plan) -> float:
        return max(1 / (self.count(plan) + 1), self.LEAST_GAIN)

    def charged(self, plan: Plan, seconds: float) -> float:
        """What a round did cost, ordinary or not, within reason."""
        expected = self.of(plan)
        if expected is None or self.pace is None or not seconds > 0:
            return expected or 0.0
        return min(seconds / self.pace, self.OUTLIER * max(expected, self.of(NOTHING) or 0.0))


def interpolated(points: list[tuple[int, float]], size: int) -> float | None:
    """The value at `size` on the lines through points of different sizes, sorted; `None` of fewer than two points.

    Beyond the last point it goes on as steeply as from the first draft to the last, but not down.
    """
    points = [(at, min(value for place, value in points if place == at)) for at in sorted({at for at, _ in points})]
    if len(points) < 2:
        return None
    after = next((index for index, (at, _) in enumerate(points) if at >= size), None)
    (left, low), (right, high) = (
        points[1 if after is None else max(after, 1) - 1],
        points[-1 if after is None else max(after, 1)],
    )
    slope = (high - low) / (right - left) if right > left else 0.0
    return low + slope * (size - left) if after is not None else high + max(slope, 0.0) * (size - right)
