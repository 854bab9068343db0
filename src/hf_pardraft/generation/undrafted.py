"""A call with a drafter that is faster without: transformers' own decoding, and what there is to say about its rounds."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.base import ParallelDrafter
from .stats import DecodeStats


def write_undrafted(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    **arguments: Any,
) -> Any:
    """Continue `input_ids (batch, length)` by plain `generate`; returns what that returns.

    Args:
        target, input_ids, generation_config: as `generate` prepared them.
        drafter: drafts nothing; its `last_stats` say so.
        **arguments: the others that `generate` prepared.
    """
    result = target._sample(input_ids, generation_config=generation_config, **arguments)
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    drafter.last_stats = undrafted_stats(sequences[:, input_ids.shape[1] :], generation_config._eos_token_tensor)
    return result


def undrafted_stats(new_ids: torch.LongTensor, end_tokens: torch.LongTensor | None) -> DecodeStats:
    """The statistics of rounds that commit one token each.

    Args:
        new_ids: `(batch, new)`; behind the token that ends its text, a row is padded.
        end_tokens: `(ends,)`.
    """
    over = torch.zeros_like(new_ids, dtype=torch.bool)
    if end_tokens is not None:
        over = torch.isin(new_ids, end_tokens.to(new_ids.device))
    # A row's last token is the one that ends it.
    live = (over.cumsum(dim=1) - over.long() == 0).sum(dim=0)
    stats = DecodeStats()
    for count in live.tolist():
        stats.add_round([0] * count, [0] * count, [1] * count)
    return stats
