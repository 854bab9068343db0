"""Tokens drawn from a target's scores, such that what a batch item draws depends on the item alone."""

import torch
from transformers import LogitsProcessor, TopPLogitsWarper

# The likeliest tokens that are looked at first, and then, where these are not enough: sorting a vocabulary costs a CPU as much
# as a small target's forward, and most laws have all but a few percent in few tokens.
LIKELY_TOKENS = (64, 1024)


class ItemDraws(LogitsProcessor):
    """Leaves one token, drawn from the softmax of the scores, with a number from a generator per batch item.

    Args:
        generators: one per batch item, on the CPU.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        numbers = [torch.rand((), dtype=torch.float64, generator=generator) for generator in self.generators]
        shares = scores.softmax(dim=-1).cumsum(dim=-1)
        if not shares[:, -1].isfinite().all():
            items = shares[:, -1].isfinite().logical_not().nonzero().flatten().tolist()
            raise ValueError(
                f"the target's scores of item {items} of this batch are no numbers (NaN), so nothing can be drawn: try another "
                "dtype (float32), or attn_implementation"
            )
        # Above 0, as then the first token whose sum reaches it is one of probability above 0.
        thresholds = (1 - torch.stack(numbers)).to(shares)[:, None] * shares[:, -1:]
        drawn = torch.searchsorted(shares, thresholds)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


class Nucleus(LogitsProcessor):
    """Top-p as `TopPLogitsWarper` has it, without sorting a vocabulary whose most likely tokens are enough.

    Args:
        top_p: share of the law that is kept.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p, self.whole = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        kept = torch.full_like(scores, -torch.inf)
        missing = torch.arange(len(scores), device=scores.device)
        for count in LIKELY_TOKENS:
            some = scores[missing]
            likely, tokens = some.topk(min(count, scores.shape[-1]))
            shares = (likely - some.logsumexp(dim=-1, keepdim=True)).exp()
            share = shares.cumsum(dim=-1)
            # The token that reaches top_p is still kept.
            nucleus = likely.masked_fill(share - shares >= self.top_p, -torch.inf)
            enough = share[:, -1] >= self.top_p
            kept[missing[enough]] = kept[missing[enough]].scatter(-1, tokens[enough], nucleus[enough])
            missing = missing[~enough]
            if not len(missing):
                return kept
        kept[missing] = self.whole(input_ids, scores[missing])
        return kept
