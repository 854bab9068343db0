"""What a call can't have beside a drafter is refused before any forward."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..models.inputs import input_device
from .settings import DraftSettings, returns_states
from .target_side.callers_cache import check_cache, is_offloading
from .target_side.positions import num_positions
from .target_side.probing import check_reads_alike, hooks_of_others
from .target_side.prompt import TOKEN_TYPES, first_inputs
from .target_side.rope import longest_text, rope_changes
from .target_side.servable import (
    check_can_roll_back,
    check_forwards,
    check_hybrid,
    check_scales_by_position,
    check_takes_masks,
    check_takes_padding,
)
from .target_side.step_inputs import StepInputs, step_inputs
from .target_side.structure import has_attention_only, is_hybrid, modules_of, text_config_of, windows_of

logger = logging.get_logger(__name__)


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
    if target._is_stateful and not (is_hybrid(text_config_of(target)) or has_attention_only(text_config_of(target))):
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
    text_config = text_config_of(target)
    cache = model_kwargs.get("past_key_values")
    if settings.decode_loop == "stock" and cache is not None and cache.get_seq_length():
        raise ValueError(
            "transformers' own loop (decode_loop='stock') does not go on from a cache that holds a text: it reads all of "
            "that again, after what is there. Use decode_loop='native', or begin with an empty cache"
        )
    rope = rope_changes(text_config)
    limits = {*rope.switches, vars(text_config).get("original_max_position_embeddings")}
    reached = [limit for limit in limits if limit is not None and limit < generation_config.max_length]
    inputs = step_inputs(target, input_ids, model_kwargs, sorted(reached))
    inputs = replace(inputs, rope=rope, last_read=last_read(target, input_ids, model_kwargs, generation_config))
    if inputs.rereads_beyond is not None:
        check_can_reread(target, inputs.rereads_beyond, model_kwargs, generation_config, settings)
    if settings.decode_loop == "native":
        takes_masks = (len(input_ids) > 1 or settings.tree_budget > 0) and not is_hybrid(text_config)
        check_reads_alike(target, input_ids, model_kwargs, takes_masks)
    return inputs


def last_read(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
) -> int | None:
    """See [`StepInputs`]."""
    end = num_positions(text_config_of(target))
    # Of a text's last token nothing is read.
    if end is None or generation_config.max_length - 1 <= end:
        return None
    num_columns = input_ids.shape[1]
    padding = num_columns - longest_text(model_kwargs.get("position_ids"), num_columns)
    return end if generation_config.max_length - padding - 1 > end else None


def warn_of_dropout(target: PreTrainedModel) -> None:
    """Say so where a target's forwards are random, so that the text can't be plain `generate`'s."""
    if target.training and (found := dropout_of(target)):
        logger.warning_once(
            f"This {type(target).__name__} is in training mode, with {', '.join(found)}: each of its forwards is random, and "
            "with a drafter it writes another text than without, from the same seed, too. Call its eval() first."
        )


def warn_of_hooks(target: PreTrainedModel) -> None:
    """Say so where a caller's hooks are shown what they aren't in plain `generate`: nobody can tell what they make of it."""
    if hooks_of_others(target):
        logger.warning_once(
            f"This {type(target).__name__} has forward hooks of a caller's own. With a drafter they see several tokens in a "
            "forward, drafted ones that are not kept among them: a hook that treats a forward's last token otherwise than the "
            "others, or counts forwards, makes another text than without. Let it treat all tokens alike, or call generate "
            "without assistant_model."
        )


def dropout_of(model: PreTrainedModel) -> list[str]:
    """What makes a model random in training mode, as names and values: modules that drop, and rates that layers go by."""
    fields = vars(text_config_of(model))
    # Most layers hold the rate of attention themselves; some look it up.
    held = [(name, fields[name]) for name in ("attention_dropout", "attn_dropout") if name in fields]
    for module in modules_of(model):
        if isinstance(module, _DropoutNd):
            held.append((type(module).__name__, module.p))
        else:
            held += [(name, rate) for name, rate in vars(module).items() if "drop" in name or "jitter" in name]
    return sorted({f"{name}={rate}" for name, rate in held if isinstance(rate, float) and rate > 0})


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
    if batch == 0:
        raise ValueError("expected one text at least, got a batch of none: leave the call out")
    if length == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs the prompt as input_ids, got inputs_embeds or an empty prompt: pass token ids")
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None:
        check_ends(attention_mask)
    text_config = text_config_of(target)
    has_windows = any(size is not None for size in windows_of(text_config).values())
    if attention_mask is not None and (has_windows or is_hybrid(text_config)):
        check_has_no_gap(attention_mask)
    check_can_roll_back(text_config)
    is_padded = attention_mask is not None and not bool(attention_mask.all())
    if is_hybrid(text_config):
        check_hybrid(text_config.model_type, batch, settings)
    elif batch > 1 or settings.tree_budget:
        check_takes_masks(target, model_kwargs)
    if is_padded:
        check_takes_padding(target)
    if batch > 1 or settings.tree_budget or is_padded:
        check_scales_by_position(target, generation_config.max_length + settings.depth + settings.tree_budget)
    check_given_cache(target, input_ids, model_kwargs, generation_config)
    others = sorted(first_inputs(model_kwargs).keys() - {TOKEN_TYPES})
    if others and text_config is target.config:
        raise ValueError(
            f"a {type(target).__name__} drafts with text alone, got {', '.join(others)}: leave them out, or call generate "
            "without assistant_model"
        )


def check_given_cache(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
) -> None:
    """[`check_inputs`], of the cache that is gone on from, and the mask that is for its text and the new one."""
    batch, length = input_ids.shape
    attention_mask = model_kwargs.get("attention_mask")
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
    elif returns_states(generation_config):
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
            "a target with sliding windows counts masked-out tokens as distance, and one with recurrent layers takes a step at "
            "each, while drafting leaves them out, got an attention_mask with zeros inside the text: take these tokens out of "
            "input_ids, or pad on the left only"
        )
