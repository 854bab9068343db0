"""Whether a text that isn't drafted is one of those that drafts pay for, of which a few drafts now and then tell. Pure."""

from .plans import NOTHING, Plan
from .savings import TextSavings
from .worth import PlanWorth


class TextChecks:
    """The checks of one call's text. Losses are in rounds without a draft.

    Args:
        savings: of earlier texts; they grow.
        worth: of plans, by what is known now.
        first: the plan to check with: the longest chain, which tells most.

    Attributes:
        may_save: rounds without a draft that drafts would save of a text like the last ones.
        is_begun: whether the call is in our loop for that alone.
    """

    # Drafts at the beginning of a text that tell whether it is another than those before.
    AT_FIRST = 3
    # Rounds without a draft that beginning a call in our loop costs.
    START = 3.0
    # Rounds until the next check: before a plan is tried again.
    REST = 8
    # How many times as fast a draft has to have been to be followed by another at once; and how many in a row are at most, before
    # it is thought over what to follow.
    CLEARLY, MOST_IN_A_ROW = 1.3, 8

    def __init__(self, savings: TextSavings, worth: PlanWorth, first: Plan) -> None:
        self.savings, self.worth, self.first = savings, worth, first
        self.may_save, self.is_begun = 0.0, False
        # Seconds of all rounds before, and the text's length, when the round after the prompt's began, and when the last one did.
        self.since = self.until = (0.0, 0)

    def _price(self, best: Plan) -> float:
        return self.AT_FIRST * self.worth.loss(self.first, best)

    def pay(self, best: Plan) -> bool:
        """Whether those at the beginning cost less than drafts may save of this text."""
        return self._price(best) < self.may_save

    def begin_a_call(self) -> bool:
        """Whether to begin a call that is best left to plain `generate`, so as to check its text."""
        self.is_begun = self.worth.batch == 1 and self.START + self._price(NOTHING) < self.may_save
        return self.is_begun

    def stay(self, num_drafted: int, lead: float) -> bool:
        """Whether not to leave the rest of a text to plain `generate` yet: it was begun to be checked, or that is paid for.

        Args:
            num_drafted: rounds with drafts so far.
            lead: how many times as fast plain `generate` is.
        """
        if self.is_begun and num_drafted < self.AT_FIRST:
            return True
        slower = max(lead - 1, 0.0)
        if self.REST * slower + 2 * self.worth.loss(self.first, NOTHING) > self.savings.put_by:
            return False
        self.savings.put_by -= slower
        return True

    def goes_on(self, num_tried: int, num_accepted: int, seconds: float) -> bool:
        """Whether to draft again at once, since the draft was clearly faster than none.

        Args:
            num_tried: drafts in a row.
            num_accepted: tokens of the last one that were accepted.
            seconds: that its round took.
        """
        was_faster = (1 + num_accepted) * self.worth.seconds[NOTHING] > self.CLEARLY * seconds
        return was_faster and num_tried < self.MOST_IN_A_ROW

    def begin_round(self, number: int, seconds: float, length: int) -> None:
        """A round begins after rounds of so many seconds, and after so much text; the first one reads the prompt."""
        if number <= 2:
            self.since = seconds, length
        self.until = seconds, length

    def end(self, num_plain: int, rest: float) -> None:
        """Learn what drafts have saved of this text, but for its last round.

        Args:
            num_plain: tokens of it that plain `generate` has written in the end.
            rest: seconds that each token takes without drafts.
        """
        (began, first_length), (ended, length) = self.since, self.until
        num_tokens = length - first_length
        self.savings.note((num_tokens - (ended - began) / rest) / max(num_tokens + num_plain, 1))
