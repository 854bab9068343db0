"""Token trees: what a round proposes. A chain is a tree with one branch. Pure: tensors in, tensors out."""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens, level by level, below the root (the last committed token).

    Slot 0 is the root and slot i + 1 is node i, so a tree of N nodes has N + 1 slots. Siblings hold different tokens.

    Attributes:
        tokens: `(batch, nodes)`, the drafted tokens.
        parents: `(batch, nodes)`, the slot of each node's parent; always smaller than the node's own slot.
        depths: `(batch, nodes)`, distance from the root, never decreasing along the nodes.
        ancestors: `(batch, nodes, nodes)` bool; `[b, i, j]` says whether node j is node i or one of its ancestors.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    depths: torch.LongTensor
    ancestors: torch.BoolTensor

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]


def chain_tree(tokens: torch.LongTensor) -> TokenTree:
    """The one-branch tree of drafted tokens `(batch, depth)`."""
    parents, depths, ancestors = _chain_shape(tokens.shape[1], tokens.device)
    batch = tokens.shape[0]
    return TokenTree(
        tokens,
        parents.expand(batch, -1),
        depths.expand(batch, -1),
        ancestors.expand(batch, -1, -1),
    )


@lru_cache(maxsize=64)
def _chain_shape(depth: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depths and ancestors of a chain: the same for all chains of one depth, so made once."""
    # A call under inference_mode would otherwise make tensors that no later autograd user may touch.
    with torch.inference_mode(False):
        parents = torch.arange(depth, device=device)[None]
        ancestors = torch.ones(depth, depth, dtype=torch.bool, device=device).tril()[None]
        return parents, parents + 1, ancestors


def draft_chain(draft_logits: torch.Tensor) -> TokenTree:
    """The chain of the most probable token at each position, from marginal logits `(batch, depth, vocab)`."""
    return chain_tree(draft_logits.argmax(dim=-1))
