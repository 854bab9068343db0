"""A causal LM made a PARD or PARD-2 drafter: its weights and configuration, masks, and what it reads of a target."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.config_checks import check_config_fields
from ..checkpoints.files import check_place
from ..models.base import text_fact
from ..models.configuration_pard import PARD2_FIELDS, config_class_of
from ..models.modeling_pard import PARD_DRAFTERS, PardDrafter
from ..models.target_projection import PROJECTION
from .mask_token import check_mask_token_ids, choose_mask_token_id, find_tokenizer
from .remembered import describe_target, tokenizer_hash
from .target_checks import (
    check_can_be_tapped,
    check_tapped_states,
    check_taps,
    has_plain_weights,
    num_layer_outputs,
)


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
    if isinstance(base, PardDrafter):
        drafter.set_draft_vocabulary(base.draft_token_ids)
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
    left_out = (*PARD2_FIELDS, "spd_type", "pard_tokens", "draft_vocab_size")
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
