"""Drafters that are yet to be trained: made for a target, or of an autoregressive model."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.config_checks import FREE_FIELDS, check_config_fields
from ..checkpoints.files import check_place
from ..models.base import ParallelDrafter, text_fact
from ..models.configuration_dart import published_tapped_hidden_states
from ..models.configuration_pard import PARD2_FIELDS, config_class_of
from ..models.inputs import input_device
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import PARD_DRAFTERS, PardDrafter
from ..models.target_bound import TargetBoundDrafter
from ..models.target_projection import PROJECTION
from .architecture import architecture_like
from .draft_vocabulary import checked_token_ids, note_vocabulary
from .fresh_start import start_as_a_blind_guess
from .mask_token import check_mask_token_ids, choose_mask_token_id, find_tokenizer
from .remembered import describe_target, tokenizer_hash
from .target_checks import (
    check_borrowed,
    check_can_be_tapped,
    check_tapped_states,
    check_taps,
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
    drafter = drafter_class(fresh_config(drafter_class.config_class, fields, overrides))
    drafter.check_target(target)
    check_tapped_states(type(drafter).__name__, target, drafter.taps_for(target))
    drafter = drafter.to(input_device(target)).eval()
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
    drafter = drafter_class(fresh_config(drafter_class.config_class, fields, overrides))
    drafter.check_target(target)
    check_tapped_states(type(drafter).__name__, target, drafter.taps_for(target))
    note_vocabulary(drafter, ids)
    head = target.get_output_embeddings()
    if head is not None and input_dtype(head) and has_plain_weights(head) and not head.weight.is_meta:
        with torch.no_grad():
            drafter.lm_head.weight.copy_(head.weight[ids.to(head.weight.device)])
    drafter = drafter.to(input_device(target)).eval()
    start_as_a_blind_guess(drafter, drafter.norm, target)
    return drafter


def default_target_layers(num_target_layers: int) -> list[int]:
    """The target states that a fresh PARD-2 drafter taps: `[-1, -8, -16, -24]` as published, closer in a shallower target.

    Indices into `hidden_states`, counted from its end: -1 is taken after the final norm.
    """
    step = max(1, min(8, num_target_layers // 4))
    return [-1] + [-step * k for k in range(1, 4) if 1 < step * k <= num_target_layers]


def projection_fields(target: PreTrainedModel, target_layers: list[int] | None, target_scale: float) -> dict[str, Any]:
    """The fields of a configuration that make a fresh PARD-2 drafter for `target`.

    Raises:
        ValueError: if the target has no such hidden states.
    """
    kind = "PARD-2 drafter"
    check_can_be_tapped(kind, target)
    layers = default_target_layers(num_layer_outputs(target)) if target_layers is None else list(target_layers)
    check_taps(kind, target, layers)
    check_tapped_states(kind, target, layers)
    return {
        **describe_target(target),
        "pard2_target_layers": layers,
        "pard2_target_dim": len(layers) * text_fact(target, "hidden_size"),
        "pard2_scale": target_scale,
        "pard2_proj_bias": False,
    }


def adapted_causal_lm(
    drafter_class: type[PardDrafter],
    model_or_path: PreTrainedModel | str,
    mask_token_id: int | Sequence[int] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    target: PreTrainedModel | None,
    target_layers: list[int] | None,
    target_scale: float,
    **kwargs: Any,
) -> PardDrafter:
    """See [`PardDrafter.from_causal_lm`]."""
    if target is None and target_layers is not None:
        raise ValueError("target_layers are layers of the target that a PARD-2 drafter reads: pass target= as well")
    base = plain_base(model_or_path, kwargs)
    config_class = config_class_of(base.config.model_type)
    fields = adapted_fields(base.config, mask_token_id, tokenizer or find_tokenizer(base))
    if target is not None:
        fields |= projection_fields(target, target_layers, target_scale)
        given = {"pard2_target_layers": fields["pard2_target_layers"], "pard2_scale": target_scale}
        check_config_fields(given, "a new PARD-2 drafter", "pass others")
    config = config_class.from_dict(fields)
    drafter = PARD_DRAFTERS[config.model_type](config).to(device=base.device, dtype=base.dtype)
    weights = {name: w for name, w in base.state_dict().items() if not name.startswith(f"{PROJECTION}.")}
    own = {name: w for name, w in drafter.state_dict().items() if name.startswith(f"{PROJECTION}.")}
    drafter.load_state_dict({**weights, **own})
    begin_masks(drafter, masks_of(base.config))
    if target is not None:
        drafter.check_target(target)
    return drafter.eval()


def plain_base(model_or_path: PreTrainedModel | str, arguments: dict[str, Any]) -> PreTrainedModel:
    """The causal LM that a PARD drafter is to be a copy of, loaded with `arguments` where it is only named.

    Raises:
        ValueError: if its weights can't be copied, or it is loaded already and there are arguments.
    """
    base = model_or_path
    if not isinstance(base, PreTrainedModel):
        check_place(model_or_path)
        # Said outright: transformers would ask on the terminal whether code that comes with it may run.
        base = AutoModelForCausalLM.from_pretrained(model_or_path, **{"trust_remote_code": False, **arguments})
    elif arguments:
        raise ValueError(
            f"{', '.join(arguments)}: arguments for loading, and the {type(base).__name__} is loaded already: leave them out"
        )
    if not has_plain_weights(base):
        raise ValueError(
            f"a PARD drafter begins as a copy of a causal LM, and the weights of this {type(base).__name__} are quantised or "
            "spread over devices: load it without a quantization_config, and pass that"
        )
    return base


def masks_of(base: PreTrainedConfig) -> int | list[int] | None:
    """The mask or masks of a base that is a PARD drafter already; `None` for any other."""
    fields = base.to_dict()
    return fields.get("pard_tokens") or fields.get("pard_token")


def adapted_fields(
    base: PreTrainedConfig, mask_token_id: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """The fields of a PARD drafter's configuration: its base's, its masks and its tokenizer's hash.

    Raises:
        ValueError: if these tokens can't be masks, or there is none that can.
    """
    left_out = (*PARD2_FIELDS, "spd_type", "pard_tokens")
    fields = {name: value for name, value in base.to_dict().items() if name not in left_out}
    chosen = masks_of(base) if mask_token_id is None else mask_token_id
    if chosen is None or isinstance(chosen, int):
        fields["pard_token"] = choose_mask_token_id(base, chosen, tokenizer)
    else:
        check_mask_token_ids(chosen, base, tokenizer)
        fields |= {"pard_token": chosen[0], "pard_tokens": list(chosen)}
    if tokenizer is not None:
        fields["tokenizer_hash"] = tokenizer_hash(tokenizer)
    return fields


@torch.no_grad()
def begin_masks(drafter: PardDrafter, trained: int | list[int] | None) -> None:
    """Let masks that nothing has learned yet, all but those `trained`, begin as tokens of no meaning."""
    fresh = set(drafter.config.mask_token_ids) - set(trained if isinstance(trained, list) else [trained])
    if fresh:
        # An unused row is whatever initialisation left there. The mean of all rows means nothing.
        embedding = drafter.get_input_embeddings().weight
        embedding[sorted(fresh)] = embedding.float().mean(0).to(embedding.dtype)


FRESH = {
    "dflash": fresh_block_drafter,
    "dflare": fresh_block_drafter,
    "dart": fresh_dart_drafter,
    "pard": adapted_causal_lm,
}


def fresh_drafter(drafter_class: type[ParallelDrafter], base: Any, *args: Any, **kwargs: Any) -> ParallelDrafter:
    """See [`DrafterServices.fresh`]."""
    return FRESH[drafter_class.config_class.drafter_kind](drafter_class, base, *args, **kwargs)
