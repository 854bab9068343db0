"""Token trees: what a round proposes. A chain is a tree with one branch. Pure: tensors in, tensors out."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...likeliest import likeliest
from .beam_search import Beam, level_of_entries, search_prefixes, width_of
from .columns import columns_of, tokens_of
from .prefix_table import all_numbers, prefix_table
from .scoring import LOG_PROBABILITY, ContinuityModel, TreeScoring, WalkingModel, candidate_gains, walk_of

# Levels of a tree in which paths may be counted: there are 70 at most between two nodes 8 levels apart, 12,870 with 16, and with
# 30 or so more than a half-precision float, which autocast makes of them, can hold.
MOST_COUNTED = 16


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens, level by level, below the anchor (the last committed token).

    Slot 0 is the anchor and slot i + 1 is node i, so a tree of N nodes has N + 1 slots. Siblings hold different tokens.

    Attributes:
        tokens: `(batch, nodes)`, the drafted tokens.
        parents: `(batch, nodes)`, the slot of each node's parent; always smaller than the node's own slot.
        depths: `(batch, nodes)`, distance from the anchor, never decreasing along the nodes.
        ancestors: `(batch, nodes, nodes)` bool; `[b, i, j]` says whether node j is node i or one of its ancestors.
        is_chain: whether each node is the child of the one before it, known without looking.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    depths: torch.LongTensor
    ancestors: torch.BoolTensor
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def slot_depths(self) -> torch.LongTensor:
        """Distance of each slot from the anchor, `(batch, nodes + 1)`; `(nodes + 1,)` for chains, which are all alike."""
        if self.is_chain:
            return all_numbers(self.num_nodes + 1, self.tokens.device)
        return torch.nn.functional.pad(self.depths, (1, 0))


def chain_tree(tokens: torch.LongTensor) -> TokenTree:
    """The one-branch tree of drafted tokens `(batch, depth)`."""
    return TokenTree(tokens, *_chain_shape(*tokens.shape, tokens.device), is_chain=True)


@lru_cache(maxsize=64)
def _chain_shape(batch: int, depth: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depths and ancestors of chains: the same for all chains of one depth, so made once."""
    # A call under inference_mode would otherwise make tensors that no later autograd user may touch.
    with torch.inference_mode(False):
        parents = torch.arange(depth, device=device).expand(batch, -1)
        ancestors = torch.ones(depth, depth, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
        return parents, node_slots(depth, device).expand(batch, -1), ancestors


def draft_chain(draft_logits: torch.Tensor, token_ids: torch.LongTensor | None = None) -> TokenTree:
    """The chain of the most probable token at each position, from marginal logits `(batch, depth, columns)`.

    Args:
        token_ids: `(columns,)`, their tokens; `None` if they are the same.
    """
    return chain_tree(tokens_of(likeliest(draft_logits), token_ids))


def items_of_tree(tree: TokenTree, items: torch.LongTensor) -> TokenTree:
    """Some `items (kept,)` of a tree."""
    return replace(
        tree,
        tokens=tree.tokens[items],
        parents=tree.parents[items],
        depths=tree.depths[items],
        ancestors=tree.ancestors[items],
    )


def nodes_of_tree(tree: TokenTree, kept: list[list[int]], parents: list[list[int]]) -> TokenTree:
    """Some nodes of a tree, with their ancestors among them.

    Args:
        tree: of several nodes.
        kept: for each item, its nodes, ascending; equally many for all items.
        parents: for each item, their parents' slots in the new tree.
    """
    if tree.is_chain:
        return chain_tree(tree.tokens[:, : len(kept[0])])
    nodes, slots = (torch.tensor(values, device=tree.tokens.device) for values in (kept, parents))
    among = tree.ancestors[all_numbers(len(kept), nodes.device)[:, None, None], nodes[:, :, None], nodes[:, None]]
    return TokenTree(tree.tokens.gather(1, nodes), slots, tree.depths.gather(1, nodes), among)


def tree_of_lists(tokens: list[list[int]], parents: list[list[int]], device: torch.device) -> TokenTree:
    """A tree of nodes that the host knows, level by level, equally many for all items; `parents` are slots."""
    count, depths, ancestors = len(parents[0]), [], bytearray()
    for of_item in parents:
        # Of each slot its level, and a byte for each node: whether that is among its ancestors or itself.
        own, rows = [0], [bytes(count)]
        for node, parent in enumerate(of_item):
            own.append(own[parent] + 1)
            row = bytearray(rows[parent])
            row[node] = 1
            rows.append(row)
        depths.append(own[1:])
        ancestors += b"".join(rows[1:])
    tensors = torch.tensor([tokens, parents, depths], device=device)
    among = torch.frombuffer(ancestors, dtype=torch.bool).view(len(parents), count, count)
    return TokenTree(*tensors, among.to(device))


def node_log_probabilities(
    tree: TokenTree, logits: torch.Tensor, token_ids: torch.LongTensor | None = None
) -> torch.Tensor:
    """How probable each node's token is at its position, by the marginal logits that the tree was made of.

    Args:
        tree: of N nodes.
        logits: `(batch, depth, columns)`.
        token_ids: `(columns,)`, their tokens, ascending; `None` if they are the same.

    Returns:
        `(batch, N)`, the logarithms.
    """
    places = (tree.depths - 1) * logits.shape[2] + columns_of(tree.tokens, token_ids)
    # In one pass, which takes less than the logarithm of the sum alone does, of which only a few would be needed.
    return logits.float().log_softmax(dim=-1).flatten(1).gather(1, places)


# What happens to a prefix that ends the text: "stop" extends it by nothing, "last" after all others (DART's code), and
# "ignore" like any other (DART's paper, DDTree).
END_RULES = ("stop", "last", "ignore")


def build_tree(
    draft_logits: torch.Tensor,
    budget: int,
    beam_width: int | None = None,
    top_k: int | None = None,
    ngram: ContinuityModel | WalkingModel | None = None,
    ngram_context: torch.LongTensor | None = None,
    scoring: TreeScoring = LOG_PROBABILITY,
    end_token_id: int | torch.LongTensor | None = None,
    end_rule: str = "stop",
    deepest: torch.LongTensor | None = None,
    token_ids: torch.LongTensor | None = None,
    return_chain: bool = False,
) -> TokenTree | tuple[TokenTree, torch.LongTensor]:
    """The best `budget` prefixes of the drafter's factorised law, by level-wise beam search.

    Every level extends the `beam_width` best prefixes of the level above by the `top_k` most probable tokens; the tree
    is the best `budget` of all extensions (arXiv 2601.19278, algorithm 1). A prefix never scores higher than its parent, so
    ancestors are always in the tree, and with `beam_width >= budget`, `top_k >= budget` and no n-gram the tree is exactly
    the `budget` most probable prefixes (DDTree; arXiv 2606.11552, section 6.4).

    Args:
        draft_logits: `(batch, depth, columns)`, marginal logits.
        budget: nodes besides the anchor; fewer if there are not as many. 0 asks for the chain of most probable tokens.
        beam_width: prefixes to extend at each level; by default `budget`.
        top_k: tokens to extend each prefix by; by default `budget`.
        ngram: continuity model; its share of the score is `scoring`'s. An [`NgramModel`], or any function of that kind.
        ngram_context: `(batch, context)`, the end of the committed text, the anchor last; needed with `ngram`.
        scoring: weights of the score.
        end_token_id: the token that ends a text, or several, `(ends,)`.
        end_rule: what prefixes that end in such a token are extended by: "stop", nothing (unless nothing else is left to
            fill the budget with); "last", what the beam has room for when all others are in it; "ignore", no difference.
        deepest: `()`, how many levels of the marginals to look at, on their device; by default all of them. With a `top_k` of
            `budget` or more the tree is that of so many levels, and its shape doesn't depend on this number.
        token_ids: `(columns,)`, the token of each column; `None` if they are the same.
        return_chain: whether to return the most probable token of each level as well, which the search finds anyway.

    Returns:
        The tree; all items have the same number of nodes. And, if it is asked for, the chain in its place, `(batch, depth)`.

    Raises:
        ValueError: for a negative budget, a width or top_k below 1, an n-gram model without its context, or no known rule.
    """
    _check_search(budget, beam_width, top_k, ngram, ngram_context, end_rule)
    if budget == 0:
        tree = draft_chain(draft_logits, token_ids)
        return (tree, tree.tokens) if return_chain else tree
    ends = _end_tokens(end_token_id, end_rule, draft_logits.device)
    beam_width = min(beam_width or budget, budget) if ends is None else (beam_width or budget)
    top_k = min(top_k or budget, draft_logits.shape[2])
    # A level's extensions beyond the best `budget` are in no tree. Prefixes that ended may each push one more out of the beam.
    kept_per_level = budget if ends is None else max(budget, 2 * beam_width)
    gains, columns = candidate_gains(draft_logits, top_k, scoring)
    # All that follows is about these few tokens.
    tokens = tokens_of(columns, token_ids)
    if deepest is not None:
        is_beyond = all_numbers(draft_logits.shape[1], draft_logits.device) >= deepest
        gains = gains.masked_fill(is_beyond[:, None], -torch.inf)
    # A compiled search costs no more than its arithmetic, and less to trace than a table.
    may_be_looked_up = ngram is None and ends is None and beam_width == budget and not torch.compiler.is_compiling()
    table = prefix_table(budget, *gains.shape[1:], gains.device) if may_be_looked_up else None
    if table is not None:
        tree = TokenTree(*table.best(gains, tokens, budget))
    else:
        beam = Beam(beam_width, kept_per_level, ends, ends is not None and end_rule == "stop")
        walk = None if ngram is None else walk_of(ngram, ngram_context, tokens)
        tree = _best_of_pool(*search_prefixes(gains, tokens, beam, walk, scoring), budget)
    return (tree, tokens[:, :, 0]) if return_chain else tree


def _check_search(budget, beam_width, top_k, ngram, ngram_context, end_rule) -> None:
    if budget < 0:
        raise ValueError(f"a tree's budget is its number of nodes besides the anchor (0 for a chain), got {budget}")
    for name, value in (("beam_width", beam_width), ("top_k", top_k)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: leave it out to use the budget")
    if ngram is not None and ngram_context is None:
        raise ValueError("an n-gram model needs ngram_context, the end of the committed text with the anchor last")
    if end_rule not in END_RULES:
        raise ValueError(f"end_rule must be one of {END_RULES}, got {end_rule!r}")


def _end_tokens(
    end_token_id: int | torch.LongTensor | None, end_rule: str, device: torch.device
) -> torch.LongTensor | None:
    """The tokens after which the search has to behave differently, if there are any."""
    if end_token_id is None or end_rule == "ignore":
        return None
    return torch.as_tensor(end_token_id, device=device)


def _best_of_pool(
    level_scores: list[torch.Tensor],
    tokens: torch.LongTensor,
    parents: torch.LongTensor,
    budget: int,
) -> TokenTree:
    """The tree of the `budget` best entries of all levels; a parent is named by its place among all entries."""
    scores = torch.cat(level_scores, dim=1)
    # Stable, so that among equal scores a parent, which lies in an earlier level, comes before its child.
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    kept = best.sort(dim=1).values
    # The number of kept entries up to a parent is its slot; the anchor is entry -1.
    slot_parents = torch.searchsorted(kept, parents.gather(1, kept), right=True)
    level_of = level_of_entries(tuple(map(width_of, level_scores)), scores.device)
    ancestors = ancestors_of(slot_parents, len(level_scores))
    return TokenTree(tokens.gather(1, kept), slot_parents, level_of.take(kept), ancestors)


def ancestors_of(parents: torch.LongTensor, depth: int) -> torch.BoolTensor:
    """Which nodes are a node's ancestors, or itself, by repeated squaring of the parent relation.

    Args:
        parents: `(batch, nodes)`, slots (0 is the anchor).
        depth: of the deepest node, or more.

    Returns:
        `(batch, nodes, nodes)`.
    """
    num_nodes, device = parents.shape[1], parents.device
    depth = min(depth, num_nodes)
    # Floats, for matmul; they count paths, of which there are too many for a float in a deep tree.
    reach = (parents[:, :, None] == node_slots(num_nodes, device)) + _identity(num_nodes, device)
    for _ in range(math.ceil(math.log2(depth)) if depth > 1 else 0):
        reach = reach @ reach
        if depth > MOST_COUNTED:
            reach = reach.clamp(max=1)
    return reach > 0


@lru_cache(maxsize=64)
def node_slots(num_nodes: int, device: torch.device) -> torch.LongTensor:
    """The slots of a tree's nodes, `(nodes,)`; the anchor's is 0."""
    return all_numbers(num_nodes + 1, device)[1:]


@lru_cache(maxsize=64)
def number_of_levels(number: int, device: torch.device) -> torch.LongTensor:
    """A `deepest` of [`build_tree`], `()`. To send one would make the host wait for all that the device has yet to do."""
    with torch.inference_mode(False):
        return torch.tensor(number, device=device)


@lru_cache(maxsize=64)
def _identity(num_nodes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.eye(num_nodes, dtype=torch.float32, device=device)
