"""Checkpoints as others write them: which drafter a config.json describes, and its fields and weights read as ours.

Layouts are described in docs/formats.md; layouts.py has what writes them.
"""

from typing import Any

from transformers import MuseGlimmerAssistantConfig

from ..models.base import PairedConfig, ParallelDrafter
from ..models.configuration_dflash import EITHER_PLACE, FIRST_LAYER_OUTPUT
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflare import DFlareDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import PARD_DRAFTERS, PardDrafter
from .config_checks import without_foreign_notes

# What people call each kind of drafter; PARD-2 counts as one.
KIND_NAMES = {"pard": "PARD", "pard2": "PARD-2", "dflash": "DFlash", "dflare": "DFlare", "dart": "DART"}
# Kinds with one class for all targets, whose hidden states they read; PARD's depends on its base.
TARGET_BOUND_CLASSES = {"dflash": DFlashDrafter, "dflare": DFlareDrafter, "dart": DartDrafter}
MUSE_GLIMMER = "muse_glimmer_assistant"
SPECULATORS_TYPE = "speculators_model_type"
# What others call weights, by the kind of drafter: patterns, as `from_pretrained(key_mapping=...)` takes them, and our names.
RENAMED_WEIGHTS = {
    # MuseGlimmer's assistant.
    "dflash": {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."},
    # The trainer of PARD-2's authors has the base inside a module, with the projection beside it.
    "pard": {r"^base_model\.model\.": "model.", r"^base_model\.lm_head\.": "lm_head."},
}
# Fields, in a config of any layout or nested in it, with which a serving stack computes something else, and their values (or
# null) without it.
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
KNOWN_LAYOUTS = (
    "PARD and PARD-2 (an ordinary Llama, Qwen2 or Qwen3 config with `pard_token`), DFlash as published (`dflash_config` or the "
    "architecture DFlashDraftModel), by speculators (`speculators_model_type` dflash) or by transformers (model_type "
    f"{MUSE_GLIMMER}), DFlare as published (DFlash's with the architecture QwenDFlareDraftModel), DART as published "
    "(`draft_length` and `draft_vocab_size`), and what save_pretrained of this package writes"
)


def find_drafter_class(config: dict[str, Any]) -> type[ParallelDrafter] | None:
    """The drafter class that a config.json (as a dict) belongs to; `None` if it is none that this package reads."""
    if SPECULATORS_TYPE in config:
        # Speculators has other drafters too, some of them with fields in common with ours.
        return DFlashDrafter if config[SPECULATORS_TYPE] == "dflash" else None
    architectures = config.get("architectures") or []
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if config.get("pard_token") is not None and config.get("spd_type", "pard") in ("pard", "pard2"):
        return PardDrafter
    # DFlare's published configs are DFlash's in all but the architecture, so it has to be asked for first.
    if config.get("model_type") == "dflare" or any("DFlare" in name for name in names):
        return DFlareDrafter
    is_dflash_architecture = any(name in ("DFlashDraftModel", "DFlashDrafter") for name in names)
    is_dflash_type = config.get("model_type") in ("dflash", MUSE_GLIMMER)
    if is_dflash_type or is_dflash_architecture or "dflash_config" in config:
        return DFlashDrafter
    # EAGLE-3 has a reduced vocabulary too, but drafts step by step and so has no draft_length.
    is_dart_layout = config.get("draft_length") is not None and config.get("draft_vocab_size") is not None
    if config.get("model_type") == "dart" or is_dart_layout:
        return DartDrafter
    return None


def drafter_class_for(config: dict[str, Any], source: str = "config.json") -> type[ParallelDrafter]:
    """The drafter class that a config.json (as a dict) belongs to.

    Raises:
        ValueError: if it is none that this package reads; the message says what was found.
    """
    drafter_class = find_drafter_class(config)
    if drafter_class is not None:
        return drafter_class
    telling = ("architectures", "model_type", "spd_type", SPECULATORS_TYPE, "draft_length", "auto_map")
    found = {key: config[key] for key in telling if config.get(key) is not None}
    raise ValueError(
        f"{source} describes no drafter that this package reads: found {found or 'none of the fields that tell drafters apart'}. "
        f"Known layouts: {KNOWN_LAYOUTS}. To adapt an ordinary causal LM, use PardDrafter.from_causal_lm"
    )


def class_of_config(config: PairedConfig) -> type[ParallelDrafter] | None:
    """The class of our own that a drafter's configuration belongs to; `None` for one of a kind that we don't have."""
    if config.drafter_kind == "pard":
        return PARD_DRAFTERS.get(config.model_type)
    return TARGET_BOUND_CLASSES.get(config.drafter_kind)


def native_fields(config_class: type[PairedConfig], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a drafter's own config that a config.json of any known layout means; ours pass unchanged.

    Args:
        config_class: of the drafter.
        fields: what config.json holds.

    Raises:
        ValueError: if the checkpoint is of another kind, or was trained for attention that ours does not have.
    """
    kind = config_class.drafter_kind
    is_own = fields.get("model_type") == kind
    if kind == "dart" and not is_own:
        # The published layout calls itself `llama`, and its weights expect the norm twice.
        return {"double_norm": True, **without_foreign_notes(fields), "model_type": "dart"}
    if kind not in ("dflash", "dflare"):
        return fields
    native = native_dflash_fields(fields, kind)
    return native if is_own else without_foreign_notes(native)


def native_dflash_fields(fields: dict[str, Any], model_type: str) -> dict[str, Any]:
    """[`native_fields`] of a DFlash config, or a DFlare config, whose layouts are the same (`model_type`)."""
    nested = fields.get("dflash_config") or {}
    check_computation(fields, nested, fields.get("transformer_layer_config") or {})
    check_agreement(fields, nested)
    # What is as here need not be said.
    own = {name: value for name, value in fields.items() if name not in OTHER_COMPUTATIONS}
    if SPECULATORS_TYPE in own:
        return from_speculators(own)
    if own.get("model_type") == MUSE_GLIMMER:
        return from_muse_glimmer(own)
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
    is_sliding = "sliding_attention" in (layers.get("layer_types") or ())
    if is_sliding and not fields.get("sliding_window_non_causal", False):
        raise another_computation("sliding layers with sliding_window_non_causal false")
    own = {name: value for name, value in fields.items() if name not in SPECULATORS_FIELDS}
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return {
        # Speculators' own default.
        "block_size": 8,
        "target_name_or_path": verifier.get("name_or_path"),
        **layers,
        **own,
        "model_type": "dflash",
        "target_layer_ids": layer_ids_of(taps),
    }


def layer_ids_of(indices: list[int]) -> list[int]:
    """Turn indices of the `hidden_states` tuple into the numbers of the layers whose outputs they are.

    Raises:
        ValueError: for an index that is no layer's output (0 holds the embeddings).
    """
    if any(index < FIRST_LAYER_OUTPUT for index in indices):
        raise ValueError(
            f"expected indices of hidden states that layers put out, {FIRST_LAYER_OUTPUT} or more, got {list(indices)}: index 0 "
            "holds the embeddings, which a DFlash drafter does not read"
        )
    return [index - FIRST_LAYER_OUTPUT for index in indices]


# Fields of speculators' layout that say nothing about the drafter, or say it in their own way.
SPECULATORS_FIELDS = (
    "architectures",
    "auto_map",
    "aux_hidden_state_layer_ids",
    "has_no_defaults_at_init",
    "model_type",
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
