"""The prefixes that may be among a tree's best, known before any draft is: then one look at all of them finds the tree. Pure.

Where a token adds the same after every prefix, and each level's tokens are sorted, the prefix of the i-th, the j-th, ... token is
no better than any of smaller numbers, nor than what these begin with: i + i j + ... prefixes, itself counted. In the tree of the
`budget` best there are none for which that is more than `budget`: of 16 nodes at 7 levels, 285 prefixes are left to look at.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

# Tokens of all prefixes of a table: to look at more takes longer than to search level by level.
MOST_TOKENS = 60_000


@dataclass(frozen=True)
class PrefixTable:
    """The prefixes that may be among the best `budget`, level by level.

    Attributes:
        tokens: `(prefixes * depth,)`, for each prefix the places of its tokens among the `top_k`s of all levels, and the place
            after all of these where it has no more tokens.
        ancestors: `(prefixes, depth)`, the number of each prefix's ancestor at every level, its own in the end, -1 beyond.
        parents: `(prefixes,)`, the number of each one's parent; -1 for the anchor.
        last_tokens: `(prefixes,)`, the place of each one's last token.
        depths: `(prefixes,)`.
    """

    tokens: torch.LongTensor
    ancestors: torch.LongTensor
    parents: torch.LongTensor
    last_tokens: torch.LongTensor
    depths: torch.LongTensor

    def best(
        self, gains: torch.Tensor, tokens: torch.LongTensor, budget: int
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
        """The tree of the `budget` best prefixes.

        Args:
            gains, tokens: `(batch, depth, top_k)`, what each token adds to a prefix's score, the best first, and which it is.
            budget: of the table.

        Returns:
            tokens, parents, depths and ancestors of a [`TokenTree`].
        """
        batch, depth, _ = gains.shape
        with_nothing = pad(gains.flatten(1), (0, 1))
        # Summed one by one, so that no rounding puts a prefix before its parent.
        scores = with_nothing.index_select(1, self.tokens).view(batch, -1, depth).cumsum(dim=2)[:, :, -1]
        kept = _places_of_best(scores, budget).sort(dim=1).values
        # The number of kept prefixes up to a parent is its slot.
        parents = torch.searchsorted(kept, self.parents.take(kept), right=True)
        ancestors = (self.ancestors[kept][:, :, :, None] == kept[:, None, None]).any(dim=2)
        return tokens.flatten(1).gather(1, self.last_tokens.take(kept)), parents, self.depths.take(kept), ancestors


def _places_of_best(scores: torch.Tensor, count: int) -> torch.LongTensor:
    """Where the best `count` of `(batch, prefixes)` scores are, none of them above 0; of equal ones the first.

    A parent, which lies in an earlier level, then comes before its child. Without its sign, a number's bits are in its order.
    """
    num_prefixes = scores.shape[1]
    ranks = scores.abs().float().view(torch.int32).long() * num_prefixes + all_numbers(num_prefixes, scores.device)
    return ranks.topk(min(count, num_prefixes), dim=1, largest=False, sorted=False).indices


@lru_cache(maxsize=64)
def all_numbers(count: int, device: torch.device) -> torch.LongTensor:
    """0 to `count`, that one left out, `(count,)`, made once and never to be written to."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@lru_cache(maxsize=64)
def prefix_table(budget: int, depth: int, top_k: int, device: torch.device) -> PrefixTable | None:
    """The table for trees of `budget` nodes in `depth` levels of `top_k` tokens; `None` if it would be too large."""
    with torch.inference_mode(False):
        # Of each prefix of a level, at first the anchor: the product of its numbers, the prefixes that come before it or are
        # it, the places of its tokens, and its ancestors.
        products, before = (torch.tensor([number], device="cpu") for number in (1, 0))
        tokens = ancestors = torch.empty(1, 0, dtype=torch.long, device="cpu")
        levels, num_prefixes = [], 0
        for level in range(depth):
            counts = ((budget - before) // products).clamp(max=top_k)
            extended = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
            numbers = torch.arange(len(extended), device="cpu")
            places = numbers - (counts.cumsum(0) - counts)[extended]
            products = products[extended] * (places + 1)
            before = before[extended] + products
            tokens = torch.cat([tokens[extended], level * top_k + places[:, None]], dim=1)
            ancestors = torch.cat([ancestors[extended], num_prefixes + numbers[:, None]], dim=1)
            levels.append((tokens, ancestors))
            num_prefixes += len(extended)
            if num_prefixes * depth > MOST_TOKENS:
                return None
        columns = (
            [pad(tokens, (0, depth - tokens.shape[1]), value=depth * top_k).flatten() for tokens, _ in levels],
            [pad(ancestors, (0, depth - ancestors.shape[1]), value=-1) for _, ancestors in levels],
            [pad(ancestors, (1, 0), value=-1)[:, -2] for _, ancestors in levels],
            [tokens[:, -1] for tokens, _ in levels],
            [torch.full_like(tokens[:, -1], tokens.shape[1]) for tokens, _ in levels],
        )
        return PrefixTable(*(torch.cat(column).to(device) for column in columns))
