"""Targets that can't be drafted for, or only with chains: what their forwards over a draft would do is refused."""

import math
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.utils import logging

from ...models.inputs import input_device
from ...pairing.target_checks import takes_positions
from ..settings import DraftSettings
from .positions import is_rotary
from .structure import (
    RECURRENT_LAYER_TYPES,
    ROLLBACK_LAYER_TYPES,
    is_hybrid,
    layer_types_of,
    text_config_of,
    told_by_hooks,
)

logger = logging.get_logger(__name__)

# Families whose recurrent layers go on from their state when they read several tokens at once. Of the others, some start
# anew (Jamba), some keep their state out of the cache (RecurrentGemma), and some limit their time steps then (Nemotron-H):
# drafting would change what they write.
CONTINUING_FAMILIES = {
    "bamba",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
# Attention kernels that take no mask of our choosing say so by their names, or by what transformers makes their masks with: of
# others (a kernel of the Hub, a caller's own) flash attention's, which are of padding alone, or nothing.
MASKLESS_ATTENTION = ("flash", "paged")
MASKLESS_FUNCTIONS = (flash_attention_mask, None)
# Families in which a token's result depends on how many tokens a forward reads.
UNSERVED_FAMILIES = {
    "moshi": "its cache forgets what its attention mask, which has no window, lets it see",
    "prophetnet": "it reads one token at a time beside its cache",
}


def check_forwards(target: PreTrainedModel, returns_attentions: bool = False) -> None:
    """Raise a `ValueError` for a target of which a token's result depends on what else the forward reads.

    Args:
        target: the model.
        returns_attentions: whether its forwards are to return them.
    """
    config = text_config_of(target)
    fields = vars(config)
    reason = UNSERVED_FAMILIES.get(config.model_type)
    if config.model_type == "falcon" and returns_attentions and config._attn_implementation == "sdpa":
        reason = (
            'with output_attentions it adds its sdpa mask of ones and zeros to the scores (attn_implementation="eager" has '
            "another mask)"
        )
    if config.model_type == "doge" and fields.get("is_moe"):
        reason = "its experts are chosen for all tokens of a forward together"
    # Mamba-2 layers keep to it where they read several tokens, and not where they read one.
    lowest, highest = fields.get("time_step_limit") or (0.0, math.inf)
    if lowest > 0 or highest < math.inf:
        reason = f"its recurrent layers have a time_step_limit ({lowest}, {highest})"
    if target.training and target.is_activation_checkpointing:
        reason = "it trains with gradient checkpointing, and its layers then get no cache (after target.eval() they do)"
    if "alora_offsets" in told_by_hooks(target):
        reason = "its activated LoRA adapter counts tokens from the end of each forward"
    if reason is not None:
        raise ValueError(
            f"drafting reads several tokens in one forward, and this {type(target).__name__} then writes another text: {reason}. "
            "Call generate without assistant_model"
        )


def check_scales_by_position(target: PreTrainedModel, num_columns: int) -> None:
    """Raise a `ValueError` where attention is scaled by the column of a token in the cache, which is not its position.

    Llama 4 does so from `floor_scale` columns on.

    Args:
        target: the model.
        num_columns: as many as its cache may come to hold in this call.
    """
    config = text_config_of(target)
    if config.model_type != "llama4_text" or not config.attn_temperature_tuning or num_columns < config.floor_scale:
        return
    raise ValueError(
        f"a {type(target).__name__} scales attention by the columns of its cache once there are {config.floor_scale} of them "
        "(attn_temperature_tuning), and in trees, batches and padded prompts a column is not a position: draft chains "
        f"(tree_budget=0) for one unpadded sequence at a time, or stay below with max_length (got up to {num_columns} columns)"
    )


def check_can_roll_back(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` if a target with this text config keeps state that a rejected draft can't be removed from."""
    layer_types = set(layer_types_of(config)[0])
    known = ROLLBACK_LAYER_TYPES | (RECURRENT_LAYER_TYPES if is_hybrid(config) else set()) | {"dummy"}
    others = sorted(layer_types - known)
    if others:
        raise ValueError(
            f"this target has layers of type {', '.join(others)}; drafting works with {', '.join(sorted(ROLLBACK_LAYER_TYPES))} "
            "layers, whose cache can forget a rejected token, alone or together with "
            f"{', '.join(sorted(RECURRENT_LAYER_TYPES))} layers. Call generate without assistant_model"
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
            "a target with recurrent layers reads its drafts one sequence at a time, since its items would go back to "
            f"different states; got a batch of {batch}: call generate for each item, or without assistant_model"
        )
    if settings.tree_budget:
        logger.warning_once(
            "This target has recurrent layers, which read one branch only: drafting chains instead of trees of "
            f"{settings.tree_budget} nodes. Set tree_budget to 0 to avoid this warning."
        )


def check_takes_masks(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the target takes the masks and positions of a tree or of items of different lengths."""
    attention = text_config_of(target)._attn_implementation
    is_maskless = ALL_MASK_ATTENTION_FUNCTIONS.get(attention) in MASKLESS_FUNCTIONS
    if is_maskless or any(name in attention for name in MASKLESS_ATTENTION):
        raise ValueError(
            f"trees and batches need an attention mask of their own, which {attention} does not take: load the target with "
            'attn_implementation="sdpa" (or, if it is your own and does, name its mask by AttentionMaskInterface.register), or '
            "draft chains (tree_budget=0) for one sequence at a time"
        )
    if attention == "flex_attention" and input_device(target).type == "cpu":
        # Given a mask as a tensor it writes beyond its memory there (torch 2.13), and the process dies.
        raise ValueError(
            "trees and batches need an attention mask of their own, with which flex_attention crashes on a CPU: load the target "
            'with attn_implementation="sdpa", or draft chains (tree_budget=0) for one sequence at a time'
        )
    # A model that transformers lists neither as compilable nor as open to attention kernels (GPT-Neo) makes masks of its own
    # from the columns of its cache, and ALiBi makes its biases from them.
    if not (target._can_compile_fullgraph or target._supports_attention_backend) or uses_alibi(target):
        raise ValueError(
            f"trees and batches need a target that takes masks and positions as they are, and {type(target).__name__} derives "
            "its own from the columns of its cache: draft chains (tree_budget=0) for one sequence at a time"
        )
    # What a caller passes is swallowed by a forward that takes none.
    if model_kwargs.get("position_ids") is None or not takes_positions(target):
        raise ValueError(
            f"trees and batches need position_ids, which {type(target).__name__} does not take: draft chains "
            "(tree_budget=0) for one sequence at a time"
        )


def check_takes_padding(target: PreTrainedModel) -> None:
    """Raise a `ValueError` for a target that counts columns itself, so that masked-out ones are places of the text."""
    # Rotary embeddings don't mind where a text begins.
    if not (takes_positions(target) or is_rotary(text_config_of(target))):
        raise ValueError(
            f"a {type(target).__name__} takes no position_ids and counts masked-out columns as places of the text, while "
            "drafting leaves them out, got an attention_mask with zeros: pass the prompt without its padding, or call generate "
            "without assistant_model"
        )


def uses_alibi(target: PreTrainedModel) -> bool:
    return bool(vars(text_config_of(target)).get("alibi"))
