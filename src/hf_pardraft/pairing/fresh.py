"""Drafters that are yet to be trained, made for a target; those made of a causal LM are in `adapted`."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.config_checks import FREE_FIELDS, check_config_fields
from ..models.base import ParallelDrafter
from ..models.configuration_dart import published_tapped_hidden_states
from ..models.inputs import input_device
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.target_bound import TargetBoundDrafter
from .adapted import adapted_causal_lm
from .architecture import architecture_like
from .draft_vocabulary import checked_token_ids, note_vocabulary
from .fresh_start import start_as_a_blind_guess
from .mask_token import choose_mask_token_id, find_tokenizer
from .remembered import describe_target, tokenizer_hash
from .target_checks import (
    check_borrowed,
    check_can_be_tapped,
    check_tapped_states,
    has_plain_weights,
    input_dtype,
    num_layer_outputs,
)


def fresh_config(
    config_class: type[PreTrainedConfig], fields: dict[str, Any], given: Iterable[str]
) -> PreTrainedConfig:
    """The configuration of a drafter that is to be made, checked before anything is built of it.

    Args:
        config_class: of the drafter.
        fields: all that is said of it.
        given: those of them that a user chose; what a target's config says is not looked at for names.

    Raises:
        ValueError: for a name that is no field, or a value that can't be.
    """
    known = {field.name for field in dataclass_fields(config_class)} | set(config_class.attribute_map) | FREE_FIELDS
    unknown = [name for name in given if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"no field {', '.join(unknown)} in a {config_class.__name__}{meant}: leave it out")
    advice = "choose another value"
    check_config_fields(fields, f"a new {config_class.__name__}", advice)
    try:
        config = config_class(**fields)
    except ValueError:
        raise
    # transformers' own checks of types are no ValueErrors, and name the field somewhere in several lines.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"a new {config_class.__name__} can't have these fields ({reason}): {advice}") from error
    check_config_fields(config.to_dict(), f"a new {config_class.__name__}, with what follows from them,", advice)
    return config


def check_can_serve(drafter_class: type[TargetBoundDrafter], target: PreTrainedModel) -> None:
    """Raise a `ValueError` if no drafter of this kind can draft for `target`, whatever its configuration."""
    check_can_be_tapped(drafter_class.__name__, target)
    check_borrowed(drafter_class.__name__, target, drafter_class.has_own_head)


def checked_drafter(
    drafter_class: type[TargetBoundDrafter], fields: dict[str, Any], given: Iterable[str], target: PreTrainedModel
) -> TargetBoundDrafter:
    """A drafter of these fields on its target's device, see [`fresh_config`]; a `ValueError` unless it can draft for `target`."""
    drafter = drafter_class(fresh_config(drafter_class.config_class, fields, given))
    drafter.check_target(target)
    check_tapped_states(drafter_class.__name__, target, drafter.taps_for(target))
    return drafter.to(input_device(target)).eval()


def fresh_block_drafter(
    drafter_class: type[DFlashDrafter],
    target: PreTrainedModel,
    num_layers: int,
    block_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    **overrides: Any,
) -> DFlashDrafter:
    """See [`DFlashDrafter.for_target`]; it starts as [`start_as_a_blind_guess`] says."""
    check_can_serve(drafter_class, target)
    text_config = target.config.get_text_config(decoder=True)
    tokenizer = tokenizer or find_tokenizer(target)
    mask_token_id = choose_mask_token_id(text_config, overrides.pop("mask_token_id", None), tokenizer)
    fields = {
        **architecture_like(target),
        **describe_target(target),
        "tokenizer_hash": None if tokenizer is None else tokenizer_hash(tokenizer),
        "num_hidden_layers": num_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "num_target_layers": num_layer_outputs(target),
        "target_hidden_size": text_config.hidden_size,
        **overrides,
    }
    drafter = checked_drafter(drafter_class, fields, overrides, target)
    start_as_a_blind_guess(drafter, drafter.norm, target)
    return drafter


