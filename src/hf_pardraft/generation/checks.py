"""What drafting can't serve is refused before any forward."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..models.inputs import input_device
from ..models.masks import attention_windows
from .settings import DraftSettings
from .target_side.cache import check_cache, check_can_roll_back, has_attention_only, is_hybrid, is_offloading
from .target_side.probing import check_reads_alike
from .target_side.reader import TOKEN_TYPES, first_inputs
from .target_side.rope import rope_changes
from .target_side.step_inputs import StepInputs, step_inputs
from .target_side.structure import modules_of

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
# Attention kernels that take no mask of their own choosing.
MASKLESS_ATTENTION = ("flash", "paged")


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
    config = target.config.get_text_config(decoder=True)
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
    if "alora_offsets" in told_by_hooks(target):
        reason = "its activated LoRA adapter counts tokens from the end of each forward"
    if reason is not None:
        raise ValueError(
            f"drafting reads several tokens in one forward, and this {type(target).__name__} then writes another text: {reason}. "
            "Call generate without assistant_model"
        )


def told_by_hooks(target: PreTrainedModel) -> set[str]:
    """What PEFT tells the layers in each forward of this call, by name: which adapter is for which item, say."""
    hooks = (hook for module in modules_of(target) for hook in module._forward_pre_hooks.values())
    return {
        name for hook in hooks if isinstance(hook, partial) for name in hook.keywords if hook.keywords[name] is not None
    }


def check_scales_by_position(target: PreTrainedModel, num_columns: int) -> None:
    """Raise a `ValueError` where attention is scaled by the column of a token in the cache, which is not its position.

    Llama 4 does so from `floor_scale` columns on.

    Args:
        target: the model.
        num_columns: as many as its cache may come to hold in this call.
    """
    config = target.config.get_text_config(decoder=True)
    if config.model_type != "llama4_text" or not config.attn_temperature_tuning or num_columns < config.floor_scale:
        return
    raise ValueError(
        f"a {type(target).__name__} scales attention by the columns of its cache once there are {config.floor_scale} of them "
        "(attn_temperature_tuning), and in trees, batches and padded prompts a column is not a position: draft chains "
        f"(tree_budget=0) for one unpadded sequence at a time, or stay below with max_length (got up to {num_columns} columns)"
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
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if any(name in attention for name in MASKLESS_ATTENTION):
        raise ValueError(
            f"trees and batches need an attention mask of their own, which {attention} does not take: load the target with "
            'attn_implementation="sdpa", or draft chains (tree_budget=0) for one sequence at a time'
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
    if model_kwargs.get("position_ids") is None:
        raise ValueError(
            f"trees and batches need position_ids, which {type(target).__name__} does not take: draft chains "
            "(tree_budget=0) for one sequence at a time"
        )


def uses_alibi(target: PreTrainedModel) -> bool:
    return bool(target.config.get_text_config(decoder=True).to_dict().get("alibi"))


def check_mode(
    target: PreTrainedModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    synced_gpus: bool | None,
) -> None:
    """Raise a `ValueError` for a kind of target, or of decoding, that has no drafts; before inputs are looked at."""
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"drafters work with decoder-only targets, and {type(target).__name__} is an encoder-decoder: call generate "
            "without assistant_model"
        )
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"drafters work with greedy decoding and sampling, got {generation_mode.value}: set num_beams=1 and leave out "
            "the options of other decoding modes"
        )
    if generation_config.dola_layers is not None:
        raise ValueError(
            "drafters write the target's own text, and dola_layers asks for another: leave it out, or call generate "
            "without assistant_model"
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            "drafters write the target's own text, and assistant_ensemble_weight asks for a mixture with the assistant's: leave "
            "it out"
        )
    text_config = target.config.get_text_config(decoder=True)
    if target._is_stateful and not (is_hybrid(text_config) or has_attention_only(text_config)):
        raise ValueError(
            f"drafters work with targets whose cache can forget a rejected token, and {type(target).__name__} keeps a state "
            "that can't (recurrent layers, a compressed cache): call generate without assistant_model"
        )
    if synced_gpus:
        raise ValueError(
            "drafters don't work with synced_gpus (FSDP or ZeRO-3 sharded targets): gather the target first"
        )


def check_request(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
    settings: DraftSettings,
    streamer: BaseStreamer | None = None,
) -> StepInputs:
    """Raise a `ValueError`, before any forward, for inputs that drafting can't serve.

    Returns:
        What the target reads in each step.
    """
    returned = generation_config.return_dict_in_generate and generation_config.output_attentions
    check_forwards(target, returns_attentions=bool(returned))
    if settings.decode_loop == "native":
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(
                f"a streamer shows one sequence, got a batch of {len(input_ids)}: call generate for each sequence, or without "
                "streamer"
            )
        check_inputs(target, input_ids, model_kwargs, generation_config, settings)
        if generation_config.prefill_chunk_size is not None:
            logger.warning_once(
                f"prefill_chunk_size={generation_config.prefill_chunk_size} is not followed beside a drafter: the target reads "
                "the prompt in one forward."
            )
    text_config = target.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    if settings.decode_loop == "stock" and cache is not None and cache.get_seq_length():
        raise ValueError(
            "transformers' own loop (decode_loop='stock') does not go on from a cache that holds a text: it reads all of "
            "that again, after what is there. Use decode_loop='native', or begin with an empty cache"
        )
    rope = rope_changes(text_config)
    limits = {*rope.switches, vars(text_config).get("original_max_position_embeddings")}
    reached = [limit for limit in limits if limit is not None and limit < generation_config.max_length]
    inputs = replace(step_inputs(target, input_ids, model_kwargs, sorted(reached)), rope=rope)
    if inputs.rereads_beyond is not None:
        check_can_reread(target, inputs.rereads_beyond, model_kwargs, generation_config, settings)
    if settings.decode_loop == "native":
        takes_masks = (len(input_ids) > 1 or settings.tree_budget > 0) and not is_hybrid(text_config)
        check_reads_alike(target, input_ids, model_kwargs, takes_masks)
    return inputs


def check_inputs(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
    settings: DraftSettings,
) -> None:
    """[`check_request`] for this package's loop, of the target's layers, the prompt and the cache."""
    batch, length = input_ids.shape
    if not model_kwargs.get("use_cache"):
        raise ValueError("drafting needs the key/value cache: call generate with use_cache=True")
    if length == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs the prompt as input_ids, got inputs_embeds or an empty prompt: pass token ids")
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None:
        check_ends(attention_mask)
    text_config = target.config.get_text_config(decoder=True)
    if attention_mask is not None and any(size is not None for size in attention_windows(text_config).values()):
        check_has_no_gap(attention_mask)
    check_can_roll_back(text_config)
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    if is_hybrid(text_config):
        check_hybrid(text_config.model_type, batch, settings)
    elif batch > 1 or settings.tree_budget:
        check_takes_masks(target, model_kwargs)
    if batch > 1 or settings.tree_budget or is_padded:
        check_scales_by_position(target, generation_config.max_length + settings.depth + settings.tree_budget)
    # `generate` notes the length of a mask that it leaves out.
    mask_length = vars(generation_config).get("_mask_length") if attention_mask is None else attention_mask.shape[1]
    cache = model_kwargs.get("past_key_values")
    check_cache(cache, batch, length, mask_length)
    if mask_length not in (None, length):
        raise ValueError(
            f"input_ids has {length} columns and the attention_mask {mask_length}: pass the mask of these ids, one column each"
        )
    if is_offloading(cache) and input_device(target).type == "cpu":
        raise ValueError(
            "an offloaded cache goes back and forth between an accelerator and host memory, where this target is already (plain "
            "generate can't do it either): leave out cache_implementation, or pass a cache that is not offloaded"
        )
    others = sorted(first_inputs(model_kwargs).keys() - {TOKEN_TYPES})
    if others and text_config is target.config:
        raise ValueError(
            f"a {type(target).__name__} drafts with text alone, got {', '.join(others)}: leave them out, or call generate "
            "without assistant_model"
        )


def check_can_reread(
    target: PreTrainedModel,
    limit: int,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
    settings: DraftSettings,
) -> None:
    """Raise a `ValueError` for what can't be had where a target reads its whole text again after `limit` columns."""
    name = type(target).__name__
    problem = None
    if settings.decode_loop == "stock":
        problem = "transformers' own loop (decode_loop='stock') can't do"
    elif generation_config.return_dict_in_generate and (
        generation_config.output_hidden_states or generation_config.output_attentions
    ):
        problem = "can't be done while hidden states or attentions are returned"
    elif first_inputs(model_kwargs):
        problem = f"can't be done beside {', '.join(sorted(first_inputs(model_kwargs)))}"
    if problem:
        raise ValueError(
            f"{name} reads its whole text again when it grows beyond {limit} tokens, which {problem}: stay below with "
            "max_length, leave that out, or call generate without assistant_model"
        )


def check_ends(attention_mask: torch.Tensor) -> None:
    """Raise a `ValueError` for a mask `(batch, length)` of prompts that don't end in its last column."""
    if bool(attention_mask[:, -1].all()):
        return
    if not bool(attention_mask.any(dim=1).all()):
        raise ValueError(
            "drafting needs a token to go on from, got an empty prompt (a row of the attention_mask without a one): leave it "
            "out, or begin it with a token, such as the tokenizer's bos_token"
        )
    raise ValueError(
        "drafting continues prompts from their last column, got some that are padded on the right: set "
        'tokenizer.padding_side = "left"'
    )


def check_has_no_gap(attention_mask: torch.Tensor) -> None:
    """Raise a `ValueError` for a mask `(batch, length)` with zeros after a one."""
    real = attention_mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "a target with sliding windows counts masked-out tokens as distance, and drafting leaves them out, got an "
            "attention_mask with zeros inside the text: take these tokens out of input_ids, or pad on the left only"
        )
