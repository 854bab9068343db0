"""What is accepted of drafts, position by position. Pure."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul


class AcceptanceRates:
    """Of tokens whose predecessors were all accepted, the share that was accepted too.

    A text's rounds are judged by what is known of earlier texts, and by these rounds themselves the more there are of them. They
    are forgotten slowly, since acceptance varies from round to round, and all at once where a run of rounds says that the text
    has become another (a CUSUM test; Page 1954).

    Args:
        earlier: what was accepted in earlier texts; `None` for that itself, which lasts.
    """

    # Rounds with a draft after which about a third of their weight is left.
    MEMORY = 250
    # Drafts whose weight is left to a text's own rounds once it is found to have become another.
    AFTER_CHANGE = 1.5
    # Rounds of a text that count for as much as all earlier texts. A batch is of several texts, and more like those.
    OF_EARLIER = 5.0
    # Standard deviations by which a round may be off without being news.
    TOLERATED = 0.5
    # Standard deviations beyond those, summed over rounds, that are news: some 14 rounds that are one off, or 5 that are two.
    ALARM = 7.0
    # Tokens of a draft: the standard deviation of those accepted is taken for no less.
    LEAST_DEVIATION = 0.3
    # Rounds after which what was found is weakened, and what is believed is worked out again.
    RENEWED = 8
    # Drafts of which fewer are no belief that could be contradicted.
    KNOWN = 16
    # Share of tokens that is thought to be accepted where nothing is known: a middling drafter's.
    PRIOR = 0.5
    # Tokens whose weight that has.
    PRIOR_WEIGHT = 2.0

    def __init__(self, earlier: "AcceptanceRates | None" = None) -> None:
        self.earlier = earlier
        # By position, how many tokens were accepted, and of how many. Calls in other threads may read and count, too: it is
        # replaced as a whole.
        self.counts: list[tuple[float, float]] = []
        # Outcomes that are not counted among these yet: a round has no time for it.
        self.uncounted: list[tuple[int, int]] = []
        # Of all that was found; and items of a round, at most.
        self.weight, self.num_items = 0.0, 1
        # How many tokens a round is believed to accept, and how far rounds are off, by its depth; worked out now and then.
        self.believed: dict[int, tuple[float, float]] = {}
        self.num_notes = 0
        self.too_many = self.too_few = 0.0
        # How often something has changed; and the rates that were worked out last, of these and the earlier texts' changes.
        self.num_changes = 0
        self.known_rates: tuple[tuple[int, int], list[float]] = (0, 0), []

    def note(self, outcomes: Sequence[tuple[int, int]], num_rounds: int = 1) -> bool:
        """Learn from a round, or from several that are alike; returns whether they say that the text has become another.

        Args:
            outcomes: for each batch item the number of accepted tokens, and of positions of which that says something: one more,
                unless all were accepted or the text ended there. Of several rounds, one after the other.
            num_rounds: how many they are, of as many items each.
        """
        is_another = self.earlier is not None and self._is_another_text(outcomes, num_rounds)
        if is_another:
            self.weaken(self.AFTER_CHANGE / max(self.weight, self.AFTER_CHANGE))
            self.earlier = AcceptanceRates()
        self.num_changes += 1
        times_renewed = self.num_notes // self.RENEWED
        self.num_notes += num_rounds
        times_renewed = self.num_notes // self.RENEWED - times_renewed
        if times_renewed:
            self.weaken((1 - 1 / self.MEMORY) ** (self.RENEWED * times_renewed))
            self.believed = {}
        self.uncounted.extend(outcomes)
        self.weight += len(outcomes)
        self.num_items = max(self.num_items, len(outcomes) // num_rounds)
        return is_another

    def _count(self) -> None:
        """Count what is not counted yet."""
        uncounted, self.uncounted = self.uncounted, []
        before = [*self.counts]
        depth = max([len(before), *(num_tried for _, num_tried in uncounted)])
        # Outcomes that end at each position; from the last one on, those that go beyond it.
        accepted, tried = [0] * (depth + 1), [0] * (depth + 1)
        for num_accepted, num_tried in uncounted:
            accepted[num_accepted] += 1
            tried[num_tried] += 1
        beyond = zip(*(list(accumulate(reversed(ends[1:])))[::-1] for ends in (accepted, tried)), strict=True)
        before += [(0.0, 0.0)] * (depth - len(before))
        self.counts = [(was + now, had + have) for (was, had), (now, have) in zip(before, beyond, strict=True)]

    def weaken(self, keep: float) -> None:
        """Believe what was found with this share of its weight."""
        self._count()
        self.num_changes += 1
        self.counts = [(keep * accepted, keep * tried) for accepted, tried in self.counts]
        self.weight *= keep

    def rates(self, depth: int) -> list[float]:
        """For each of the first `depth` positions, how probably a token is accepted if all before it were."""
        changes = self.num_changes, self.earlier.num_changes if self.earlier else 0
        known, rates = self.known_rates
        if known != changes or len(rates) < depth:
            rates = self._rates(depth)
            self.known_rates = changes, rates
        return rates[:depth]

    def _rates(self, depth: int) -> list[float]:
        rates, rate = [], self.PRIOR
        for position in range(depth):
            weight = self.PRIOR_WEIGHT
            if self.earlier:
                rate, weight = self.earlier.updated(position, rate, weight)
            rate, _ = self.updated(position, rate, min(weight, self.OF_EARLIER * self.num_items))
            rates.append(rate)
        return rates

    def updated(self, position: int, rate: float, weight: float) -> tuple[float, float]:
        """What was believed of a position, with the weight of so many tries, and what was found together; and their weight."""
        if self.uncounted:
            self._count()
        counts = self.counts
        if position >= len(counts):
            return rate, weight
        accepted, tried = counts[position]
        return (accepted + weight * rate) / (tried + weight), tried + weight

    @property
    def num_judged(self) -> float:
        """Drafts that these rates are judged by."""
        return self.weight + (self.earlier.num_judged if self.earlier else 0.0)

    def _is_another_text(self, outcomes: Sequence[tuple[int, int]], num_rounds: int) -> bool:
        """Whether the last rounds were better, or worse, than what is believed can explain."""
        if self.weight < self.KNOWN:
            return False
        depth = max(num_tried for _, num_tried in outcomes)
        mean, deviation = self._belief_of(depth)
        # Standard deviations of a round's mean, as many times as there are rounds.
        found = num_rounds * (sum(num_accepted for num_accepted, _ in outcomes) / len(outcomes) - mean)
        found *= math.sqrt(len(outcomes) / num_rounds) / deviation
        tolerated = num_rounds * self.TOLERATED
        self.too_many = max(0.0, self.too_many + found - tolerated)
        self.too_few = max(0.0, self.too_few - found - tolerated)
        if max(self.too_many, self.too_few) < self.ALARM:
            return False
        self.too_many = self.too_few = 0.0
        self.believed = {}
        return True

    def _belief_of(self, depth: int) -> tuple[float, float]:
        """[`_belief`], as it was worked out last."""
        believed = self.believed
        if depth not in believed:
            believed[depth] = self._belief(depth)
        return believed[depth]

    def _belief(self, depth: int) -> tuple[float, float]:
        """Mean and standard deviation of the tokens that a draft of this depth is believed to have accepted."""
        reached = list(accumulate(self.rates(depth), mul))
        mean = sum(reached)
        square = sum((2 * position + 1) * share for position, share in enumerate(reached))
        return mean, max(math.sqrt(max(square - mean**2, 0.0)), self.LEAST_DEVIATION)

    def expected_tokens(self, depth: int, caught: float = 0.0) -> list[float]:
        """Tokens that a round commits to an item, the bonus token counted, for drafts of no token up to `depth` tokens.

        Args:
            depth: of the longest one.
            caught: share of the tokens that would be rejected, of which the draft holds the right one, too.
        """
        reached = accumulate((rate + caught * (1 - rate) for rate in self.rates(depth)), mul)
        return list(accumulate(reached, initial=1.0))


class TextGain:
    """How many times as fast rounds without a draft are for reading what the text itself suggests, where that is worth it.

    It is known of texts that were written so, and of such as plain `generate` wrote, since both are texts.
    """

    # Tokens whose weight has the belief that they gain nothing, where nothing is known.
    PRIOR_WEIGHT = 16.0
    # Tokens after which about a third of their weight is left.
    MEMORY = 256.0

    def __init__(self) -> None:
        self.tokens = self.rounds = 0.0

    def note(self, tokens: float, rounds: float) -> None:
        """Learn that so many tokens have taken, or would have, as long as so many rounds of one token each."""
        keep = max(1 - tokens / self.MEMORY, 0.0)
        self.tokens, self.rounds = keep * self.tokens + tokens, keep * self.rounds + rounds

    @property
    def factor(self) -> float:
        return (self.tokens + self.PRIOR_WEIGHT) / (self.rounds + self.PRIOR_WEIGHT)


class TreeGain:
    """How many times as many tokens rounds commit with trees of one size as with the chains of likeliest tokens in their place.

    The same rounds, since trees may be what easy stretches of a text are drafted with, and chains what hard ones are. And each
    text's rounds for themselves, the more of them there are: trees hold what a text suggests that repeats itself, and gain far
    more in it than in the next.

    Args:
        earlier: what was gained in earlier texts; `None` for that itself, which lasts.
    """

    # Share of the tokens that chains get wrong for which trees are thought to hold the right one, where nothing is known.
    CAUGHT = 0.2
    # How many times as many tokens trees are thought to have accepted at most, where nothing is known.
    MOST = 1.4
    # Tokens whose weight these beliefs have.
    PRIOR_WEIGHT = 16.0
    # Tokens whose weight all earlier texts have in one.
    OF_EARLIER = 8.0
    # Tokens after which about a third of their weight is left, over all texts.
    MEMORY = 1000.0
    # The same within one text.
    MEMORY_OF_TEXT = 100.0
    # Tokens of a text, by chains, from which it may be known to be another.
    KNOWN = 48.0
    # How many times as large or small its gain is then, at least.
    OTHER_GAIN = 1.5
    # Share of the weight of earlier texts that is left then.
    AFTER_CHANGE = 0.1

    def __init__(self, earlier: "TreeGain | None" = None) -> None:
        self.earlier = earlier
        self.of_tree = self.of_chain = 0.0

    def note(self, of_tree: int, of_chain: int) -> None:
        """Learn that rounds have committed so many tokens, and would have; the bonus tokens counted."""
        self._weaken(1 - of_chain / (of_chain + (self.MEMORY_OF_TEXT if self.earlier else self.MEMORY)))
        self.of_tree, self.of_chain = self.of_tree + of_tree, self.of_chain + of_chain
        if self.earlier:
            self.earlier.note(of_tree, of_chain)
            if self._is_another_text():
                self.earlier._weaken(self.AFTER_CHANGE)

    def _weaken(self, keep: float) -> None:
        """Believe what was found with this share of its weight."""
        self.of_tree, self.of_chain = keep * self.of_tree, keep * self.of_chain

    def _is_another_text(self) -> bool:
        """Whether trees gain clearly more in this text, or less, than in the earlier ones."""
        if self.of_chain < self.KNOWN:
            return False
        ratio = (self.of_tree / self.of_chain) / (self.earlier.of_tree / self.earlier.of_chain)
        return max(ratio, 1 / ratio) > self.OTHER_GAIN

    def factor(self, of_tree: float, of_chain: float, at_least: float = 0.0) -> float:
        """How many times as many tokens are committed with trees as with chains.

        Args:
            of_tree, of_chain: the tokens of a round that are believed to be, where nothing is known of trees.
            at_least: what smaller trees gained in all texts, which is believed of these until they are tried.
        """
        if self.earlier:
            believed, weight = self.earlier.factor(of_tree, of_chain, at_least), self.OF_EARLIER
        else:
            believed, weight = (1 + min(of_tree - 1, self.MOST * (of_chain - 1))) / of_chain, self.PRIOR_WEIGHT
            believed = max(believed, at_least)
        return (self.of_tree + weight * believed) / (self.of_chain + weight)
