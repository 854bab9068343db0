"""What the text itself suggests: how it went on where its last tokens stood before (prompt lookup), as a branch. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .scheduling.confidence import ClaimedTree

# Of the text's last tokens, those that are looked up if nobody says how many. More would only tell apart what has been written
# twice already: a match goes on as far back as it does.
MATCHING_NGRAM_SIZE = 4
# Tokens of a match that are counted.
LONGEST_MATCH = 32


class Match(NamedTuple):
    """The end of a text that stood in it before, and what came next there.

    Attributes:
        length: how many tokens it has.
        tokens: what came next. Where that reaches the end of the text, it goes on with itself.
    """

    length: int
    tokens: list[int]


class NgramIndex:
    """Where each n-gram of a growing text stood last. A token is indexed once, when it comes.

    Args:
        size: of the longest n-gram.
    """

    def __init__(self, size: int = MATCHING_NGRAM_SIZE) -> None:
        self.size = size
        self.text: list[int] = []
        # For each n-gram that has a token after it, the place of that token; of several, the last.
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            place = len(self.text)
            for length in range(1, min(self.size, place) + 1):
                self.after[tuple(self.text[place - length :])] = place
            self.text.append(token)

    def match(self, num_tokens: int) -> Match | None:
        """The longest n-gram that ends the text and stood in it before, there as far back as it agrees, and what came next.

        Args:
            num_tokens: how many of the tokens that came next.
        """
        text = self.text
        for length in range(min(self.size, len(text)), 0, -1):
            place = self.after.get(tuple(text[-length:]))
            if place is not None:
                break
        else:
            return None
        while length < min(place, LONGEST_MATCH) and text[-1 - length] == text[place - 1 - length]:
            length += 1
        period = len(text) - place
        tokens = text[place : place + num_tokens]
        while len(tokens) < num_tokens:
            tokens.append(tokens[-period])
        return Match(length, tokens)


class PromptLookup:
    """The matches of a batch, each item's in its own text.

    Args:
        num_tokens: of a branch, at most.
        size: see [`NgramIndex`].
    """

    def __init__(self, num_tokens: int, size: int = MATCHING_NGRAM_SIZE) -> None:
        self.num_tokens, self.size = num_tokens, size
        self.indices: list[NgramIndex] = []

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """The prompts, without padding."""
        self.indices = [NgramIndex(self.size) for _ in texts]
        self.extend(texts)

    def extend(self, new_tokens: Sequence[Sequence[int]]) -> None:
        """What each item got."""
        for index, tokens in zip(self.indices, new_tokens, strict=True):
            index.extend(tokens)

    def select_items(self, kept: Sequence[int]) -> None:
        """Go on with only some items."""
        self.indices = [self.indices[item] for item in kept]

    def matches(self, room: int) -> list[Match | None]:
        """Each item's match, `room` tokens long at most; an empty list if no item has one."""
        num_tokens = min(self.num_tokens, room)
        found = [index.match(num_tokens) for index in self.indices] if num_tokens > 0 else []
        return found if any(found) else []


def with_match(tokens: Sequence[int], draft: ClaimedTree, match: Match | None) -> tuple[list[int], ClaimedTree]:
    """A draft of one item, and the text's own continuation as a branch from the anchor, as far as that is not in it.

    Args:
        tokens: of the draft's nodes.
        draft: their parents, and what the drafter thinks of them.
        match: what the text suggests. An accepted token makes its match one longer.

    Returns:
        Tokens and draft, level by level.
    """
    tokens, parents, claims = [*tokens], [*draft.parents], [*draft.log_probabilities]
    matches, slot = [0] * len(tokens), 0
    slot_of = {edge: node + 1 for node, edge in enumerate(zip(parents, tokens, strict=True))}
    for length, token in enumerate(match.tokens if match else (), start=match.length if match else 0):
        parent, slot = slot, slot_of.get((slot, token), len(tokens) + 1)
        if slot > len(tokens):
            tokens.append(token)
            parents.append(parent)
            claims.append(None)
            matches.append(0)
        matches[slot - 1] = length
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    order = sorted(range(len(tokens)), key=lambda node: depths[node + 1])
    slots = {0: 0} | {node + 1: slot for slot, node in enumerate(order, start=1)}
    draft = replace(
        draft,
        parents=[slots[parents[node]] for node in order],
        log_probabilities=[claims[node] for node in order],
        matches=[matches[node] for node in order],
    )
    return [tokens[node] for node in order], draft
