"""Looking n-grams up: all contexts, candidates and lengths of a tree's level in one search, without waiting for the device;
and from counts to probabilities."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from .pairs import NgramTable, slots_before
from .store import NgramInfo

# Smoothing: from relative counts after contexts of several lengths to one probability

# From the share of the candidates in all text `(..., 1, candidates)` (None if it was not asked for), the counts of the
# contexts `(lengths, ..., contexts, 1)` and the shares after them `(lengths, ..., contexts, candidates)`, lengths ascending
# from 1, and a weight: `(..., contexts, candidates)`. A context that was never seen has a count below 1, and shares of 0 or,
# after several tokens, none (nan).
Smooth = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Smoothing(NamedTuple):
    """A way to smooth.

    Attributes:
        smooth: does it.
        default_weight: its parameter, by default that of the paper it is from.
        reads_unigrams: whether the candidates' share in all text matters.
    """

    smooth: Smooth
    default_weight: float
    reads_unigrams: bool


def longest_match(unigrams: None, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """The share after the longest context that the candidate was ever seen after, as in DART's code; else 0.

    A context has at least one token: how frequent a token is as such does not count. The weight is unused.
    """
    if not len(shares):
        return shares.new_zeros(shares.shape[1:])
    probability, *longer = shares.unbind()
    for share in longer:
        probability = torch.where(share > 0, share, probability)
    return probability


def stupid_backoff(unigrams: torch.Tensor, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """The same, times `weight` for each token by which the context had to be shortened, down to none (Brants et al., 2007)."""
    probability = _for_every_context(unigrams, shares)
    for share in shares.unbind():
        probability = torch.where(share > 0, share, weight * probability)
    return probability


def interpolated(unigrams: torch.Tensor, seen: torch.Tensor, shares: torch.Tensor, weight: float) -> torch.Tensor:
    """`weight` times the share after a context, and the rest from the context without its first token (Jelinek, Mercer)."""
    probability = _for_every_context(unigrams, shares)
    for context_seen, share in zip((seen >= 1).unbind(), shares.unbind(), strict=True):
        probability = torch.where(context_seen, weight * share + (1 - weight) * probability, probability)
    return probability


def _for_every_context(unigrams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return unigrams.expand(torch.broadcast_shapes(unigrams.shape, shares.shape[1:]))


SMOOTHINGS = {
    "longest_match": Smoothing(longest_match, 1.0, reads_unigrams=False),
    "stupid_backoff": Smoothing(stupid_backoff, 0.4, reads_unigrams=True),
    "interpolated": Smoothing(interpolated, 0.7, reads_unigrams=True),
}


def checked_smoothing(name: str) -> str:
    """`name`, or a `ValueError` unless it is one of [`SMOOTHINGS`]."""
    if name not in SMOOTHINGS:
        raise ValueError(f"smoothing must be one of {tuple(SMOOTHINGS)}, got {name!r}")
    return name


# Searching


class Contexts(NamedTuple):
    """What was found about contexts, for every length of their ends from 1 on.

    Attributes:
        bases: `(lengths, ..., contexts, 1)`, what the searched keys of all that goes on from them have in common.
        seen: `(lengths, ..., contexts, 1)` float32, how often they were counted; below 1 if never.
    """

    bases: torch.Tensor
    seen: torch.Tensor


class Found(NamedTuple):
    """What a search brought, a key each: the pair that it led to, whether to its second n-gram, and the count (0: nothing)."""

    pairs: torch.LongTensor
    is_second: torch.BoolTensor
    counts: torch.Tensor

    def at(self, places: torch.LongTensor) -> "Found":
        """Some of it, by places in the flattened tables."""
        return Found(self.pairs.take(places), self.is_second.take(places), self.counts.take(places))


class Lookup:
    """The tensors of a store as a search needs them; see [`NgramTable`] for the layout.

    Args:
        table: its tensors, on the device to search on.
        info: what the store says about itself.
    """

    def __init__(self, table: NgramTable, info: NgramInfo) -> None:
        self.vocab_size, self.order = info.vocab_size, info.order
        self.device = table.heads.device
        self.heads, self.rests = table.heads, table.rests
        # Every search ends on a pair: the one in front, which stands for nothing, is not searched.
        self.searched = table.heads[1:]
        self.code_bits, self.mask = table.code_bits, (1 << table.code_bits) - 1
        self.rest_shift, self.rest_end = table.code_bits - table.rest_bits, 1 << table.rest_bits
        # A damaged word may hold any code.
        num_missing = self.mask + 2 - len(table.values)
        self.values = torch.nn.functional.pad(table.values.long(), (0, num_missing))
        self.float_values = self.values.float()
        # A token beyond the vocabulary counts as one that was never seen.
        self.unigrams = torch.nn.functional.pad(table.unigrams.long(), (0, 1))
        # Something to divide by even where that is 0.
        self.seen_unigrams = self.unigrams.clamp(min=0.5)
        self.unigram_shares = self.unigrams / max(1, info.num_tokens)
        # Keys are `slot * (vocab_size + 1) + token`. All bases are less by what the slots of tokens take, and all tokens' keys
        # are more, so that a base of 0 is that of the n-gram in front, which nothing goes on from.
        self.stride = (info.vocab_size + 1) << table.code_bits
        self.offset = slots_before(info.vocab_size) * self.stride

    def keys_of(self, tokens: torch.LongTensor) -> torch.Tensor:
        """A token's share of a searched key."""
        # The key's word has some code, and so comes before this.
        return ((tokens << self.code_bits) + (self.offset + self.mask)).to(self.heads.dtype)

    def find(self, keys: torch.Tensor, values: torch.Tensor) -> Found:
        """The n-grams with the given keys, sums of a base and a token's key; their counts are entries of `values`."""
        pairs = torch.searchsorted(self.searched, keys, right=True)
        distances = keys - self.heads.take(pairs)
        # Where the key is that of the pair's first n-gram, what lies between is the code, and else what the rest is near to.
        is_second = distances > self.mask
        seconds = ((distances >> self.rest_shift) - self.rests.take(pairs)).clamp_(0, self.rest_end)
        return Found(pairs, is_second, values.take(torch.where(is_second, seconds, distances).long()))

    def bases_of(self, found: Found) -> torch.Tensor:
        """What the keys of all that goes on from found n-grams have in common."""
        slots = torch.add(found.is_second, found.pairs, alpha=2)
        return slots.mul_(self.stride).masked_fill_(found.counts == 0, 0).to(self.heads.dtype)

    def unigram_bases(self, tokens: torch.LongTensor) -> torch.Tensor:
        return (tokens * self.stride - self.offset).to(self.heads.dtype)

    def contexts_of(self, tokens: torch.LongTensor) -> Contexts:
        """Contexts of the given tokens `(..., contexts, length)`, of which the last `order - 1` count."""
        tokens = tokens[..., max(0, tokens.shape[-1] - self.order + 1) :].clamp(max=self.vocab_size)
        bases, seen = self.unigram_bases(tokens)[None], self.seen_unigrams.take(tokens)[None]
        nothing = (0, *tokens.shape[:-1], 1)
        keys, contexts = self.keys_of(tokens), Contexts(bases.new_empty(nothing), seen.new_empty(nothing))
        for place in range(tokens.shape[-1]):
            shorter = contexts.bases[: self.order - 2]
            found = self.find(shorter + keys[..., place, None], self.float_values) if len(shorter) else None
            contexts = self.grown(bases[..., place, None], seen[..., place, None], found)
        return contexts

    def grown(self, bases: torch.Tensor, seen: torch.Tensor, found: Found | None) -> Contexts:
        """Contexts that end in tokens with the given bases and counts, and before them in what led to `found`."""
        if found is None:
            return Contexts(bases, seen)
        return Contexts(torch.cat([bases, self.bases_of(found)]), torch.cat([seen, found.counts]))

    def probabilities(
        self, contexts: Contexts, found: Found, unigrams: torch.Tensor | None, smoothing: Smoothing, weight: float
    ) -> torch.Tensor:
        """How probable what was found is after its contexts: `(..., contexts, candidates)`.

        Args:
            contexts, found: n-grams of all lengths, `(lengths, ..., contexts, candidates)`.
            unigrams: `(..., 1, candidates)`, the share of the candidates in all text, for a smoothing that reads it.
            smoothing, weight: how counts become probabilities.
        """
        # After a context of several tokens that was never seen this is no number; smoothing goes by what is more than 0.
        shares = found.counts / contexts.seen
        return smoothing.smooth(unigrams, contexts.seen, shares, weight)

    def shares_of(self, tokens: torch.LongTensor, smoothing: Smoothing) -> torch.Tensor | None:
        """The share of tokens in all text, for a smoothing that reads it."""
        return self.unigram_shares.take(tokens) if smoothing.reads_unigrams else None

    def count(self, ngrams: torch.LongTensor) -> torch.LongTensor:
        """How often n-grams `(..., n)` were seen: `(...)`."""
        tokens = ngrams.clamp(max=self.vocab_size)
        first, *others = tokens.unbind(dim=-1)
        counts, bases = self.unigrams.take(first), self.unigram_bases(first)
        for token in others:
            found = self.find(bases + self.keys_of(token), self.values)
            counts, bases = found.counts, self.bases_of(found)
        return counts


