"""Where two greedy texts part, and whether the target itself could not tell the two tokens apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

# Rounding errors of a logit, in units of its last place, that forwards of different shapes differ by.
TIE_ROUNDINGS = 4


@dataclass(frozen=True)
class Difference:
    """The first place where a text is not that of plain `generate`.

    Attributes:
        prompt: number of the prompt, from 0.
        position: of the first other token, counted from the first new one.
        plain_token: what plain `generate` wrote there; `None` if its text was over.
        token: what was written instead; `None` if the text was over.
        logit_gap: by how much the target prefers plain's token, in a forward of its own over the text before; `None` if it
            was not asked.
        near_tie: whether that gap is within the rounding errors of the target's dtype.
    """

    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    logit_gap: float | None = None
    near_tie: bool | None = None


def first_difference(plain: Sequence[int], text: Sequence[int], prompt: int = 0) -> Difference | None:
    """Where `text` parts from `plain`; `None` if it does not."""
    for position in range(max(len(plain), len(text))):
        expected = plain[position] if position < len(plain) else None
        found = text[position] if position < len(text) else None
        if expected != found:
            return Difference(prompt, position, expected, found)
    return None


@torch.no_grad()
def weigh(
    target: PreTrainedModel, prompt: torch.LongTensor, plain: Sequence[int], difference: Difference
) -> Difference:
    """Ask the target how far apart the two tokens are.

    Args:
        target: the model.
        prompt: `(1, length)`.
        plain: what plain `generate` added to it.
        difference: between that and another text.
    """
    if difference.plain_token is None or difference.token is None:
        return difference
    before = torch.tensor([plain[: difference.position]], dtype=prompt.dtype, device=prompt.device)
    text = torch.cat([prompt, before], dim=1).to(target.device)
    logits = target(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits[0, -1]
    expected, found = (float(logits[token]) for token in (difference.plain_token, difference.token))
    gap = expected - found
    return replace(difference, logit_gap=gap, near_tie=abs(gap) <= rounding(logits.dtype, max(expected, found)))


def rounding(dtype: torch.dtype, logit: float) -> float:
    """How far apart logits of this size may come out, just from being computed in another order."""
    return TIE_ROUNDINGS * torch.finfo(dtype).eps * max(1.0, abs(logit))
