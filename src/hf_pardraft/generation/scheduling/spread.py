"""What drafts are worth to a batch whose items they serve unevenly. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul

# Items of which two may well be alike.
MANY = 12


class Spread:
    """How unevenly drafts serve the items of a batch.

    An item is believed to accept a token of a draft as probably as items do on average, to the power of an exponent of its own.
    So drafts of one depth tell what those of any other would bring it: the slow ones gain little by longer drafts.

    Args:
        num_items: of the batch, roughly.
    """

    # Scale of the logistic law that the logarithms of the items' exponents are believed to have at first.
    SCALE = 0.15
    # Drafted tokens of each item whose weight that has.
    PRIOR_WEIGHT = 20.0
    # An item is believed to accept no smaller share of what is drafted for it, and none that is larger than all but this.
    LEAST_RATE = 0.02

    def __init__(self, num_items: int) -> None:
        below = [(item + 0.5) / num_items for item in range(num_items)]
        self.before = [(part / (1 - part)) ** -self.SCALE for part in below]
        # Of this call, by item: accepted tokens, and those that were judged.
        self.found: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Another call begins, with other items: like those of this one, the more the more was drafted for them."""
        counts = [*self.found.values()]
        num_judged = sum(judged for _, judged in counts) / max(len(counts), 1)
        weight, last = num_judged / (num_judged + self.PRIOR_WEIGHT), self.exponents
        before = resampled(self.before, len(last))
        self.before = [weight * of_last + (1 - weight) * each for of_last, each in zip(last, before, strict=True)]
        self.found = {}

    def note(self, items: Iterable[int], outcomes: Iterable[tuple[int, int]]) -> None:
        """Learn what became of items' drafts, of a round or several; see [`AcceptanceRates.note`]."""
        found = dict(self.found)
        for item, (accepted, judged) in zip(items, outcomes, strict=True):
            accepted_before, judged_before = found.get(item, (0, 0))
            found[item] = accepted_before + accepted, judged_before + judged
        self.found = found

    @property
    def exponents(self) -> list[float]:
        """The items' exponents, roughly from the slowest item on; 1 if all items fare alike."""
        # Calls in other threads may begin, or learn, meanwhile.
        counts = [*self.found.values()]
        found = sorted((accepted / judged, judged) for accepted, judged in counts if judged)
        num_accepted = sum(accepted for accepted, _ in counts)
        if not num_accepted:
            return self.before
        mean = self._within_bounds(num_accepted / sum(judged for _, judged in found))
        own = smoothed([rate for rate, _ in found])
        rates = [
            (judged * rate + self.PRIOR_WEIGHT * mean**before) / (judged + self.PRIOR_WEIGHT)
            for rate, (_, judged), before in zip(own, found, resampled(self.before, len(found)), strict=True)
        ]
        return [math.log(self._within_bounds(rate)) / math.log(mean) for rate in rates]

    def _within_bounds(self, rate: float) -> float:
        return min(max(rate, self.LEAST_RATE), 1 - self.LEAST_RATE)

    def shares(self, rates: Sequence[float]) -> list[list[float]]:
        """For drafts of each depth up to the number of rates, the tokens that each item accepts, compared with the mean of all.

        Args:
            rates: for each position, how probably a token is accepted if all before it were.
        """
        of_items = [[*accumulate(accumulate(map(pow, rates, repeat(exponent)), mul))] for exponent in self.exponents]
        of_depths = [(accepted, sum(accepted) / len(accepted)) for accepted in zip(*of_items, strict=True)]
        return [[each / mean if mean else 1.0 for each in accepted] for accepted, mean in of_depths]


def worth_to_a_batch(tokens: float, fixed: float, shares: Sequence[float]) -> float:
    """What a round that commits so many tokens to an item is worth to the batch.

    An item leaves the batch when its text is over. A part of a round's time is the same whoever is left, and so lasts as long
    as the slowest item; the other part falls with each item that leaves.

    Args:
        tokens: in the mean of the items.
        fixed: the first part, as a share of the time of a round of all items.
        shares: the items', see [`Spread.shares`].
    """
    rounds = [1 / (1 + share * (tokens - 1)) for share in shares]
    return 1 / (fixed * max(rounds) + (1 - fixed) * sum(rounds) / len(rounds))


def smoothed(ordered: Sequence[float]) -> list[float]:
    """Each value's mean with its two neighbours, of many: luck, too, makes the first ones small, and the last ones large."""
    if len(ordered) < MANY:
        return [*ordered]
    places = (min(max(place, 1), len(ordered) - 2) for place in range(len(ordered)))
    return [sum(ordered[place - 1 : place + 2]) / 3 for place in places]


def resampled(values: Sequence[float], count: int) -> list[float]:
    """As many values as there are to be, on the lines through those that there are."""
    last = len(values) - 1
    places = [index * last / max(count - 1, 1) for index in range(count)]
    below = [min(int(place), max(last - 1, 0)) for place in places]
    return [
        values[index] + (place - index) * (values[min(index + 1, last)] - values[index])
        for place, index in zip(places, below, strict=True)
    ]
