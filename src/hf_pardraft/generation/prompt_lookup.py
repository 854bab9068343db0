"""What the text itself suggests: how it went on where its last tokens, and drafted ones after them, stood before (prompt lookup).

Pure. Such continuations are branches of a tree, from its anchor and from what was drafted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .scheduling.confidence import ClaimedTree

# Of the text's last tokens, those that are looked up if nobody says how many. More would only tell apart what has been written
# twice already: a match goes on as far back as it does.
MATCHING_NGRAM_SIZE = 4
# Tokens of a match that are counted.
LONGEST_MATCH = 32
# Tokens that match after a drafted one at least: it and one before. What came after it alone somewhere says little.
DRAFTED_MATCH = 2


class Match(NamedTuple):
    """The end of a text that stood in it before, and what came next there.

    Attributes:
        length: how many tokens it has.
        tokens: what came next. Where that reaches the end of the text, it goes on with itself.
    """

    length: int
    tokens: list[int]


class NgramIndex:
    """Where each n-gram of a growing text stood last. A token is indexed once, when it is first asked about.

    Args:
        size: of the longest n-gram.
    """

    def __init__(self, size: int = MATCHING_NGRAM_SIZE) -> None:
        self.size = size
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        self.text.extend(tokens)

    @property
    def after(self) -> dict[tuple[int, ...], int]:
        """For each n-gram that has a token after it, the place of that token; of several, the last."""
        text, after = self.text, self._after
        for place in range(self._num_indexed, len(text)):
            for length in range(1, min(self.size, place) + 1):
                after[tuple(text[place - length : place])] = place
        self._num_indexed = len(text)
        return after

    def match(self, num_tokens: int, drafted: Sequence[int] = (), shortest: int = 1) -> Match | None:
        """The longest n-gram that ends the text and stood in it before, there as far back as it agrees, and what came next.

        Args:
            num_tokens: how many of the tokens that came next.
            drafted: tokens that the text is taken to end with.
            shortest: tokens that have to match.
        """
        text, after = self.text, self.after
        end = [*text[-LONGEST_MATCH - 1 :], *drafted] if drafted else text
        for length in range(min(self.size, len(end)), shortest - 1, -1):
            place = after.get(tuple(end[-length:]))
            if place is not None:
                break
        else:
            return None
        while length < min(place, LONGEST_MATCH) and end[-1 - length] == text[place - 1 - length]:
            length += 1
        tokens = text[place : place + num_tokens]
        if len(tokens) < num_tokens:
            tokens += drafted
        period = len(text) + len(drafted) - place
        while len(tokens) < num_tokens:
            tokens.append(tokens[-period])
        return Match(length, tokens[:num_tokens])

    def matches(self, tokens: Sequence[int], parents: Sequence[int], num_tokens: int) -> dict[int, Match]:
        """The matches of the text, and of each drafted prefix after it, by the slot that they come after.

        Args:
            tokens: of a draft's nodes.
            parents: for each node the slot of its parent.
            num_tokens: how deep a branch may come, counted from the anchor.
        """
        anchor = self.match(num_tokens)
        found, depths, after = {} if anchor is None else {0: anchor}, [0], self.after
        for slot, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            depths.append(depths[parent] + 1)
            # Most have no match at all, which their last two tokens tell.
            before = tokens[parent - 1] if parent else self.text[-1]
            if (before, token) in after and depths[slot] < num_tokens:
                path = self._path(slot, tokens, parents)
                found[slot] = self.match(num_tokens - len(path), path, DRAFTED_MATCH)
        return found

    @staticmethod
    def _path(slot: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The tokens from the anchor to a slot of a draft."""
        path = []
        while slot:
            path.append(tokens[slot - 1])
            slot = parents[slot - 1]
        return path[::-1]


class PromptLookup:
    """The matches of a batch, each item's in its own text.

    Args:
        num_tokens: how deep a branch comes, at most.
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

    def finds_any(self) -> bool:
        """Whether the text of an item goes on as it did before."""
        # Whatever is longer and stood in the text ends with a token that did.
        return any(tuple(index.text[-1:]) in index.after for index in self.indices)

    def match(self, room: int) -> Match | None:
        """The match of the only item's text, `room` tokens long at most."""
        (index,) = self.indices
        return index.match(min(self.num_tokens, room))

    def matches(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], room: int
    ) -> list[dict[int, Match]]:
        """Each item's matches, of its text and of its draft, see [`NgramIndex.matches`]; no branch is deeper than `room`."""
        num_tokens = min(self.num_tokens, room)
        drafts = zip(self.indices, tokens, parents, strict=True)
        return [index.matches(*draft, num_tokens) for index, *draft in drafts]


def with_matches(
    tokens: Sequence[int], draft: ClaimedTree, matches: Mapping[int, Match]
) -> tuple[list[int], ClaimedTree]:
    """A draft of one item, and the text's own continuations as branches, as far as they are not in it.

    Args:
        tokens: of the draft's nodes.
        draft: their parents, and what the drafter thinks of them.
        matches: what the text suggests after slots of the draft. An accepted token makes its match one longer.

    Returns:
        Tokens and draft, level by level.
    """
    tokens, parents, claims = [*tokens], [*draft.parents], [*draft.log_probabilities]
    lengths, num_drafted = [0] * len(tokens), len(tokens)
    slot_of = {edge: slot for slot, edge in enumerate(zip(parents, tokens, strict=True), start=1)} if matches else {}
    for slot, match in matches.items():
        for length, token in enumerate(match.tokens, start=match.length):
            parent, slot = slot, slot_of.setdefault((slot, token), len(tokens) + 1)
            if slot > len(tokens):
                tokens.append(token)
                parents.append(parent)
                claims.append(None)
                lengths.append(length)
            elif length > lengths[slot - 1]:
                lengths[slot - 1] = length
    if len(tokens) == num_drafted:
        return tokens, ClaimedTree(parents, claims, lengths)
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    order = sorted(range(len(tokens)), key=depths[1:].__getitem__)
    slots = [0] * len(depths)
    for slot, node in enumerate(order, start=1):
        slots[node + 1] = slot
    tokens, parents, claims, lengths = ([of[node] for node in order] for of in (tokens, parents, claims, lengths))
    return tokens, ClaimedTree([slots[parent] for parent in parents], claims, lengths)
