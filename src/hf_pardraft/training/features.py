"""What a drafter's training reads from the frozen target."""

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def tapped_features(
    target: PreTrainedModel, taps: list[int], input_ids: torch.LongTensor, attention_mask: torch.LongTensor
) -> torch.Tensor:
    """The target's tapped hidden states, side by side.

    Args:
        target: frozen.
        taps: indices into its `hidden_states` tuple; no other entry is kept in memory.
        input_ids, attention_mask: `(batch, length)`, padded on the right.

    Returns:
        `(batch, length, taps * hidden)`.
    """
    outputs = target(
        input_ids=input_ids,
        attention_mask=attention_mask,
        output_hidden_states=taps,
        use_cache=False,
        logits_to_keep=1,
    )
    return torch.cat([outputs.hidden_states[tap] for tap in taps], dim=-1)


def freeze(target: PreTrainedModel) -> PreTrainedModel:
    """The target in evaluation mode, with no gradient to any of its weights."""
    target.requires_grad_(False)
    return target.eval()
