"""What a drafter's own probabilities, and matches in the text, say of a draft, after what became of others. Pure."""

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul


@dataclass(frozen=True)
class ClaimedTree:
    """What speaks for the nodes of one item's draft.

    Attributes:
        parents: for each node the slot of its parent, smaller than its own (the anchor's is 0, node i's is i + 1).
        log_probabilities: for each node that of its token at its position, after the drafter; `None` if it proposed no such.
        matches: for each node the length of the text's match of which it is the continuation (see `prompt_lookup.py`), 0 of
            others; empty if nothing was looked up.
    """

    parents: Sequence[int]
    log_probabilities: Sequence[float | None]
    matches: Sequence[int] = ()

    @classmethod
    def after_match(cls, length: int, count: int) -> "ClaimedTree":
        """The chain of so many tokens that come after a match of this length."""
        return cls(range(count), [None] * count, range(length, length + count))

    def nodes(self, kept: Sequence[int], parents: Sequence[int]) -> "ClaimedTree":
        """Some nodes, with their parents' slots among them."""
        claims, matches = ([of[node] for node in kept] if of else () for of in (self.log_probabilities, self.matches))
        return ClaimedTree(parents, claims, matches)

    def num_undrafted(self, path: Sequence[int]) -> int:
        """How many nodes, of an accepted path's slots (the anchor's first), the drafter did not propose."""
        return sum(self.log_probabilities[slot - 1] is None for slot in path[1:])


class Calibration:
    """The share of proposed tokens that were accepted, by how probable the drafter found them, and by the length of a match.

    Only tokens count whose predecessors were all accepted. A drafter's first tokens are counted apart from later ones, which a
    parallel drafter has to guess without knowing those before. The continuation of a match in the text knows them: with each
    token that is accepted the match is one longer.
    """

    # Log-probabilities between the bins in which a drafter's claims are counted: those of log-odds of -4 to 4.
    EDGES = tuple(-math.log1p(math.exp(-odds)) for odds in range(-4, 5))
    # Rounds after which about a third of their weight is left.
    MEMORY = 500
    # Rounds after which what was counted is weakened.
    RENEWED = 8
    # Tokens whose weight a claim has itself, or the length of a match.
    PRIOR_WEIGHT = 2.0
    # Tokens of a match; longer ones count like one of this length.
    LONGEST = 16
    # Tokens: the continuation of a match of n is at first thought to be right with n / (n + this).
    MATCH_PRIOR = 2.0

    def __init__(self) -> None:
        self.accepted = [[0.0] * (len(self.EDGES) + 1) for _ in range(2)]
        self.tried = [[0.0] * (len(self.EDGES) + 1) for _ in range(2)]
        self.accepted_matches, self.tried_matches = ([0.0] * (self.LONGEST + 1) for _ in range(2))
        self.num_notes = 0

    def note(self, drafts: Sequence[tuple[ClaimedTree, Sequence[int], bool]]) -> None:
        """Learn from a round.

        Args:
            drafts: for each item its draft, the slots of its accepted path (the anchor's first), and whether the target refused
                all that comes after that path, which else is not known.
        """
        self.num_notes += 1
        if self.num_notes % self.RENEWED == 0:
            keep = (1 - 1 / self.MEMORY) ** self.RENEWED
            for counts in (*self.accepted, *self.tried, self.accepted_matches, self.tried_matches):
                counts[:] = [keep * count for count in counts]
        for draft, path, is_whole in drafts:
            judged, accepted = set(path if is_whole else path[:-1]), set(path)
            for slot, (parent, claim, match) in enumerate(self._nodes(draft), start=1):
                if parent not in judged:
                    continue
                if claim is not None:
                    is_later, at = int(parent > 0), self._bin(claim)
                    self.tried[is_later][at] += 1
                    self.accepted[is_later][at] += slot in accepted
                if match:
                    at = min(match, self.LONGEST)
                    self.tried_matches[at] += 1
                    self.accepted_matches[at] += slot in accepted

    def probabilities(self, draft: ClaimedTree) -> list[float]:
        """For each node of a draft how probably it will be accepted, and so all nodes before it."""
        found: list[float] = []
        for parent, claim, match in self._nodes(draft):
            probability = 0.0 if claim is None else self.probability(parent > 0, claim)
            if match:
                # Whoever of the two proposes it and is right more often.
                probability = max(probability, self.match_probability(match))
            found.append(probability * found[parent - 1] if parent else probability)
        return found

    @staticmethod
    def _nodes(draft: ClaimedTree) -> Iterable[tuple[int, float | None, int]]:
        """Parent, claim and match of each node."""
        return zip(draft.parents, draft.log_probabilities, draft.matches or repeat(0, len(draft.parents)), strict=True)

    def probabilities_after_match(self, match: int, count: int) -> list[float]:
        """How probably each of `count` tokens that come after a match will be accepted, and so all of them before it."""
        return list(accumulate(map(self.match_probability, range(match, match + count)), mul))

    def probability(self, is_later: bool, claim: float) -> float:
        """How probably a token of this log-probability is accepted if all before it are."""
        at = self._bin(claim)
        own = math.exp(min(claim, 0.0)) if not math.isnan(claim) else 0.0
        return (self.accepted[is_later][at] + self.PRIOR_WEIGHT * own) / (self.tried[is_later][at] + self.PRIOR_WEIGHT)

    def match_probability(self, match: int) -> float:
        """How probably the continuation of a match of so many tokens is accepted if all before it is."""
        at, prior = min(match, self.LONGEST), match / (match + self.MATCH_PRIOR)
        tried = self.tried_matches[at] + self.PRIOR_WEIGHT
        return (self.accepted_matches[at] + self.PRIOR_WEIGHT * prior) / tried

    def _bin(self, claim: float) -> int:
        return 0 if math.isnan(claim) else bisect(self.EDGES, claim)


def best_nodes(draft: ClaimedTree, probabilities: Sequence[float], count: int) -> tuple[list[int], list[int]]:
    """The `count` nodes that are most probably accepted, in their order, and their parents' slots among them.

    A node is never more probable than its parent, so parents are among them.
    """
    ranked = sorted(range(len(probabilities)), key=lambda node: (-probabilities[node], node))
    kept = sorted(ranked[:count])
    slots = {0: 0} | {node + 1: slot for slot, node in enumerate(kept, start=1)}
    return kept, [slots[draft.parents[node]] for node in kept]
