"""What rounds cost, compared with each other. Pure: whoever has a clock tells."""

import math
from collections import deque

from .plans import NOTHING, Plan


def lower_median(values) -> float:
    """The median; of two in the middle the lower one, so that a single outlier among two values is not believed."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Costs:
    """Seconds of ordinary rounds by plan, at one batch size.

    A machine that slows down slows all plans down. So while the rounds of whatever plans are followed take clearly longer, or
    shorter, than they used to, seconds are put back to what they would have been: otherwise each plan in turn would look better
    for having last been tried in a faster hour.

    Args:
        like: costs at another batch size, to be believed until there are own ones.
    """

    # Measurements of a plan that are remembered, rounds by which the machine's pace is known, and rounds after which the pace and
    # the medians are worked out again.
    REMEMBERED, RECENT, PACED, RENEWED = 49, 15, 4, 8
    # Factors of the pace that are not told from noise.
    USUAL = 1.15
    # Measurements that are believed whatever those of others say; and how far fewer may be from what these say.
    BELIEVED, DOUBT = 3, 1.5
    # A round takes at most so many times as long as was thought, for all that we want to know: a suspended process, a debugger.
    OUTLIER = 8.0

    def __init__(self, like: "Costs | None" = None) -> None:
        self.measured: dict[Plan, deque[float]] = {}
        self.guesses: dict[Plan, float] = {}
        if like is not None:
            self.guesses = {**like.guesses, **{plan: like.of(plan) for plan in like.measured}}
        self.paces: deque[float] = deque(maxlen=self.RECENT)
        # By how much rounds take longer than they used to.
        self.pace = 1.0
        self.num_notes = self.num_surprises = 0
        # Calls in other threads may add to it.
        self.medians: dict[Plan, float] = {}
        self._known: dict[Plan, float | None] = {}

    def count(self, plan: Plan) -> int:
        """How often the plan was measured."""
        return len(self.measured.get(plan, ()))

    def of(self, plan: Plan) -> float | None:
        """The cost of a plan; a guess from others where it was not measured, `None` where there is nothing to guess from."""
        if plan not in self._known:
            self._known[plan] = self._estimate(plan)
        return self._known[plan]

    def _estimate(self, plan: Plan) -> float | None:
        own = self.medians.get(plan)
        if own is not None and self.count(plan) >= self.BELIEVED:
            return self._smoothed(plan, own)
        costs = {other: median for other, median in [*self.medians.items()] if other != plan}
        if own is None and plan in self.guesses:
            return max([self.guesses[plan], *(cost for other, cost in costs.items() if plan.includes(other))])
        costs = {**self.guesses, **costs}
        others = interpolated(sorted((other.num_nodes, cost) for other, cost in costs.items()), plan.num_nodes)
        if own is None or others is None:
            return others if own is None else own
        # One or two rounds may have been outliers, and then they cost more than others say.
        return min([own, self.DOUBT * others, *(cost for other, cost in costs.items() if other.includes(plan))])

    def _smoothed(self, plan: Plan, own: float) -> float:
        """A plan's own cost, and a little of what other sizes of its kind say."""
        points = [
            (other.num_nodes, median)
            for other, median in [*self.medians.items()]
            if other != plan and (other.budget > 0) == (plan.budget > 0) and other.depth and plan.depth
        ]
        others, count = interpolated(sorted(points), plan.num_nodes), self.count(plan)
        return own if others is None else (count * own + self.BELIEVED * others) / (count + self.BELIEVED)

    def note(self, plan: Plan, seconds: float) -> None:
        """Learn from an ordinary round."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        expected, count = self.of(plan), self.count(plan)
        if expected is not None and count:
            self.paces.append(seconds / expected)
            if self.num_notes % self.PACED == 0 and len(self.paces) == self.RECENT:
                pace = lower_median(self.paces)
                self.pace = 1.0 if 1 / self.USUAL < pace < self.USUAL else pace
        measured = self.measured.setdefault(plan, deque(maxlen=self.REMEMBERED))
        measured.append(seconds / self.pace)
        self.num_notes += 1
        is_news = count < self.BELIEVED
        self.num_surprises += is_news
        # Medians move slowly.
        if is_news or self.num_notes % self.RENEWED == 0:
            self.medians[plan] = lower_median(measured)
            self._known.clear()

    def charged(self, plan: Plan, seconds: float) -> float:
        """What a round did cost, ordinary or not, within reason."""
        usual = max(self.of(plan) or 0.0, self.of(NOTHING) or 0.0)
        return min(max(seconds, 0.0) / self.pace, self.OUTLIER * usual)


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