class NgramWalk:
    """A [`Walk`]: what a level finds are the contexts of the next one, so every n-gram is searched once.

    Args:
        lookup: of the model.
        smoothing, weight: how its counts become probabilities.
        context: `(batch, context)`, the anchor last. Answers are on its device, whichever the look-up's is.
        candidates: `(batch, depth, k)`, of all levels.
    """

    def __init__(
        self,
        lookup: Lookup,
        smoothing: Smoothing,
        weight: float,
        context: torch.LongTensor,
        candidates: torch.LongTensor,
    ) -> None:
        self.lookup, self.smoothing, self.weight = lookup, smoothing, weight
        self.device = context.device
        self.contexts = lookup.contexts_of(context[:, None].to(lookup.device))
        # `(batch, depth, 1, k)`, and a dimension in front for the lengths of n-grams.
        tokens = candidates.to(lookup.device).clamp(max=lookup.vocab_size)[:, :, None]
        self.keys = lookup.keys_of(tokens).unbind(dim=1)
        self.bases = lookup.unigram_bases(tokens)[None].movedim(4, 3).unbind(dim=2)
        self.seen = lookup.seen_unigrams.take(tokens)[None].movedim(4, 3).unbind(dim=2)
        shares = lookup.shares_of(tokens, smoothing)
        self.unigrams = [None] * len(self.keys) if shares is None else shares.unbind(dim=1)
        self.level = 0
        self.found: Found | None = None

    def probabilities(self) -> torch.Tensor:
        unigrams = self.unigrams[self.level]
        found = self.searched()
        return self.lookup.probabilities(self.contexts, found, unigrams, self.smoothing, self.weight).to(self.device)

    def searched(self) -> Found:
        """All lengths' n-grams of this level's prefixes and candidates: `(lengths, batch, prefixes, k)`."""
        if self.found is None:
            self.found = self.lookup.find(self.contexts.bases + self.keys[self.level], self.lookup.float_values)
        return self.found

    def step(self, extensions: torch.LongTensor) -> None:
        extensions = extensions.to(self.lookup.device).view(1, *extensions.shape, 1)
        # The longest n-grams are nobody's context.
        num_longer = min(len(self.contexts.bases), self.lookup.order - 2)
        kept = None
        if num_longer:
            found = self.searched()
            first_places = _first_places(num_longer, found.counts.shape[1:], self.lookup.device)
            kept = found.at(extensions if first_places is None else first_places + extensions)
        choices = extensions % self.keys[self.level].shape[2]
        bases, seen = (tokens[self.level].gather(2, choices) for tokens in (self.bases, self.seen))
        self.contexts = self.lookup.grown(bases, seen, kept)
        self.level, self.found = self.level + 1, None


@lru_cache(maxsize=64)
def _first_places(num_lengths: int, shape: torch.Size, device: torch.device) -> torch.LongTensor | None:
    """Where, in flattened tables `(lengths, *shape)`, those of a length and a batch item begin: `(lengths, batch, 1, 1)`.

    None if there is one of them only.
    """
    batch, prefixes, k = shape
    if num_lengths * batch == 1:
        return None
    with torch.inference_mode(False):
        places = torch.arange(num_lengths * batch, device=device) * (prefixes * k)
        return places.view(num_lengths, batch, 1, 1)
