"""Verification: a tree and the target's choice at each of its slots give the accepted path. Pure."""

from dataclasses import dataclass

import torch

from .tree import TokenTree

# A choice for a slot that was never looked at; it matches no token.
NO_CHOICE = -1


@dataclass(frozen=True)
class Acceptance:
    """What the target accepts of a tree.

    Attributes:
        num_accepted: `(batch,)`, the number of accepted nodes.
        path: `(batch, nodes + 1)`, the slots of root and accepted nodes in order; beyond `num_accepted + 1` meaningless.
            `None` if they are simply the first ones, as in a chain.
        tokens: `(batch, nodes + 1)`, the tokens to commit: `num_accepted` accepted ones, then the bonus token; beyond them
            meaningless.
    """

    num_accepted: torch.LongTensor
    path: torch.LongTensor | None
    tokens: torch.LongTensor


def accept(tree: TokenTree, choices: torch.LongTensor) -> Acceptance:
    """Sample and match: walk down from the root while a child carries the token that the target chose.

    Every committed token is the target's own choice (drawn from its law, or its argmax), so the drafter can't change what
    is written, only how much of it a round commits. No loop over nodes, no host round trip.

    Args:
        tree: the proposed tree of N nodes.
        choices: `(batch, N + 1)`, the target's choice after the root and after each node.
    """
    if tree.is_chain:
        num_accepted = (tree.tokens == choices[:, :-1]).cumprod(dim=1).sum(dim=1)
        return Acceptance(num_accepted, None, choices)
    matches = tree.tokens == choices.gather(1, tree.parents)
    # A node is accepted if it and all its ancestors match. At most one child of a slot matches, so the accepted nodes are
    # one path, and nodes are stored by depth, so a stable sort lists them from the top down.
    accepted = ~(tree.ancestors & ~matches[:, None, :]).any(dim=-1)
    order = accepted.long().argsort(dim=1, descending=True, stable=True)
    path = torch.nn.functional.pad(order + 1, (1, 0))
    return Acceptance(accepted.sum(dim=1), path, choices.gather(1, path))


def plain_step(choices: torch.LongTensor) -> Acceptance:
    """The acceptance of a round without a draft: the one token that the target chose, `choices (batch, 1)`."""
    return Acceptance(torch.zeros_like(choices[:, 0]), None, choices)
