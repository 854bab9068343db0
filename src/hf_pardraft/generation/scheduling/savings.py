"""What drafts have saved of the last texts, each for itself. Pure."""

from collections import deque


class TextSavings:
    """The shares of their time that drafts have saved of the last texts, and what may be lost to find out about the next.

    Drafts that are too slow for most texts may write a few in a fraction of the time: then it pays to check each, and again as it
    goes on, whatever drafts bring on average.

    Attributes:
        put_by: rounds without a draft that may be lost by checks of texts that aren't drafted.
    """

    # Texts of which that is remembered.
    REMEMBERED = 16
    # The least share that counts as saved: calls differ by a good part of it for other reasons.
    LEAST = 0.2
    # The share that is thought to be saved before that is seen, by a drafter that is right now and then; and texts whose weight
    # this has.
    PRIOR, PRIOR_WEIGHT = 0.1, 2.0
    # The share of drafts whose first token is accepted, of such a drafter.
    NOW_AND_THEN = 0.1
    # Part of what is saved that checks may cost; and rounds that are put by at most.
    SHARE, MOST_PUT_BY = 0.2, 8.0

    def __init__(self) -> None:
        # Calls in other threads may add to them.
        self.last: deque[float] = deque(maxlen=self.REMEMBERED)
        self.put_by = 0.0

    def note(self, share: float) -> None:
        """Learn that this share of a text's time was saved; of one that drafts don't pay for, less than nothing."""
        self.last.append(share if share >= self.LEAST else 0.0)

    def mean(self, first_rate: float) -> float:
        """The share that is saved of texts that are checked, and drafted where that pays.

        Args:
            first_rate: of all drafts, the share of which the first token was accepted.
        """
        last = [*self.last]
        # The first text of all has enough to find out.
        prior = self.PRIOR * min(first_rate / self.NOW_AND_THEN, 1.0) if last else 0.0
        return (sum(last) + self.PRIOR_WEIGHT * prior) / (len(last) + self.PRIOR_WEIGHT)

    def put_in(self, rounds: float, mean: float) -> None:
        """Put by for checks: so many rounds without a draft have passed, of which such a share might be saved."""
        self.put_by = min(self.put_by + self.SHARE * mean * rounds, self.MOST_PUT_BY)
