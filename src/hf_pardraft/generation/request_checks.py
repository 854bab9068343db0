"""What drafting can't serve is refused before any forward."""

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.masks import attention_windows
from .cache import check_cache, check_can_roll_back, is_hybrid
from .pending import TOKEN_TYPES, first_inputs
from .probing import check_reads_alike
from .rope import rope_changes
from .settings import DraftSettings
from .step_inputs import StepInputs, step_inputs
from .target_checks import check_forwards, check_hybrid, check_scales_by_position, check_takes_masks


def check_request(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
    settings: DraftSettings,
) -> StepInputs:
    """Raise a `ValueError`, before any forward, for inputs that drafting can't serve.

    Returns:
        What the target reads in each step.
    """
    check_forwards(target)
    if settings.decode_loop == "native" and settings.depth:
        check_inputs(target, input_ids, model_kwargs, generation_config, settings)
    text_config = target.config.get_text_config(decoder=True)
    rope = rope_changes(text_config)
    limits = {*rope.switches, vars(text_config).get("original_max_position_embeddings")}
    reached = [limit for limit in limits if limit is not None and limit < generation_config.max_length]
    inputs = replace(step_inputs(target, input_ids, model_kwargs, sorted(reached)), rope=rope)
    if inputs.rereads_beyond is not None:
        check_can_reread(target, inputs.rereads_beyond, model_kwargs, generation_config, settings)
    if settings.decode_loop == "native" and settings.depth:
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
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "drafting continues prompts from their last column, got some that are padded on the right: set "
            'tokenizer.padding_side = "left"'
        )
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
    check_cache(model_kwargs.get("past_key_values"), batch, length, mask_length)
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


def check_has_no_gap(attention_mask: torch.Tensor) -> None:
    """Raise a `ValueError` for a mask `(batch, length)` with zeros behind a one."""
    real = attention_mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "a target with sliding windows counts masked-out tokens as distance, and drafting leaves them out, got an "
            "attention_mask with zeros inside the text: take these tokens out of input_ids, or pad on the left only"
        )
