"""DFlash checkpoints as others write them, read as ours: z-lab's, speculators' and transformers' own (MuseGlimmer)."""

from typing import Any

from transformers import MuseGlimmerAssistantConfig

from .tap_indices import hidden_state_indices_to_layer_ids

MUSE_GLIMMER = "muse_glimmer_assistant"
SPECULATORS_TYPE = "speculators_model_type"
# Weights that MuseGlimmer's assistant calls by other names; patterns, as `from_pretrained(key_mapping=...)` takes them.
RENAMED_WEIGHTS = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}
# Fields, nested in dflash_config or beside it, with which a serving stack computes something else, and their values (or null)
# without it.
OTHER_COMPUTATIONS = {
    "causal": False,
    "is_causal": False,
    "sample_from_anchor": False,
    "projector_type": None,
    "final_logit_softcapping": None,
    "output_multiplier": 1.0,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_swa": False,
    "use_gemma_norm": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}
# What may stand in either place.
EITHER_PLACE = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
# What checkpoints may hold besides the drafter, and why it is not read.
IGNORED_WEIGHTS = {
    r"(^|\.)rotary_emb\.inv_freq$": "computed from the config",
    r"^(model\.)?embed_tokens\.weight$": "the target's embedding, which is read from the target",
    r"^lm_head\.weight$": "rows of the target's lm_head, which is read from the target",
    r"^verifier_(lm_head|norm)\.weight$": "the target's",
    r"^(d2t|t2d)$": "say which rows of the target's lm_head the checkpoint holds; all are read from the target",
}


def native_fields(fields: dict[str, Any], model_type: str = "dflash") -> dict[str, Any]:
    """The fields of a [`DFlashConfig`] that a config.json of any known layout means; ours pass unchanged.

    Args:
        fields: what config.json holds.
        model_type: of the configuration class, which DFlare shares with DFlash.

    Raises:
        ValueError: if the checkpoint is of another kind, or was trained for attention that ours does not have.
    """
    if SPECULATORS_TYPE in fields:
        return from_speculators(fields)
    if fields.get("model_type") == MUSE_GLIMMER:
        return from_muse_glimmer(fields)
    nested = fields.get("dflash_config") or {}
    check_computation(fields, nested)
    check_agreement(fields, nested)
    # What is as here need not be said.
    own = {name: value for name, value in fields.items() if name not in OTHER_COMPUTATIONS}
    # The published layout names what its layers are.
    return {**own, "model_type": model_type} if own.get("model_type") == "qwen3" else own


def check_computation(*places: dict[str, Any]) -> None:
    """Raise a `ValueError` if any of the objects says that something is computed in another way."""
    for given in places:
        other = {
            name: given[name] for name, usual in OTHER_COMPUTATIONS.items() if given.get(name) not in (None, usual)
        }
        if other:
            raise another_computation(str(other))


def check_agreement(fields: dict[str, Any], nested: dict[str, Any]) -> None:
    """Raise a `ValueError` if config.json and the dflash_config in it say different things."""
    for name in EITHER_PLACE:
        beside, inside = fields.get(name), nested.get(name)
        if beside is not None and inside is not None and beside != inside:
            raise ValueError(
                f"config.json gives {name} twice, {beside!r} and in dflash_config {inside!r}: keep the one that the drafter was "
                "trained with"
            )


def from_speculators(fields: dict[str, Any]) -> dict[str, Any]:
    """Speculators' layout: the layers' config is nested, and taps are indices into `hidden_states`."""
    if fields[SPECULATORS_TYPE] != "dflash":
        raise ValueError(
            f"{SPECULATORS_TYPE} {fields[SPECULATORS_TYPE]!r} is no parallel drafter that this package reads: expected 'dflash'"
        )
    layers, taps = fields.get("transformer_layer_config"), fields.get("aux_hidden_state_layer_ids")
    if not layers or not taps:
        raise ValueError(
            "a speculators DFlash config needs transformer_layer_config and aux_hidden_state_layer_ids, got "
            f"{layers!r} and {taps!r}: mend config.json"
        )
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ValueError(
            f"the layers of a DFlash drafter are Qwen3's, got transformer_layer_config of model_type {layers['model_type']!r}"
        )
    check_computation(layers)
    is_sliding = "sliding_attention" in (layers.get("layer_types") or ())
    if fields.get("sample_from_anchor") or (is_sliding and not fields.get("sliding_window_non_causal", False)):
        raise another_computation("sample_from_anchor, or sliding layers with sliding_window_non_causal false")
    own = {name: value for name, value in fields.items() if name not in SPECULATORS_FIELDS}
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return {
        # Speculators' own default.
        "block_size": 8,
        "target_name_or_path": verifier.get("name_or_path"),
        **layers,
        **own,
        "model_type": "dflash",
        "target_layer_ids": hidden_state_indices_to_layer_ids(taps),
    }


# Fields of speculators' layout that say nothing about the drafter, or say it in their own way.
SPECULATORS_FIELDS = (
    "architectures",
    "auto_map",
    "aux_hidden_state_layer_ids",
    # Of a head that we read from the target.
    "draft_vocab_size",
    "has_no_defaults_at_init",
    "model_type",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    SPECULATORS_TYPE,
    "speculators_version",
    "tie_word_embeddings",
    "transformer_layer_config",
)


def from_muse_glimmer(fields: dict[str, Any]) -> dict[str, Any]:
    """Transformers' own DFlash drafter: the same layers under its own defaults, and no vocabulary of its own."""
    config = MuseGlimmerAssistantConfig.from_dict(fields).to_dict()
    is_sliding = "sliding_attention" in config["layer_types"]
    return {
        **config,
        "model_type": "dflash",
        "vocab_size": fields.get("vocab_size", 0),
        "attention_bias": False,
        "use_sliding_window": is_sliding,
    }


def another_computation(found: str) -> ValueError:
    return ValueError(
        f"this checkpoint is computed in another way than DFlash's paper has it ({found}): here a block sees all of itself, its "
        "first row is not drafted, and the target's lm_head gives the logits as they are. Use it where it was made for"
    )
