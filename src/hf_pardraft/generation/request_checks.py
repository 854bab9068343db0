"""What drafting can't serve is refused before any forward."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models.row_masks import attention_windows
from .cache import check_cache, check_can_roll_back, is_hybrid
from .prompt import first_inputs
from .settings import DraftSettings

logger = logging.get_logger(__name__)

# Families whose recurrent layers go on from their state when they read several tokens at once. Of the others, some start
# anew (Jamba), and some keep their state out of the cache (RecurrentGemma): drafting would change what they write.
CONTINUING_FAMILIES = {
    "bamba",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
# Attention kernels that take no mask of their own choosing.
MASKLESS_ATTENTION = ("flash", "paged")


def check_request(
    target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], settings: DraftSettings
) -> None:
    """Raise a `ValueError`, before any forward, for inputs that drafting can't serve."""
    batch, length = input_ids.shape
    if not model_kwargs.get("use_cache"):
        raise ValueError("drafting needs the key/value cache: call generate with use_cache=True")
    if length == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs the prompt as input_ids, got inputs_embeds or an empty prompt: pass token ids")
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "drafting continues prompts from their last column, got some that are padded on the right: set "
            'tokenizer.padding_side = "left"'
        )
    text_config = target.config.get_text_config(decoder=True)
    if attention_mask is not None and any(size is not None for size in attention_windows(text_config).values()):
        check_has_no_gap(attention_mask)
    check_can_roll_back(text_config)
    if is_hybrid(text_config):
        check_hybrid(text_config.model_type, batch, settings)
    elif batch > 1 or settings.tree_budget:
        check_takes_masks(target, model_kwargs)
    check_cache(model_kwargs.get("past_key_values"), batch, length)
    others = sorted(first_inputs(model_kwargs))
    if others and text_config is target.config:
        raise ValueError(
            f"a {type(target).__name__} drafts with text alone, got {', '.join(others)}: leave them out, or call generate "
            "without assistant_model"
        )


def check_has_no_gap(attention_mask: torch.Tensor) -> None:
    """Raise a `ValueError` for a mask `(batch, length)` with zeros behind a one."""
    real = attention_mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "a target with sliding windows counts masked-out tokens as distance, and drafting leaves them out, got an "
            "attention_mask with zeros inside the text: take these tokens out of input_ids, or pad on the left only"
        )


def check_hybrid(model_type: str, batch: int, settings: DraftSettings) -> None:
    """Raise a `ValueError` where recurrent layers can't read a draft, or are given a batch; warn of a tree."""
    if model_type not in CONTINUING_FAMILIES:
        raise ValueError(
            f"the recurrent layers of a {model_type} target are not known to go on from their state when they read several "
            f"tokens at once, as those of {', '.join(sorted(CONTINUING_FAMILIES))} do: call generate without assistant_model"
        )
    if batch > 1:
        raise ValueError(
            "a target with recurrent layers reads its drafts one sequence at a time, since its rows would go back to "
            f"different states; got a batch of {batch}: call generate for each row, or without assistant_model"
        )
    if settings.tree_budget:
        logger.warning_once(
            "This target has recurrent layers, which read one branch only: drafting chains instead of trees of "
            f"{settings.tree_budget} nodes. Set tree_budget to 0 to avoid this warning."
        )


def check_takes_masks(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the target takes the masks and positions of a tree or of rows of different lengths."""
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if any(name in attention for name in MASKLESS_ATTENTION):
        raise ValueError(
            f"trees and batches need an attention mask of their own, which {attention} does not take: load the target with "
            'attn_implementation="sdpa", or draft chains (tree_budget=0) for one sequence at a time'
        )
    # A model that transformers lists neither as compilable nor as open to attention kernels (GPT-Neo) makes masks of its own
    # from the columns of its cache, and ALiBi makes its biases from them.
    if not (target._can_compile_fullgraph or target._supports_attention_backend) or uses_alibi(target):
        raise ValueError(
            f"trees and batches need a target that takes masks and positions as they are, and {type(target).__name__} derives "
            "its own from the columns of its cache: draft chains (tree_budget=0) for one sequence at a time"
        )
    if model_kwargs.get("position_ids") is None:
        raise ValueError(
            f"trees and batches need position_ids, which {type(target).__name__} does not take: draft chains "
            "(tree_budget=0) for one sequence at a time"
        )


def uses_alibi(target: PreTrainedModel) -> bool:
    return bool(target.config.get_text_config(decoder=True).to_dict().get("alibi"))
