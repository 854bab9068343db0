"""What becomes of drafted tokens: accepted, right but refused, wrong. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Proposal(Protocol):
    """What one round proposed to one batch item (`item`); see `Proposal` of the decode statistics, which has all of this."""

    item: int
    num_before: int
    tokens: Sequence[int]
    depths: Sequence[int]
    num_accepted: int
    num_committed: int


@dataclass(frozen=True)
class Utilisation:
    """How many of the slots that rounds filled were of use; the sum of two of these is that of all their rounds.

    A slot is a drafted token, or the bonus token that a round adds after the accepted ones (arXiv 2606.11552, table 1). Slots
    beyond the end of the text are left out: nobody knows what the target would have written there.

    Attributes:
        slots: all of them.
        accepted: those that became text, bonus tokens counted.
        correct: those whose token is the text's at its place, accepted or not; the bonus token always is.
    """

    slots: int = 0
    accepted: int = 0
    correct: int = 0

    def __add__(self, other: "Utilisation") -> "Utilisation":
        return Utilisation(self.slots + other.slots, self.accepted + other.accepted, self.correct + other.correct)

    @property
    def accept_share(self) -> float | None:
        """Accepted tokens of all slots; `None` without slots."""
        return self.accepted / self.slots if self.slots else None

    @property
    def correct_share(self) -> float | None:
        """Correct tokens of all slots."""
        return self.correct / self.slots if self.slots else None

    @property
    def waste_share(self) -> float | None:
        """Correct tokens that were thrown away, of all correct ones: something before them was wrong."""
        return (self.correct - self.accepted) / self.correct if self.correct else None


def utilisation(proposals: Sequence[Proposal], texts: Sequence[Sequence[int]]) -> Utilisation:
    """The accept / correct / waste split of rounds.

    In a tree every node has a slot, and is correct if its token is the text's at its depth: of two such nodes at most one is
    accepted, and the other is wasted.

    Args:
        proposals: of the rounds.
        texts: the new tokens of each batch item, which are the target's own choices.
    """
    total = Utilisation()
    for proposal in proposals:
        text = texts[proposal.item]
        known, correct = judged(proposal, text)
        # The text may have ended inside the accepted tokens, and then there is no bonus token.
        committed = min(proposal.num_committed, len(text) - proposal.num_before)
        bonus = committed - min(proposal.num_accepted, committed)
        total += Utilisation(known + bonus, committed, correct + bonus)
    return total


def judged(proposal: Proposal, text: Sequence[int]) -> tuple[int, int]:
    """How many of the proposed tokens stand where the text is known, and how many of them are its tokens there."""
    places = [proposal.num_before + depth - 1 for depth in proposal.depths]
    pairs = [(token, text[place]) for token, place in zip(proposal.tokens, places, strict=True) if place < len(text)]
    return len(pairs), sum(token == truth for token, truth in pairs)


def acceptance_by_position(proposals: Sequence[Proposal]) -> list[float]:
    """For each draft position, the share of rounds that accepted it (and so all before it) among those that proposed it."""
    deepest = [max(proposal.depths, default=0) for proposal in proposals]
    rates = []
    for position in range(1, max(deepest, default=0) + 1):
        accepted = [
            p.num_accepted >= position for p, depth in zip(proposals, deepest, strict=True) if depth >= position
        ]
        rates.append(sum(accepted) / len(accepted))
    return rates


def correct_by_position(proposals: Sequence[Proposal], texts: Sequence[Sequence[int]]) -> list[float]:
    """For each draft position, the share of rounds that proposed the text's token there, whatever became of it.

    Rounds that proposed nothing at a position, or beyond the end of the text, do not count for it.

    Args:
        proposals: of the rounds.
        texts: for each of them, the new tokens of its batch item.
    """
    hits: dict[int, list[bool]] = {}
    for proposal, text in zip(proposals, texts, strict=True):
        for depth in sorted(set(proposal.depths)):
            place = proposal.num_before + depth - 1
            if place < len(text):
                level = {t for t, d in zip(proposal.tokens, proposal.depths, strict=True) if d == depth}
                hits.setdefault(depth, []).append(text[place] in level)
    return [sum(hits[depth]) / len(hits[depth]) for depth in sorted(hits)]
