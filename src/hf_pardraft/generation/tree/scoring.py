"""What a prefix of a tree is worth: the weights of its score, and a continuity model's say, level by level. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class TreeScoring:
    """How much a drafted token adds to the score of its prefix (arXiv 2601.19278, appendix D, eq. Combine).

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


def candidate_gains(
    draft_logits: torch.Tensor, top_k: int, scoring: TreeScoring
) -> tuple[torch.Tensor, torch.LongTensor]:
    """The drafter's share of the score of its `top_k` tokens at each level, and their columns: `(batch, depth, top_k)` each.

    A level of NaN is worth -inf: what can't be compared would separate nodes from their parents.
    """
    if scoring.softmax_over_top_k:
        logits, columns = draft_logits.topk(top_k, dim=-1)
        log_probabilities = logits.log_softmax(dim=-1)
    else:
        # The k best are the same before and after the softmax, and rounding after it can't tie them.
        log_probabilities, columns = draft_logits.log_softmax(dim=-1).topk(top_k, dim=-1)
    if scoring.epsilon:
        log_probabilities = (log_probabilities.exp() + scoring.epsilon).log().clamp(max=0)
    log_probabilities = log_probabilities.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    if scoring.logit_decay == 1.0 and scoring.level_exponent == 0.0:
        return log_probabilities, columns
    return log_probabilities * _level_weights(scoring, draft_logits.shape[1], draft_logits.device), columns


@lru_cache(maxsize=64)
def _level_weights(scoring: TreeScoring, depth: int, device: torch.device) -> torch.Tensor:
    """What the drafter's share is multiplied by at each level, `(depth, 1)`; made once and never to be written to."""
    with torch.inference_mode(False):
        levels = torch.arange(depth, device=device, dtype=torch.float32)
        return (scoring.logit_decay**levels * (levels + 1) ** -scoring.level_exponent)[:, None]


# Continuation probabilities `(batch, prefixes, candidates)`, from contexts `(batch, prefixes, context)` (the anchor and what
# was committed before it, then a drafted prefix) and candidate tokens `(batch, candidates)`.
ContinuityModel = Callable[[torch.LongTensor, torch.LongTensor], torch.Tensor]


class Walk(Protocol):
    """A model's way down one tree. It begins at the anchor, the only prefix of level 0."""

    def probabilities(self) -> torch.Tensor:
        """How probable this level's candidates are after its prefixes: `(batch, prefixes, candidates)`."""

    def step(self, extensions: torch.LongTensor) -> None:
        """Go to the next level.

        Args:
            extensions: `(batch, width)`, which prefixes it has: entry `prefix * candidates + candidate` of the table that
                [`probabilities`] gives (whether or not it was asked for).
        """


@runtime_checkable
class WalkingModel(Protocol):
    """A model that remembers on its way down what it found about a prefix, for those that go on from it."""

    def walk(self, context: torch.LongTensor, candidates: torch.LongTensor) -> Walk:
        """A walk after `context` `(batch, context)`, the anchor last, with all levels' `candidates` `(batch, depth, k)`."""


class WalkByCalls:
    """A [`Walk`] of any [`ContinuityModel`]: every level is looked up anew, from whole prefixes.

    Args:
        model: to be called once a level.
        context, candidates: as for [`WalkingModel.walk`].
    """

    def __init__(self, model: ContinuityModel, context: torch.LongTensor, candidates: torch.LongTensor) -> None:
        self.model, self.candidates, self.level = model, candidates, 0
        self.prefixes = context[:, None]

    def probabilities(self) -> torch.Tensor:
        return self.model(self.prefixes, self.candidates[:, self.level])

    def step(self, extensions: torch.LongTensor) -> None:
        num_candidates = self.candidates.shape[2]
        parents = extensions.div(num_candidates, rounding_mode="floor")[:, :, None]
        drafted = self.candidates[:, self.level].gather(1, extensions % num_candidates)
        kept = self.prefixes.gather(1, parents.expand(-1, -1, self.prefixes.shape[2]))
        self.prefixes = torch.cat([kept, drafted[:, :, None]], dim=2)
        self.level += 1


def walk_of(model: ContinuityModel | WalkingModel, context: torch.LongTensor, candidates: torch.LongTensor) -> Walk:
    """The best walk that a model has; see [`WalkingModel.walk`]."""
    if isinstance(model, WalkingModel):
        return model.walk(context, candidates)
    return WalkByCalls(model, context, candidates)
