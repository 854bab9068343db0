"""A PARD drafter's answer to transformers' own assisted decoding, which asks its assistant to `generate` the next tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .base import ParallelDrafter
from .cache import GrowingCache
from .inputs import DraftInputs, DraftState


@torch.no_grad()
def draft_as_assistant(
    drafter: ParallelDrafter,
    input_ids: torch.LongTensor,
    num_tokens: int,
    logits_processor: Sequence[Any] = (),
    attention_mask: torch.Tensor | None = None,
    past_key_values: GrowingCache | None = None,
    do_sample: bool = False,
    end_ids: Sequence[int] = (),
) -> GenerateDecoderOnlyOutput:
    """Up to `num_tokens` next tokens from one forward, in the form that an autoregressive assistant would answer in.

    Args:
        drafter: one that reads token ids only.
        input_ids: `(1, length)`, the text so far.
        num_tokens: how many tokens to draft; fewer are returned if one of them ends the text.
        logits_processor: what the target's logits go through; the draft's do too, each given the drafted tokens before it.
        attention_mask: `(1, length)` or shorter, zero where the text is padding on the left.
        past_key_values: what an earlier answer returned, cropped or not; every entry is of committed text.
        do_sample: whether to draw the tokens, or take the best.
        end_ids: tokens that end a text.

    Returns:
        `sequences (1, length + drafted)`; `scores`, for each drafted token the `(1, vocab)` that it was chosen from; and
        `past_key_values` with the text's entries and none of the masks'.

    Raises:
        ValueError: for a batch, or no token to draft.
    """
    if input_ids.shape[0] != 1 or num_tokens < 1:
        raise ValueError(
            f"transformers' assisted decoding drafts at least one token for one sequence, got {num_tokens} tokens and a batch "
            f"of {input_ids.shape[0]}: for batches, install and import hf_pardraft"
        )
    cache = GrowingCache() if past_key_values is None else past_key_values
    text = without_padding(input_ids, attention_mask)
    # The anchor has to be read again if an earlier answer read it: the draft starts from its position.
    start = min(cache.get_seq_length(), text.shape[1] - 1)
    cache.forget_from(start)
    positions = torch.arange(start, text.shape[1], device=text.device)[None]
    logits = drafter.draft(DraftInputs(text[:, start:], positions), DraftState(cache), num_tokens)
    sequences, scores = input_ids, []
    for law in with_a_law(logits.float()).unbind(1):
        for processor in logits_processor:
            law = processor(sequences, law)
        law = with_a_law(law)
        token = torch.multinomial(law.softmax(-1), 1) if do_sample else law.argmax(-1, keepdim=True)
        sequences, scores = torch.cat([sequences, token], dim=1), [*scores, law]
        if int(token) in end_ids:
            break
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=tuple(scores), past_key_values=cache)


def without_padding(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """The real tokens of `input_ids (1, length)`; what was committed since the mask was made is real."""
    if attention_mask is None:
        return input_ids
    padding = int((attention_mask[0] == 0).sum())
    return input_ids[:, padding:]


def with_a_law(scores: torch.Tensor) -> torch.Tensor:
    """A drafter's scores `(..., vocab)`, changed where their softmax would be NaN, so that a draft can be drawn from it.

    Whatever law a draft is drawn from, the target's check makes up for it. Infinity becomes a large number, NaN -inf, and where
    nothing is above -inf, all tokens are alike.
    """
    # Large enough to leave others no chance, and small enough to be divided by a temperature.
    scores = scores.nan_to_num(nan=-torch.inf, posinf=1e20, neginf=-torch.inf)
    return scores.masked_fill(scores.amax(dim=-1, keepdim=True) == -torch.inf, 0.0)
