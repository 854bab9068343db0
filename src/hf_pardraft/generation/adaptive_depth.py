"""How deep to draft in the next round, from how the last ones went."""


class DepthSchedule:
    """The deepest draft always, or, if adaptive, one not much deeper than what was accepted lately.

    A drafter whose drafts are refused again and again is asked more and more rarely: after its second failure in a row the
    pause doubles each time, up to `LONGEST_PAUSE` rounds. So a useless drafter costs little, and one that meets a text it
    knows is soon found out.

    Args:
        deepest: most tokens to draft.
        adaptive: whether to draft less.

    Attributes:
        is_pausing: whether nothing is drafted in this round because of how the last ones went.
    """

    LONGEST_PAUSE = 64
    # One token more than was accepted can tell that the drafter could have gone on; two find it out sooner.
    MARGIN = 2

    def __init__(self, deepest: int, adaptive: bool) -> None:
        self.deepest = deepest
        self.adaptive = adaptive
        self.depth = float(deepest)
        self.failures = 0
        self.pause = 0
        self.is_pausing = False

    def next_depth(self) -> int:
        """Tokens to draft in the round that now begins; 0 in a pause."""
        if not self.adaptive:
            return self.deepest
        self.is_pausing = self.pause > 0
        if self.is_pausing:
            self.pause -= 1
            return 0
        return max(1, min(self.deepest, round(self.depth)))

    def note(self, accepted: float) -> None:
        """Learn from a round with a draft, of which `accepted` tokens were accepted (the mean, of a batch)."""
        if not self.adaptive:
            return
        self.failures = 0 if accepted > 0 else self.failures + 1
        if self.failures > 1:
            self.pause = min(2 ** (self.failures - 1), self.LONGEST_PAUSE)
        # Half way to where it should be: one round is weak evidence.
        self.depth = (self.depth + min(self.deepest, accepted + self.MARGIN)) / 2 if accepted > 0 else self.depth / 2
