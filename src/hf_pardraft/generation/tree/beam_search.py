"""Which prefixes of a drafter's marginals are worth the most: beam search, level by level. Pure."""

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch

from .scoring import TreeScoring, Walk


@dataclass(frozen=True)
class Beam:
    """How many prefixes a level leaves, and which of them the next one extends.

    Attributes:
        width: prefixes to extend.
        kept_per_level: extensions that go into the pool.
        ends: `(ends,)`, tokens after which a prefix is extended last; `None` if there are none.
        stops: whether such a prefix is extended by nothing that is worth anything.
    """

    width: int
    kept_per_level: int
    ends: torch.LongTensor | None
    stops: bool

    def chosen(
        self, scores: torch.Tensor, extensions: torch.LongTensor, is_end: torch.BoolTensor | None
    ) -> tuple[torch.LongTensor | None, torch.Tensor, torch.LongTensor]:
        """Of a level's best extensions those that the next level extends: the best ones, those that ended after all others.

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


def search_prefixes(
    gains: torch.Tensor, tokens: torch.LongTensor, beam: Beam, walk: Walk | None, scoring: TreeScoring
) -> tuple[list[torch.Tensor], torch.LongTensor, torch.LongTensor]:
    """The search of [`build_tree`].

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
    sizes = tuple(map(width_of, level_scores))
    first_tokens, first_prefixes, entries = _levels_of_pool(sizes, beam.width, top_k, gains.device)
    if beam.ends is not None:
        starts = [0, *itertools.accumulate(sizes)]
        chosen = [places + start for places, start in zip(level_places, starts, strict=False)]
        entries = torch.cat([entries[:1].expand(batch, -1), *chosen], dim=1)
    extensions = torch.cat(level_extensions, dim=1)
    prefixes = extensions.div(top_k, rounding_mode="floor")
    drafted = tokens.flatten(1).gather(1, extensions - prefixes * top_k + first_tokens)
    parents = entries.expand(batch, -1).gather(1, prefixes + first_prefixes)
    return level_scores, drafted, parents


def _ending_extensions(tokens: torch.LongTensor, beam: Beam) -> tuple[torch.BoolTensor, ...]:
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
        (-1 for the anchor).
    """
    with torch.inference_mode(False):
        levels = level_of_entries(sizes, device) - 1
        prefixes, starts = [[-1]], [0, *itertools.accumulate(sizes)]
        prefixes += [
            range(start, start + min(size, beam_width)) for start, size in zip(starts, sizes[:-1], strict=False)
        ]
        firsts = torch.tensor([0, *itertools.accumulate(map(len, prefixes))][: len(sizes)], device=device)
        return levels * top_k, firsts[levels], torch.tensor([*itertools.chain(*prefixes)], device=device)


def width_of(level: torch.Tensor) -> int:
    return level.shape[1]


@lru_cache(maxsize=64)
def level_of_entries(sizes: tuple[int, ...], device: torch.device) -> torch.LongTensor:
    """The depth of every pool entry, from the number of entries per level. `(pool,)`."""
    with torch.inference_mode(False):
        return torch.cat([torch.full((size,), level + 1, device=device) for level, size in enumerate(sizes)])
