"""What rounds cost, compared with each other. Pure: seconds are told, and no clock is read."""

import math

from .beside_plain import BesidePlain
from .compared import Compared
from .estimates import interpolated, on_a_line
from .growth import Growth
from .plans import NOTHING, Plan
from .reading import ReadingCosts


class Costs(BesidePlain):
    """Seconds of ordinary rounds by plan, at one batch size.

    Plans are compared with each other once what a longer text adds is taken off, see [`Compared`]. Seconds are told as of the
    last block, for a text as long as the one that is written.
    """

    # Measurements of a plan that are believed whatever those of others say.
    BELIEVED = 3
    # Factor by which fewer may be above what those of others say, and any be off the line through all of a kind.
    DOUBT = 1.5
    # Share by which a round of a plan takes more or less time than another.
    NOISE = 0.3
    # Share by which a cost that is sure may well be wrong: plans that are best in turn differ by a few percent.
    SURE = 0.02
    # Measurements whose weight has the line on which rounds with chains, or with trees, are thought to lie by their nodes.
    OF_LINE = 4.0
    # Measurements to which one more adds little.
    SETTLED = 24
    # A round takes at most so many times as long as was thought, for all that we want to know: a suspended process, a debugger.
    OUTLIER = 8.0
    # However short a text is, at least one in so many of a round's seconds is left.
    MOST_ADDED = 4.0

    def __init__(self) -> None:
        super().__init__()
        # Plans that were chosen. Others may be measured, too, by rounds of longer ones, where less than these was left to write.
        self.chosen: set[Plan] = set()
        # How many rounds had been measured at the last one of each.
        self.last: dict[Plan, int] = {}
        self.guesses: dict[Plan, float] = {}
        self.compared = Compared()
        # Whether they were measured before, and forgotten.
        self.is_renewed = False
        # What a longer text adds to a round, and a token of it as of the last block; the length of the one that is written, and
        # of the first, as of which all is kept.
        self.growth, self.per_token = Growth(), 0.0
        self.length = self.first_length = 0
        # What the target's forwards take.
        self.reading = ReadingCosts()
        self.num_surprises = 0
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

    def begin_text(self) -> None:
        """What comes is another text, and another hour."""
        self.growth.begin_text()

    @property
    def know_drafts(self) -> bool:
        """Whether there is anything to say of rounds with drafts, or there is to be what is measured anew."""
        return self.is_renewed or any(plan.depth for plan in [*self.guesses, *self.counts])

    def renewed(self) -> "Costs":
        """To be measured again, with what there is to choose from."""
        costs = Costs()
        costs.chosen, costs.is_renewed = {*self.chosen}, True
        return costs

    @property
    def counts(self) -> dict[Plan, int]:
        """How often each plan was measured."""
        return self.compared.counts

    def count(self, plan: Plan) -> int:
        """How often the plan was measured."""
        return self.counts.get(plan, 0)

    def rounds_since(self, plan: Plan) -> int:
        """How many rounds were measured since the last one of this plan."""
        return self.compared.num_notes - self.last.get(plan, 0)

    def evidence(self, plan: Plan) -> float:
        """Comparisons with others by which it is known what a plan costs."""
        return self.compared.evidence.get(plan, 0.0)

    def doubt(self, plan: Plan, other: Plan) -> float:
        """The share by which the ratio of two plans' measured costs may well be wrong; of a guess nobody knows."""
        if not (self.count(plan) and self.count(other)):
            return 0.0
        return self.NOISE / math.sqrt(1 + min(self.evidence(plan), self.evidence(other)))

    @property
    def are_sure(self) -> bool:
        """Whether the measured plans were compared with others often enough for a machine as uneven as this one."""
        *others, _ = sorted([*self.counts], key=self.count) or [NOTHING]
        compared, noise = min(map(self.evidence, others), default=0.0), self.compared.noise
        return noise.count > 0 and noise.value < self.SURE * math.sqrt(1 + compared)

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
        medians = self._measured()
        known = self._by_nearest(plan, medians)
        if known is None or not (plan.depth and plan in medians):
            return known
        # A few rounds are off by more than other plans of their kind are off the line through all of them.
        alike = [(other, cost) for other, cost in medians.items() if self._are_alike(plan, other)]
        points = [(other.num_nodes, cost, self._weight(other) / cost**2) for other, cost in alike]
        line = on_a_line(points, plan.num_nodes)
        if line is not None:
            line = min(max(line, known / self.DOUBT), known * self.DOUBT)
        return self._weighed(plan, known, line, self.OF_LINE)

    def _weight(self, plan: Plan) -> int:
        """Measurements of a plan that count."""
        return min(self.count(plan), self.SETTLED)

    def _weighed(self, plan: Plan, own: float, others: float | None, weight: float) -> float:
        """What is known of a plan itself, weighed against what others say, which counts as so many measurements of it."""
        count = self._weight(plan)
        return own if others is None else (count * own + weight * others) / (count + weight)

    def _by_nearest(self, plan: Plan, measured: dict[Plan, float]) -> float | None:
        """What a plan's own rounds say, and those of the nearest sizes."""
        medians = dict(measured)
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

    def _measured(self) -> dict[Plan, float]:
        """The seconds of all plans that were measured, for a text of the first length."""
        return {plan: math.exp(log + self.compared.level) for plan, log in self.compared.logs.items()}

    def _like_others(self, plan: Plan, costs: dict[Plan, float]) -> float | None:
        """What others say of a plan: a draft takes longer than another by what the target takes to read more, if it is known."""
        drafts = [other for other in costs if other.depth and other != plan] if plan.depth else []
        if drafts:
            near = min(drafts, key=lambda other: (abs(other.num_nodes - plan.num_nodes), -other.num_nodes))
            of_plan, of_near = (self.reading.of(1 + each.num_nodes) for each in (plan, near))
            if of_plan is not None:
                return max(costs[near] + of_plan - of_near, of_plan)
        return interpolated(sorted((other.num_nodes, cost) for other, cost in costs.items()), plan.num_nodes)

    @staticmethod
    def _are_alike(plan: Plan, other: Plan) -> bool:
        """Whether both are chains or both are trees, which take a search besides."""
        return (other.budget > 0) == (plan.budget > 0) and bool(other.depth and plan.depth)

    def _smoothed(self, plan: Plan, own: float, medians: dict[Plan, float]) -> float:
        """A plan's own cost, and a little of what other sizes of its kind say."""
        points = [(other.num_nodes, median) for other, median in medians.items() if self._are_alike(plan, other)]
        return self._weighed(plan, own, interpolated(sorted(points), plan.num_nodes), self.BELIEVED)

    def note(self, plan: Plan, seconds: float | None, length: int = 0) -> None:
        """Learn from a round.

        Args:
            plan: that it followed.
            seconds: that it took, if it was an ordinary one.
            length: of the text before it; 0 if that doesn't matter.
        """
        self.length = length
        self.last[plan] = self.compared.num_notes
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            return
        if length:
            self.first_length = self.first_length or length
            self.growth.note(plan, length, seconds)
            seconds = self._longer(seconds, -self._added(length))
        if plan == NOTHING:
            self.note_undrafted(seconds)
        is_news = self.count(plan) < self.BELIEVED
        self.num_surprises += is_news
        if self.compared.note(plan, math.log(seconds), is_news):
            self._known, self.per_token = {}, self.growth.per_token

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

    def charged(self, plan: Plan, seconds: float) -> float:
        """What a round did cost, ordinary or not, within reason."""
        usual = max(self.of(plan) or 0.0, self.of(NOTHING) or 0.0)
        return min(max(seconds, 0.0), self.OUTLIER * usual)
