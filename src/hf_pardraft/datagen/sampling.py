"""How the rows of a batch are sampled by themselves: their noise, their nucleus, and when a batch is worth dividing."""

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria, TopPLogitsWarper

# Most laws of a next token have all but a few percent in so many tokens.
MANY_TOKENS = 1024


class RowNoise(LogitsProcessor):
    """Makes the largest score a sample: Gumbel noise, from a generator per row, so that a row is written alike in any batch.

    argmax (s + g), with g from the standard Gumbel law, is a sample of softmax (s).

    Args:
        seeds: one per row of the batch.
        device: of the scores.
    """

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log()

    def of(self, rows: list[int]) -> "RowNoise":
        """The noise of some rows, which goes on where it is."""
        some = RowNoise([], torch.device("cpu"))
        some.generators = [self.generators[row] for row in rows]
        return some


class Nucleus(LogitsProcessor):
    """Top-p as `TopPLogitsWarper` has it, without sorting a vocabulary whose most likely tokens are enough: on a CPU a sort costs
    as much as a small target's forward.

    Args:
        top_p: share of the law that is kept.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p, self.whole = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        likely, tokens = scores.topk(min(MANY_TOKENS, scores.shape[-1]))
        shares = (likely - scores.logsumexp(dim=-1, keepdim=True)).exp()
        share = shares.cumsum(dim=-1)
        if bool((share[:, -1] < self.top_p).any()):
            return self.whole(input_ids, scores)
        # The token that reaches top_p is still kept.
        kept = likely.masked_fill(share - shares >= self.top_p, -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, kept)


class HalfDone(StoppingCriteria):
    """Stops a batch once half of its rows are at their ends.

    Args:
        end_ids: tokens that end a text.
        device: of the batch.
    """

    def __init__(self, end_ids: set[int], device: torch.device) -> None:
        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        self._done: torch.BoolTensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        ended = torch.isin(input_ids[:, -1], self.end_ids)
        self._done = ended if self._done is None else self._done | ended
        return (self._done.sum() * 2 >= len(ended)).expand(len(ended))
