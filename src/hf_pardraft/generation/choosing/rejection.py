"""Speculative sampling by rejection: drafts drawn from the drafter's law, and kept with the odds of the target's."""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList

from ...widest_float import widest_float
from ..tree.columns import tokens_of
from ..tree.verify import NO_LAW
from .processors import warped_law


def draw(weights: torch.Tensor) -> torch.LongTensor:
    """Draw one token per row, with probabilities proportional to `weights (rows, vocab)`. Shape `(rows,)`.

    It takes one random number per row. `torch.multinomial` takes one per entry, and waits for the device to look for NaN. Here
    a row of NaN draws `NO_LAW`, which the host finds if it is on the path, as it would be in plain `generate`.
    """
    # So precisely that no token is too improbable to be drawn.
    dtype = widest_float(weights.device)
    cumulative = weights.cumsum(dim=-1, dtype=dtype)
    # In (0, 1], so that the first entry to reach it is one that weighs something.
    share = 1 - torch.rand(len(weights), 1, dtype=dtype, device=weights.device)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, share * total)
    return torch.where(total > 0, drawn, NO_LAW).squeeze(1)


@dataclass(frozen=True)
class DrawnChain:
    """A chain whose tokens were drawn from the drafter's law, to be kept with the odds of the target's.

    Attributes:
        tokens: `(batch, depth)`.
        probabilities: `(batch, depth)`, theirs.
        law: `(batch, depth, columns)`, what they were drawn from.
        token_ids: `(columns,)`, the tokens of the columns; `None` if they are the same. Of all others the probability is 0.
    """

    tokens: torch.LongTensor
    probabilities: torch.Tensor
    law: torch.Tensor
    token_ids: torch.LongTensor | None = None

    def at(self, items: slice, depth: int) -> "DrawnChain":
        """One depth of some items."""
        here = (items, slice(depth, depth + 1))
        return DrawnChain(self.tokens[here], self.probabilities[here], self.law[here], self.token_ids)

    def residual(self, law: torch.Tensor) -> torch.Tensor:
        """Of another law `(batch, depth, vocab)` what exceeds this one, of the same shape."""
        if self.token_ids is None:
            return (law - self.law).clamp(min=0)
        return law.scatter_add(2, self.token_ids.expand_as(self.law), -self.law).clamp(min=0)


def draw_chain(
    draft_logits: torch.Tensor, warpers: LogitsProcessorList, token_ids: torch.LongTensor | None = None
) -> DrawnChain:
    """Draw a token at each position of `draft_logits (batch, depth, columns)` from the drafter's law, see [`warped_law`].

    Any law will do for [`keep_or_redraw`].
    """
    law = warped_law(draft_logits, warpers)
    columns = draw(law.flatten(0, 1)).view(law.shape[:2])
    probabilities = law.gather(2, columns[..., None]).squeeze(2)
    return DrawnChain(tokens_of(columns, token_ids), probabilities, law, token_ids)


def keep_or_redraw(scores: torch.Tensor, drawn: DrawnChain) -> torch.LongTensor:
    """The target's choice by speculative sampling: the drawn token with probability min(1, p / q), else one of the residual.

    With p the target's law and q the drafter's, the residual is max(p - q, 0), normalised (arXiv 2606.11552, eq. 1-2), so
    that the choice has the law p, and equals the drawn token as often as it can.

    Args:
        scores: `(batch, depth, vocab)`, the target's processed scores at the slots before the drawn tokens.
        drawn: the drawn chain.

    Returns:
        `(batch, depth)`; `NO_LAW` where the target has none.
    """
    law = scores.softmax(dim=-1)
    odds = law.gather(2, drawn.tokens[..., None]) / drawn.probabilities[..., None]
    is_kept = torch.rand_like(odds) < odds
    residual = drawn.residual(law)
    # Where the laws are equal, rounding may leave no residual, and nothing is ever redrawn.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, law)
    redrawn = draw(residual.flatten(0, 1)).view(drawn.tokens.shape)
    return torch.where(is_kept.squeeze(-1), drawn.tokens, redrawn)
