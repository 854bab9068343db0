"""Which drafter a config.json describes."""

from typing import Any

from ..models.base import ParallelDrafter
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflare import DFlareDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import PardDrafter
from ..models.published_dflash import MUSE_GLIMMER, SPECULATORS_TYPE

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