def default_tapped_hidden_states(num_target_layers: int) -> list[int]:
    """Which of a target's hidden states a fresh drafter reads: a low, a middle and a high one, as indices into `hidden_states`.

    Those of the published rule, unless some of these coincide, as they do below seven layers. Then the taps lie evenly between
    the embeddings and the last layer's output, neither of them included; fewer than three where there is no room.

    Raises:
        ValueError: if the target has fewer than two layers.
    """
    if num_target_layers < 2:
        raise ValueError(f"a target needs at least 2 layers to be tapped, got {num_target_layers}")
    if num_target_layers >= 7:
        return published_tapped_hidden_states(num_target_layers)
    last = num_target_layers - 1
    return sorted({1, (1 + last) // 2, last})


def num_masks_for(draft_tokens: int, shifted: bool = True, draft_length: int | None = None, **others: Any) -> int:
    """How many masks draft so many tokens: one less, if the last position of the prefix drafts the first of them.

    Args:
        draft_tokens: d of arXiv 2601.19278, section 3.2.
        shifted, draft_length: as in [`DartConfig`], where they are given.
        **others: fields of it that don't matter.

    Raises:
        ValueError: if there is nothing to draft, or `draft_length` says otherwise.
    """
    if draft_tokens < 1:
        raise ValueError(f"a DART drafter drafts 1 token or more, got draft_tokens={draft_tokens}")
    num_masks = draft_tokens - 1 if shifted else draft_tokens
    if draft_length not in (None, num_masks):
        raise ValueError(
            f"draft_length counts masks: {draft_tokens} drafted tokens (draft_tokens) take {num_masks}, got "
            f"draft_length={draft_length}: leave draft_length out"
        )
    return num_masks


def fresh_dart_drafter(
    drafter_class: type[DartDrafter],
    target: PreTrainedModel,
    draft_token_ids: Sequence[int] | None,
    draft_tokens: int | None,
    **overrides: Any,
) -> DartDrafter:
    """See [`DartDrafter.for_target`]; it starts as [`start_as_a_blind_guess`] says."""
    check_can_serve(drafter_class, target)
    text_config = target.config.get_text_config(decoder=True)
    vocab_size = text_config.vocab_size
    ids = torch.arange(vocab_size) if draft_token_ids is None else checked_token_ids(draft_token_ids, vocab_size)
    if overrides.get("draft_vocab_size", len(ids)) != len(ids):
        raise ValueError(
            f"draft_vocab_size is {overrides['draft_vocab_size']}, but {len(ids)} tokens can be drafted: pass the tokens "
            "as draft_token_ids, and leave draft_vocab_size out"
        )
    fields = {
        **architecture_like(target),
        **describe_target(target),
        "draft_vocab_size": len(ids),
        "target_hidden_size": text_config.hidden_size,
        "tapped_hidden_states": default_tapped_hidden_states(num_layer_outputs(target)),
        **overrides,
    }
    if draft_tokens is not None:
        fields["draft_length"] = num_masks_for(draft_tokens, **overrides)
    drafter = checked_drafter(drafter_class, fields, overrides, target)
    note_vocabulary(drafter, ids)
    head = target.get_output_embeddings()
    if head is not None and input_dtype(head) and has_plain_weights(head) and not head.weight.is_meta:
        with torch.no_grad():
            drafter.lm_head.weight.copy_(head.weight[ids.to(head.weight.device)])
    start_as_a_blind_guess(drafter, drafter.norm, target)
    return drafter


FRESH = {
    "dflash": fresh_block_drafter,
    "dflare": fresh_block_drafter,
    "dart": fresh_dart_drafter,
    "pard": adapted_causal_lm,
}


def fresh_drafter(drafter_class: type[ParallelDrafter], base: Any, *args: Any, **kwargs: Any) -> ParallelDrafter:
    """See [`DrafterServices.fresh`]."""
    return FRESH[drafter_class.config_class.drafter_kind](drafter_class, base, *args, **kwargs)
