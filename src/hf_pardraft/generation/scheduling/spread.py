"""What drafts are worth to a batch whose items they serve unevenly. Pure."""

import math
from collections.abc import Sequence

# Items of which two may well be alike.
MANY = 12


class Spread:
    """How unevenly drafts of one depth serve the items of a batch: what each item gets a round, compared with the mean of all.

    Args:
        num_items: of the batch, roughly.
    """

    # Scale of the logistic law of mean 1 that the items' shares are believed to have at first.
    SCALE = 0.18
    # The least share that is believed.
    LEAST = 0.1
    # Rounds of each item whose weight that has.
    PRIOR_WEIGHT = 8.0

    def __init__(self, num_items: int) -> None:
        below = [(item + 0.5) / num_items for item in range(num_items)]
        self.before = [max(1 + self.SCALE * math.log(part / (1 - part)), self.LEAST) for part in below]
        self.had_found = False
        # Of this call, by item: accepted tokens, and rounds.
        self.found: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Another call begins, with other items."""
        self.had_found = self.is_known
        self.before, self.found = self.shares, {}

    def note(self, counts: dict[int, int]) -> None:
        """Learn how many tokens of a round's drafts each item accepted."""
        found = dict(self.found)
        for item, count in counts.items():
            accepted, num_rounds = found.get(item, (0, 0))
            found[item] = accepted + count, num_rounds + 1
        self.found = found

    @property
    def is_known(self) -> bool:
        """Whether any round was noted."""
        return self.had_found or bool(self.found)

    @property
    def shares(self) -> list[float]:
        """The items' shares, the smallest first; 1 if all items fare alike."""
        found = sorted((accepted / num_rounds, num_rounds) for accepted, num_rounds in self.found.values())
        mean = sum(accepted for accepted, _ in found) / max(len(found), 1)
        if not mean:
            return self.before
        accepted = smoothed([accepted for accepted, _ in found])
        return [
            (num_rounds * own / mean + self.PRIOR_WEIGHT * share) / (num_rounds + self.PRIOR_WEIGHT)
            for own, (_, num_rounds), share in zip(accepted, found, resampled(self.before, len(found)), strict=True)
        ]

    def worth(self, tokens: float, fixed: float) -> float:
        """What a round that commits so many tokens to an item is worth to the batch.

        An item leaves the batch when its text is over. A part of a round's time is the same whoever is left, and so lasts as long
        as the slowest item; the other part falls with each item that leaves.

        Args:
            tokens: in the mean of the items.
            fixed: the first part, as a share of the time of a round of all items.
        """
        rounds = [1 / (1 + share * (tokens - 1)) for share in self.shares]
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
