"""Whether a target reads past padding, so that texts of several lengths may be written together."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..generation.target_side.probing import COARSE_TOLERANCE, TOLERANCES, relative_errors
from ..user_input.models import without_settings_of_its_own

NUM_TOKENS, NUM_PADDED, NUM_NEW = 4, 8, 3


def reads_past_padding(target: PreTrainedModel, pad_id: int) -> bool:
    """Whether a few tokens, padded on the left and masked there, say the same to a target as they do alone.

    Recurrent layers may take no mask (RWKV), or in a later step another one than in the first (MiniMax).

    Args:
        target: the model.
        pad_id: what it is padded with.
    """
    ids = torch.arange(NUM_TOKENS, device=target.device)[None] % target.config.get_text_config(decoder=True).vocab_size
    padded = torch.nn.functional.pad(ids, (NUM_PADDED, 0), value=pad_id)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (NUM_PADDED, 0))
    with without_settings_of_its_own(target):
        alone, beside = (_steps(target, *text, pad_id) for text in ((ids, torch.ones_like(ids)), (padded, mask)))
    tolerance = TOLERANCES.get(target.dtype, COARSE_TOLERANCE)
    for step, other in zip(alone, beside, strict=True):
        if relative_errors([step], [other])[0] > tolerance:
            return False
        if step.argmax() != other.argmax():
            # A near tie, after which the texts are two.
            return True
    return True


def _steps(
    target: PreTrainedModel, ids: torch.LongTensor, mask: torch.LongTensor, pad_id: int
) -> tuple[torch.Tensor, ...]:
    """`(1, vocab)` logits of each token that `generate` writes after a text."""
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=pad_id, return_dict_in_generate=True, output_logits=True
    )
    return target.generate(ids, attention_mask=mask, generation_config=config).logits
