"""What drafts are worth to a batch whose items they serve unevenly. Pure."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul
from statistics import pvariance


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
        # The exponents of a call of which nothing is known yet, from the slowest item on.
        self.before = [(part / (1 - part)) ** -self.SCALE for part in below]
        # Of this call, by item: accepted tokens, those that were judged, and how many of these an average item accepts: what is
        # further back in a draft is mostly surer.
        self.found: dict[int, tuple[int, int, float]] = {}

    def begin(self) -> None:
        """Another call begins, with other items: as uneven as those of this one, the more the more was drafted for them."""
        counts, last = self._judged, self.exponents
        self.found = {}
        if len(counts) < 2:
            return
        weights = [(judged / (judged + self.PRIOR_WEIGHT)) ** 2 for _, judged, _ in counts]
        weight, before = sum(weights) / len(weights), resampled(self.before, len(last))
        # Less uneven than they seemed, by what luck made of it.
        logs = [math.log(each) for each in last]
        seemed, found = pvariance(logs), self._variance_of(counts, weights)
        share = math.sqrt(min(max(found, 0.0) / seemed, 1.0)) if seemed else 0.0
        self.before = [
            weight * math.exp(share * log) + (1 - weight) * each for log, each in zip(logs, before, strict=True)
        ]

    def _variance_of(self, counts: Sequence[tuple[int, int, float]], weights: Sequence[float]) -> float:
        """Of the exponents' logarithms of a call's items: how differently they fare, less what luck makes of like items.

        With that, a few drafts in each of many calls would make them seem ever more uneven.
        """
        of_average = [self._within_bounds(expected / judged) for _, judged, expected in counts]
        better = [accepted / judged - rate for (accepted, judged, _), rate in zip(counts, of_average, strict=True)]
        mean = sum(map(mul, weights, better)) / sum(weights)
        free = len(counts) / (len(counts) - 1)
        found = luck = slopes = 0.0
        for weight, rate, each, (_, judged, _) in zip(weights, of_average, better, counts, strict=True):
            found += weight * free * (each - mean) ** 2
            luck += weight * rate * (1 - rate) / judged
            slopes += weight * (rate * math.log(rate)) ** 2
        return (found - luck) / slopes

    def note(self, items: Iterable[int], outcomes: Sequence[tuple[int, int]], rates: Sequence[float]) -> None:
        """Learn what became of items' drafts, of a round or several; see [`AcceptanceRates.note`].

        Args:
            items: that the outcomes are about.
            outcomes: of their drafts.
            rates: for each position of the longest draft, how probably items accept a token on average if all before it were.
        """
        found = dict(self.found)
        of_average = [*accumulate(rates, initial=0.0)]
        for item, (accepted, judged) in zip(items, outcomes, strict=True):
            accepted_before, judged_before, expected = found.get(item, (0, 0, 0.0))
            found[item] = accepted_before + accepted, judged_before + judged, expected + of_average[judged]
        self.found = found

    @property
    def exponents(self) -> list[float]:
        """The items' exponents, from the slowest item on, roughly; 1 if all items fare alike."""
        counts = self._judged
        if not counts:
            return self.before
        logs = [self._log(expected / judged) for _, judged, expected in counts]
        own = [self._log(accepted / judged) / log for (accepted, judged, _), log in zip(counts, logs, strict=True)]
        slowest_first = sorted(range(len(counts)), key=own.__getitem__, reverse=True)
        exponents = []
        for item, before in zip(slowest_first, resampled(self.before, len(counts)), strict=True):
            (accepted, judged, _), log = counts[item], logs[item]
            rate = (accepted + self.PRIOR_WEIGHT * math.exp(before * log)) / (judged + self.PRIOR_WEIGHT)
            exponents.append(self._log(rate) / log)
        return exponents

    @property
    def _judged(self) -> list[tuple[int, int, float]]:
        """What was found of each item of which anything was judged; calls in other threads may begin, or learn, meanwhile."""
        return [each for each in self.found.values() if each[1]]

    def _within_bounds(self, rate: float) -> float:
        return min(max(rate, self.LEAST_RATE), 1 - self.LEAST_RATE)

    def _log(self, rate: float) -> float:
        """Its logarithm, within bounds."""
        return math.log(self._within_bounds(rate))

    def rates_of_items(self, rates: Sequence[float]) -> list[list[float]]:
        """For each item, how probably it accepts each token of a chain if all before it were.

        Args:
            rates: the same of an average item.
        """
        return [[*map(pow, rates, repeat(exponent))] for exponent in self.exponents]


def shares_of(rates_of_items: Sequence[Sequence[float]]) -> list[list[float]]:
    """For chains of each depth up to the number of rates, the tokens that each item accepts, compared with the mean of all.

    Args:
        rates_of_items: see [`Spread.rates_of_items`].
    """
    of_items = [[*accumulate(accumulate(rates, mul))] for rates in rates_of_items]
    of_depths = [(accepted, sum(accepted) / len(accepted)) for accepted in zip(*of_items, strict=True)]
    return [[each / mean if mean else 1.0 for each in accepted] for accepted, mean in of_depths]


def shares_with_more(shares: Sequence[float], mean: float, more: float) -> list[float]:
    """As [`shares_of`], of trees, which serve items more evenly than chains do: each accepts about as many tokens more.

    What was measured says so: of eight drafters' texts the slowest quarter accepts 0.43 to 0.71 tokens more with trees of 16
    nodes, the fastest 0.09 to 0.72, and of chains 1.4 to 3.9 and 2.9 to 7.5.

    Args:
        shares: of chains of the same depth.
        mean: tokens of these that items accept on average.
        more: that they accept of trees besides.
    """
    if mean + more <= 0:
        return [*shares]
    return [max(share * mean + more, 0.0) / (mean + more) for share in shares]


def worth_to_a_batch(tokens: float, added: Sequence[float], shares: Sequence[float]) -> float:
    """What a round that commits so many tokens to an item is worth to the batch.

    An item leaves the batch when its text is over, so the last ones have the part of a round's time that few items take to
    themselves.

    Args:
        tokens: in the mean of the items.
        added: of the time of a round of all items, the part that one item takes, that a second one adds, and so on.
        shares: the items', see [`shares_of`].
    """
    rounds = sorted((1 / (1 + share * (tokens - 1)) for share in shares), reverse=True)
    return 1 / sum(map(mul, rounds, added))


def resampled(values: Sequence[float], count: int) -> list[float]:
    """As many values as there are to be, on the lines through those that there are."""
    last = len(values) - 1
    places = [index * last / max(count - 1, 1) for index in range(count)]
    below = [min(int(place), max(last - 1, 0)) for place in places]
    return [
        values[index] + (place - index) * (values[min(index + 1, last)] - values[index])
        for place, index in zip(places, below, strict=True)
    ]
