"""How a tree search asks a continuity model: level by level, along the prefixes that it keeps. Pure."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

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
