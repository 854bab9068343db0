"""How rounds are measured and compared: uncompiled ones, and compiled ones. Pure."""

from collections.abc import Sequence

from .costs import Costs
from .plans import NOTHING, Plan

# Seconds of a long round: cold caches don't matter in it, nor, of one without a draft and for one item, whose it is.
LONG_ROUND = 0.02


class RoundKind:
    """How rounds of one kind are measured and compared.

    Args:
        plans: what there is to choose from.
        first: the plan to begin with where nothing is known.

    Attributes:
        may_be_left: whether plain `generate` may be better than rounds that draft nothing.
        opens_free: whether what is measured before there is a choice is charged to nobody.
        repeats_tries: whether plans are tried several times even where nothing is drafted otherwise.
        FOLLOWED: how many times as fast a plan is when it is followed than a few tries of it say.
        LEAD_WITHOUT_DRAFTS: how many times as fast as any draft rounds without one have to be, which teach nothing of drafts.
    """

    may_be_left: bool
    opens_free: bool
    repeats_tries: bool
    FOLLOWED: float
    LEAD_WITHOUT_DRAFTS: float

    def __init__(self, plans: Sequence[Plan], first: Plan) -> None:
        self.plans, self.first = plans, first

    def is_known(self, costs: Costs) -> bool:
        """Whether there is something to choose by."""
        return costs.of(NOTHING) is not None and costs.of(self.first) is not None

    def opening(self, costs: Costs) -> Plan | None:
        """What has to be measured before there is a choice; `None` if that is done."""
        # What another batch size taught may be wrong for this one, about the round above all that others are compared with.
        # Two rounds that need no draft, since one may be an outlier, then one that does.
        if costs.count(NOTHING) < 2:
            return NOTHING
        return None if self.is_known(costs) else self.first

    def length_that_matters(self, length: int) -> int:
        """Of a text of this length, the tokens with which rounds take longer."""
        raise NotImplementedError

    def are_young(self, costs: Costs) -> bool:
        """Whether costs were measured while the process was young, and are to be measured anew."""
        raise NotImplementedError

    def is_there(self, plan: Plan, costs: Costs) -> bool:
        """Whether a plan is one of those that are made whatever they may be worth, or that was chosen before."""
        raise NotImplementedError

    def num_cold(self, seconds: float) -> int:
        """How many rounds in a row say nothing of the later ones, of such as take so long."""
        raise NotImplementedError

    def of_a_try(self, seconds: float, is_about_cost: bool) -> int:
        """How many rounds in a row a plan is tried for whose rounds take so long; for its cost, or for what is accepted alone."""
        raise NotImplementedError


class UncompiledRounds(RoundKind):
    """Rounds of any shape: what is to be known of a plan costs a round or two."""

    may_be_left = True
    opens_free = False
    repeats_tries = False
    # What the rounds of a plan that is followed use is in the processor's caches.
    FOLLOWED = 1.03
    LEAD_WITHOUT_DRAFTS = 1.0

    def length_that_matters(self, length: int) -> int:
        return length

    def are_young(self, costs: Costs) -> bool:
        return False

    def is_there(self, plan: Plan, costs: Costs) -> bool:
        return True

    def num_cold(self, seconds: float) -> int:
        return 0

    def of_a_try(self, seconds: float, is_about_cost: bool) -> int:
        return 1 if seconds >= LONG_ROUND else 2


class CompiledRounds(RoundKind):
    """Rounds of few shapes, each of which takes its time to compile.

    Each plan is measured in the first call, which compiles all that there is to compile, and as often as it takes until code and
    data are in the processor's caches. Rounds that draft nothing are faster than plain `generate`.
    """

    may_be_left = False
    opens_free = True
    repeats_tries = True
    # Seconds below which rounds are very short.
    VERY_SHORT = 5e-3
    # How many of the first rounds in a row are cold where they are short.
    COLD = 2
    # The same where they are very short.
    VERY_COLD = 6
    # Warm rounds by which each plan is measured in the first call.
    OPENING = 6
    # Warm rounds of a try that is about what a plan costs.
    IN_A_TRY = 3
    # Rounds of a try that is about what is accepted alone.
    JUDGING = 3
    FOLLOWED = 1.0
    LEAD_WITHOUT_DRAFTS = 1.1

    def opening(self, costs: Costs) -> Plan | None:
        if costs.guesses:
            return super().opening(costs)
        count = self.OPENING if (costs.of(NOTHING) or 0.0) < LONG_ROUND else 2
        return next((plan for plan in self.plans if self.is_there(plan, costs) and costs.count(plan) < count), None)

    def length_that_matters(self, length: int) -> int:
        """None: each reads its whole cache, whatever is in it."""
        return 0

    def are_young(self, costs: Costs) -> bool:
        """In the call that compiles them, very short rounds with drafts take up to a third longer."""
        usual = costs.of(NOTHING)
        is_very_short = usual is not None and usual < self.VERY_SHORT
        return is_very_short and not costs.is_renewed and self.opening(costs) is None

    def is_there(self, plan: Plan, costs: Costs) -> bool:
        return plan in (NOTHING, self.first, self.plans[-1]) or plan in costs.chosen

    def num_cold(self, seconds: float) -> int:
        if seconds >= LONG_ROUND:
            return 0
        return self.VERY_COLD if seconds < self.VERY_SHORT else self.COLD

    def of_a_try(self, seconds: float, is_about_cost: bool) -> int:
        if seconds >= LONG_ROUND:
            return 1
        return self.num_cold(seconds) + self.IN_A_TRY if is_about_cost else self.JUDGING
