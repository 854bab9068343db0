"""Token trees: what a round proposes. A chain is a tree with one branch. Pure: tensors in, tensors out."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from .continuity import ContinuityModel, Walk, WalkingModel, walk_of


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens, level by level, below the root (the last committed token).

    Slot 0 is the root and slot i + 1 is node i, so a tree of N nodes has N + 1 slots. Siblings hold different tokens.

    Attributes:
        tokens: `(batch, nodes)`, the drafted tokens.
        parents: `(batch, nodes)`, the slot of each node's parent; always smaller than the node's own slot.
        depths: `(batch, nodes)`, distance from the root, never decreasing along the nodes.
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


def draft_chain(draft_logits: torch.Tensor) -> TokenTree:
    """The chain of the most probable token at each position, from marginal logits `(batch, depth, vocab)`."""
    return chain_tree(draft_logits.argmax(dim=-1))


@dataclass(frozen=True)
class TreeScoring:
    """How much a drafted token adds to the score of its prefix (dart.txt, appendix D, eq. Combine).

    At level 0, 1, ... (level 0 is the first drafted token), with p the drafter's probability and g the n-gram model's:

        (logit_decay^level log(p + epsilon) + ngram_weight log(g + epsilon)) (level + 1)^-level_exponent

    The defaults leave log p, whose best prefixes are DDTree's; DART's values are [`DART_SCORING`], with the n-gram term from
    the second token on, as in its code: the drafter knows the first one well enough.

    Attributes:
        logit_decay, ngram_weight, level_exponent, epsilon: as in the formula; with epsilon 0, p alone is exact.
        first_ngram_level: the n-gram term is absent before this level (DART's code has 1, its paper 0).
        softmax_over_top_k: p is the softmax over the `top_k` kept logits, as in DART's code; else over the vocabulary.
    """

    logit_decay: float = 1.0
    ngram_weight: float = 0.5
    level_exponent: float = 0.0
    epsilon: float = 0.0
    first_ngram_level: int = 0
    softmax_over_top_k: bool = False


LOG_PROBABILITY = TreeScoring()
DART_SCORING = TreeScoring(logit_decay=0.9, ngram_weight=0.5, level_exponent=0.7, epsilon=1e-10, first_ngram_level=1)
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
) -> TokenTree:
    """The best `budget` prefixes of the drafter's factorised law, by level-wise beam search.

    Every level extends the `beam_width` best prefixes of the level above by the `top_k` most probable tokens; the tree
    is the best `budget` of all extensions (dart.txt, algorithm 1). A prefix never scores higher than its parent, so
    ancestors are always in the tree, and with `beam_width >= budget`, `top_k >= budget` and no n-gram the tree is exactly
    the `budget` most probable prefixes (DDTree; left_to_right.txt, section 6.4).

    Args:
        draft_logits: `(batch, depth, vocab)`, marginal logits.
        budget: nodes besides the root; fewer if there are not as many. 0 asks for the chain of most probable tokens.
        beam_width: prefixes to extend at each level; by default `budget`.
        top_k: tokens to extend each prefix by; by default `budget`.
        ngram: continuity model; its share of the score is `scoring`'s. An [`NgramModel`], or any function of that kind.
        ngram_context: `(batch, context)`, the end of the committed text, the root last; needed with `ngram`.
        scoring: weights of the score.
        end_token_id: the token that ends a text, or several, `(ends,)`.
        end_rule: what prefixes that end in such a token are extended by: "stop", nothing (unless nothing else is left to
            fill the budget with); "last", what the beam has room for when all others are in it; "ignore", no difference.

    Returns:
        The tree; all rows have the same number of nodes.

    Raises:
        ValueError: for a negative budget, a width or top_k below 1, an n-gram model without its context, or no known rule.
    """
    _check_search(budget, beam_width, top_k, ngram, ngram_context, end_rule)
    if budget == 0:
        return draft_chain(draft_logits)
    vocab = draft_logits.shape[2]
    ends = _end_tokens(end_token_id, end_rule, draft_logits.device)
    beam_width = min(beam_width or budget, budget) if ends is None else (beam_width or budget)
    top_k = min(top_k or budget, vocab)
    # A level's extensions beyond the best `budget` are in no tree. Prefixes that ended may each push one more out of the beam.
    kept_per_level = budget if ends is None else max(budget, 2 * beam_width)
    gains, tokens = candidate_gains(draft_logits, top_k, scoring)
    if ngram is None and ends is None:
        return _best_of_pool(*_search_marginals(gains, tokens, beam_width, budget), budget)
    beam = _Beam(beam_width, kept_per_level, ends, ends is not None and end_rule == "stop")
    walk = None if ngram is None else walk_of(ngram, ngram_context, tokens)
    return _best_of_pool(*_search_prefixes(gains, tokens, beam, walk, scoring), budget)


@dataclass(frozen=True)
class _Beam:
    """How many prefixes a level leaves, and which of them the next one extends.

    Attributes:
        width: prefixes to extend.
        kept_per_level: extensions that go into the pool.
        ends: `(ends,)`, tokens behind which a prefix is extended last; `None` if there are none.
        stops: whether such a prefix is extended by nothing that is worth anything.
    """

    width: int
    kept_per_level: int
    ends: torch.LongTensor | None
    stops: bool

    def chosen(
        self, scores: torch.Tensor, extensions: torch.LongTensor, is_end: torch.BoolTensor | None
    ) -> tuple[torch.LongTensor | None, torch.Tensor, torch.LongTensor]:
        """Of a level's best extensions those that the next level extends: the best ones, those that ended behind all others.

        Args:
            scores, extensions: `(batch, kept)`, the best first.
            is_end: `(batch, extensions)`, which ones end the text, if any may.

        Returns:
            Their places `(batch, width)` (`None` for the first ones), scores and extensions.
        """
        if is_end is None:
            return None, scores[:, : self.width], extensions[:, : self.width]
        has_ended = is_end.gather(1, extensions)
        if self.stops:
            scores, places = scores.masked_fill(has_ended, -torch.inf).topk(min(self.width, scores.shape[1]), dim=1)
        else:
            places = has_ended.sort(dim=1, stable=True).indices[:, : self.width]
            scores = scores.gather(1, places)
        return places, scores, extensions.gather(1, places)


def _search_prefixes(
    gains: torch.Tensor, tokens: torch.LongTensor, beam: _Beam, walk: Walk | None, scoring: TreeScoring
) -> tuple[list[torch.Tensor], torch.LongTensor, torch.LongTensor]:
    """The search of [`build_tree`] where a prefix itself decides what a token adds behind it, or whether it is extended.

    An extension is a number, `prefix * top_k + token`; what it stands for is worked out for all levels at once. Takes gains
    and tokens of [`candidate_gains`]; returns what [`_best_of_pool`] takes.
    """
    batch, depth, top_k = gains.shape
    level_scores, level_extensions, level_places = [], [], []
    ends = [None] * depth if beam.ends is None else _ending_extensions(tokens, beam)
    beam_scores = gains.new_zeros(batch, 1)
    for level, gain in enumerate(gains[:, :, None].unbind(dim=1)):
        if walk is not None and level >= scoring.first_ngram_level:
            weight = scoring.ngram_weight * (level + 1) ** -scoring.level_exponent
            log_continuity = (walk.probabilities().to(gains.dtype) + scoring.epsilon).log_().clamp_(max=0)
            gain = log_continuity.mul_(weight).add_(gain)
        extended = (gain + beam_scores[:, :, None]).flatten(1)
        scores, extensions = extended.topk(min(beam.kept_per_level, extended.shape[1]), dim=1)
        level_scores.append(scores)
        level_extensions.append(extensions)
        if level + 1 < depth:
            places, beam_scores, chosen = beam.chosen(scores, extensions, ends[level])
            level_places.append(places)
            if walk is not None:
                walk.step(chosen)
    sizes = tuple(map(_width, level_scores))
    first_tokens, first_prefixes, entries = _levels_of_pool(sizes, beam.width, top_k, gains.device)
    if beam.ends is not None:
        root, *firsts = entries.split([1, *(places.shape[1] for places in level_places)])
        chosen = [root.expand(batch, -1), *(f[:1] + places for f, places in zip(firsts, level_places, strict=True))]
        entries = torch.cat(chosen, dim=1)
    extensions = torch.cat(level_extensions, dim=1)
    prefixes = extensions.div(top_k, rounding_mode="floor")
    drafted = tokens.flatten(1).gather(1, extensions - prefixes * top_k + first_tokens)
    parents = entries.expand(batch, -1).gather(1, prefixes + first_prefixes)
    return level_scores, drafted, parents


def _ending_extensions(tokens: torch.LongTensor, beam: _Beam) -> tuple[torch.BoolTensor, ...]:
    """For each level which extensions, of as many prefixes as a level may have, end the text: `(batch, width * top_k)`."""
    is_end = torch.isin(tokens, beam.ends)[:, :, None]
    return is_end.expand(-1, -1, beam.width, -1).flatten(2).unbind(dim=1)


@lru_cache(maxsize=64)
def _levels_of_pool(
    sizes: tuple[int, ...], beam_width: int, top_k: int, device: torch.device
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """Where the levels of a pool begin, among other things.

    Args:
        sizes: number of pool entries that each level left; the first `beam_width` of them are the next one's prefixes.
        beam_width, top_k, device: of the search.

    Returns:
        `(pool,)`, for every pool entry the place of its level's first token among the `top_k`s of all levels; `(pool,)`,
        likewise that of its level's first prefix among those of all levels; `(prefixes,)`, the pool entries of those prefixes
        (-1 for the root).
    """
    with torch.inference_mode(False):
        levels = _levels(sizes, device) - 1
        prefixes, starts = [[-1]], [0, *itertools.accumulate(sizes)]
        prefixes += [
            range(start, start + min(size, beam_width)) for start, size in zip(starts, sizes[:-1], strict=False)
        ]
        firsts = torch.tensor([0, *itertools.accumulate(map(len, prefixes))][: len(sizes)], device=device)
        return levels * top_k, firsts[levels], torch.tensor([*itertools.chain(*prefixes)], device=device)


def _search_marginals(
    gains: torch.Tensor, tokens: torch.LongTensor, beam_width: int, budget: int
) -> tuple[list[torch.Tensor], torch.LongTensor, torch.LongTensor]:
    """The search of [`build_tree`] where a token adds the same behind every prefix.

    Then a level needs nothing from the one above but its scores; which tokens and prefixes they belong to is worked out for
    all levels at once. Takes gains and tokens of [`candidate_gains`]; returns what [`_best_of_pool`] takes.
    """
    depth, top_k = gains.shape[1:]
    level_scores, level_orders, widths = [], [], []
    paired_gains: dict[int, torch.Tensor] = {}
    beam_scores = None
    for level in range(depth):
        width = 1 if beam_scores is None else beam_scores.shape[1]
        prefixes, choices = _worthwhile_pairs(width, top_k, budget, gains.device)
        if width not in paired_gains:
            paired_gains[width] = gains.index_select(2, choices)
        extended = paired_gains[width][:, level]
        if beam_scores is not None:
            extended = extended + beam_scores.index_select(1, prefixes)
        scores, order = extended.topk(min(budget, extended.shape[1]), dim=1)
        level_scores.append(scores)
        level_orders.append(order)
        widths.append(width)
        beam_scores = scores[:, :beam_width]
    sizes = tuple(map(_width, level_scores))
    first_pairs, parents_of, tokens_of = _pairs_of_levels(tuple(widths), sizes, top_k, budget, gains.device)
    pairs = torch.cat(level_orders, dim=1) + first_pairs
    return level_scores, tokens.flatten(1).gather(1, tokens_of.take(pairs)), parents_of.take(pairs)


@lru_cache(maxsize=64)
def _worthwhile_pairs(
    num_prefixes: int, top_k: int, budget: int, device: torch.device
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Which prefixes to extend by which tokens, both sorted from the best down: `(pairs,)` each.

    The i-th best prefix with the j-th best token is no better than i * j - 1 other extensions, so beyond i * j = budget
    there is nothing to find: of 60 x 60 extensions, 261 are left.
    """
    pairs = [
        (prefix, token)
        for prefix in range(min(num_prefixes, budget))
        for token in range(min(top_k, budget // (prefix + 1)))
    ]
    with torch.inference_mode(False):
        prefixes, tokens = torch.tensor(pairs, device=device).T.contiguous()
        return prefixes, tokens


@lru_cache(maxsize=64)
def _pairs_of_levels(
    widths: tuple[int, ...], sizes: tuple[int, ...], top_k: int, budget: int, device: torch.device
) -> tuple[torch.LongTensor, ...]:
    """What the pairs of [`_worthwhile_pairs`], those of all levels in a row, stand for.

    Args:
        widths: number of prefixes that each level extended.
        sizes: number of pool entries that each level left.
        top_k, budget, device: as there.

    Returns:
        `(pool,)`, for every pool entry the first pair of its level; `(pairs,)`, the pool entry of each pair's prefix (-1 for
        the root); `(pairs,)`, the place of each pair's token among the `top_k`s of all levels.
    """
    first_entries = [-1, 0, *itertools.accumulate(sizes)]
    with torch.inference_mode(False):
        pairs = [_worthwhile_pairs(width, top_k, budget, device) for width in widths]
        first_pairs = [0, *itertools.accumulate(len(prefixes) for prefixes, _ in pairs)]
        counts = torch.tensor(sizes, device=device)
        starts = torch.tensor(first_pairs[: len(sizes)], device=device).repeat_interleave(counts)
        parents = torch.cat([prefixes + first_entries[level] for level, (prefixes, _) in enumerate(pairs)])
        tokens = torch.cat([choices + level * top_k for level, (_, choices) in enumerate(pairs)])
        return starts, parents, tokens


def candidate_gains(
    draft_logits: torch.Tensor, top_k: int, scoring: TreeScoring
) -> tuple[torch.Tensor, torch.LongTensor]:
    """The drafter's share of the score of its `top_k` tokens at each level, and those tokens: `(batch, depth, top_k)` each."""
    if scoring.softmax_over_top_k:
        logits, tokens = draft_logits.topk(top_k, dim=-1)
        log_probabilities = logits.log_softmax(dim=-1)
    else:
        # The k best are the same before and after the softmax, and rounding after it can't tie them.
        log_probabilities, tokens = draft_logits.log_softmax(dim=-1).topk(top_k, dim=-1)
    if scoring.epsilon:
        log_probabilities = (log_probabilities.exp() + scoring.epsilon).log().clamp(max=0)
    depth = draft_logits.shape[1]
    if scoring.logit_decay == 1.0 and scoring.level_exponent == 0.0:
        return log_probabilities, tokens
    levels = torch.arange(depth, device=draft_logits.device, dtype=log_probabilities.dtype)
    weights = scoring.logit_decay**levels * (levels + 1) ** -scoring.level_exponent
    return log_probabilities * weights[:, None], tokens


def _check_search(budget, beam_width, top_k, ngram, ngram_context, end_rule) -> None:
    if budget < 0:
        raise ValueError(f"a tree's budget is its number of nodes besides the root (0 for a chain), got {budget}")
    for name, value in (("beam_width", beam_width), ("top_k", top_k)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: leave it out to use the budget")
    if ngram is not None and ngram_context is None:
        raise ValueError("an n-gram model needs ngram_context, the end of the committed text with the root last")
    if end_rule not in END_RULES:
        raise ValueError(f"end_rule must be one of {END_RULES}, got {end_rule!r}")


def _end_tokens(
    end_token_id: int | torch.LongTensor | None, end_rule: str, device: torch.device
) -> torch.LongTensor | None:
    """The tokens behind which the search has to behave differently, if there are any."""
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
    # The number of kept entries up to a parent is its slot; the root is entry -1.
    slot_parents = torch.searchsorted(kept, parents.gather(1, kept), right=True)
    level_of = _levels(tuple(map(_width, level_scores)), scores.device)
    ancestors = ancestors_of(slot_parents, len(level_scores))
    return TokenTree(tokens.gather(1, kept), slot_parents, level_of.take(kept), ancestors)


def _width(level: torch.Tensor) -> int:
    return level.shape[1]


@lru_cache(maxsize=64)
def _levels(sizes: tuple[int, ...], device: torch.device) -> torch.LongTensor:
    """The depth of every pool entry, from the number of entries per level. `(pool,)`."""
    with torch.inference_mode(False):
        return torch.cat([torch.full((size,), level + 1, device=device) for level, size in enumerate(sizes)])


def ancestors_of(parents: torch.LongTensor, depth: int) -> torch.BoolTensor:
    """Which nodes are a node's ancestors, or itself, by repeated squaring of the parent relation.

    Args:
        parents: `(batch, nodes)`, slots (0 is the root).
        depth: of the deepest node, or more.

    Returns:
        `(batch, nodes, nodes)`.
    """
    # Floats, for matmul; they count paths, and stay far below infinity.
    num_nodes, device = parents.shape[1], parents.device
    reach = (parents[:, :, None] == node_slots(num_nodes, device)) + _identity(num_nodes, device)
    for _ in range(math.ceil(math.log2(depth)) if depth > 1 else 0):
        reach = reach @ reach
    return reach > 0


@lru_cache(maxsize=64)
def node_slots(num_nodes: int, device: torch.device) -> torch.LongTensor:
    """The slots of a tree's nodes, `(nodes,)`, made once and never to be written to."""
    with torch.inference_mode(False):
        return torch.arange(1, num_nodes + 1, device=device)


@lru_cache(maxsize=64)
def _identity(num_nodes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.eye(num_nodes, device=device)
