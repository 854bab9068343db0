"""The likeliest token of each position."""

import torch

# Columns that are looked at as one, and how many such blocks there have to be for that to pay.
BLOCK = 256
FEWEST_BLOCKS = 16


def likeliest(scores: torch.Tensor) -> torch.LongTensor:
    """`scores.argmax(dim=-1)`, the first of equals or of NaNs included.

    On a CPU, torch's `argmax` over a vocabulary takes up to ten times as long as its largest value does, which is of vectors at
    once (over logits in bfloat16, 16 slots by 49,152 tokens, 2.5 ms and 0.2). So the first block of columns that has the largest
    value is found, and then its first column that has it.

    Args:
        scores: `(..., vocab)`.

    Returns:
        `(...)`.
    """
    vocab = scores.shape[-1]
    if scores.device.type != "cpu" or vocab < FEWEST_BLOCKS * BLOCK:
        return scores.argmax(dim=-1)
    if vocab % BLOCK:
        return scores.max(dim=-1).indices
    blocks = scores.unflatten(-1, (-1, BLOCK))
    first = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    columns = blocks.gather(-2, first[..., None].expand(*first.shape, BLOCK)).squeeze(-2)
    return first.squeeze(-1) * BLOCK + columns.argmax(dim=-1)
