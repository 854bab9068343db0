"""Verification: a tree and the target's choice at each of its slots give the accepted path. Pure."""

from dataclasses import dataclass

import torch

from .token_tree import TokenTree, node_slots

# A choice for a slot that was never looked at; it matches no token.
NO_CHOICE = -1
# A choice for a slot where the target's scores have no law to draw from: NaN, or nothing above -inf. It matches no token either.
NO_LAW = -2
# A token of a node that is none, where a forward has more slots than were proposed; no choice is this one.
NO_NODE = -3


@dataclass(frozen=True)
class Acceptance:
    """What the target accepts of a tree.

    Attributes:
        num_accepted: `(batch,)`, the number of accepted nodes.
        path: `(batch, nodes + 1)`, the slots of anchor and accepted nodes in order; beyond `num_accepted + 1` meaningless.
            `None` if they are simply the first ones, as in a chain.
        tokens: `(batch, nodes + 1)`, the tokens to commit: `num_accepted` accepted ones, then the bonus token; beyond them
            meaningless.
    """

    num_accepted: torch.LongTensor
    path: torch.LongTensor | None
    tokens: torch.LongTensor


def accept(tree: TokenTree, choices: torch.LongTensor) -> Acceptance:
    """Sample and match: walk down from the anchor while a child carries the token that the target chose.

    Every committed token is the target's own choice (drawn from its law, or its argmax), so the drafter can't change what
    is written, only how much of it a round commits. No loop over nodes, no host round trip.

    Args:
        tree: the proposed tree of N nodes.
        choices: `(batch, N + 1)`, the target's choice after the anchor and after each node.
    """
    if tree.is_chain:
        num_accepted = (tree.tokens == choices[:, :-1]).cumprod(dim=1).sum(dim=1)
        return Acceptance(num_accepted, None, choices)
    matches = tree.tokens == choices.gather(1, tree.parents)
    # A node is accepted if it and all its ancestors match. At most one child of a slot matches, so the accepted nodes are
    # one path, with one node at each depth.
    accepted = (tree.ancestors <= matches[:, None, :]).all(dim=-1)
    slots = node_slots(tree.num_nodes, choices.device)
    # All others are written to the anchor's place, as the anchor.
    path = torch.zeros_like(choices).scatter_(1, accepted * tree.depths, accepted * slots)
    return Acceptance(accepted.sum(dim=1), path, choices.gather(1, path))


def plain_step(choices: torch.LongTensor) -> Acceptance:
    """The acceptance of a round without a draft: the one token that the target chose, `choices (batch, 1)`."""
    return Acceptance(torch.zeros_like(choices[:, 0]), None, choices)


def check_has_law(tokens: list[int]) -> None:
    """Raise an error if one of the tokens that are to be committed could not be drawn.

    Raises:
        RuntimeError: that of `torch.multinomial`, which is what plain `generate` raises there.
    """
    if NO_LAW in tokens:
        raise RuntimeError(
            "probability tensor contains either `inf`, `nan` or element < 0: expected scores of the target to sample from, got "
            "NaN, infinity or nothing above -inf at the next token. Check the target's weights and dtype, or the logits "
            "processors (renormalize_logits, remove_invalid_values)"
        )


def paths_on_host(acceptance: Acceptance) -> tuple[list[list[int]], list[list[int]]]:
    """For each item the accepted slots, the anchor's first, and the tokens to commit (as many), in one transfer."""
    return paths_of(for_host(acceptance).tolist(), acceptance.tokens.shape[1])


def for_host(acceptance: Acceptance) -> torch.LongTensor:
    """What the host wants to know, `(batch, ...)`: the number of accepted nodes, the tokens, and the path, if there is one."""
    parts = [acceptance.num_accepted[:, None], acceptance.tokens]
    if acceptance.path is not None:
        parts.append(acceptance.path)
    return torch.cat(parts, dim=1)


def paths_of(items: list[list[int]], num_slots: int) -> tuple[list[list[int]], list[list[int]]]:
    """What items of [`for_host`] say of so many slots; returns as [`paths_on_host`].

    Raises:
        RuntimeError: where a token could not be drawn.
    """
    paths, tokens = [], []
    for num_accepted, *rest in items:
        slots = rest[num_slots:] or range(num_slots)
        paths.append(list(slots[: num_accepted + 1]))
        tokens.append(rest[: num_accepted + 1])
        check_has_law(tokens[-1])
    return paths, tokens
