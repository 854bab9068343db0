"""AutoDrafter: reads a config.json of any known layout and loads the drafter that it describes."""

from typing import Any

from transformers import PreTrainedConfig

from .models.drafting import ParallelDrafter, hub_arguments
from .models.modeling_dart import DartDrafter
from .models.modeling_dflare import DFlareDrafter
from .models.modeling_dflash import DFlashDrafter
from .models.modeling_pard import PardDrafter
from .models.target_projection import with_subfolder

KNOWN_LAYOUTS = (
    "PARD and PARD-2 (an ordinary Llama, Qwen2 or Qwen3 config with `pard_token`), DFlash as published (`dflash_config` or the "
    "architecture DFlashDraftModel), DFlare as published (the same with the architecture QwenDFlareDraftModel), DART as "
    "published (`draft_length` and `draft_vocab_size`), and what save_pretrained of this package writes"
)


def drafter_class_for(config: dict[str, Any], source: str = "config.json") -> type[ParallelDrafter]:
    """The drafter class that a config.json (as a dict) belongs to.

    Raises:
        ValueError: if it is none that this package reads; the message says what was found.
    """
    architectures = config.get("architectures") or []
    if config.get("pard_token") is not None and config.get("spd_type", "pard") in ("pard", "pard2"):
        return PardDrafter
    # DFlare's published configs are DFlash's in all but the architecture, so it has to be asked for first.
    if config.get("model_type") == "dflare" or any("DFlare" in name for name in architectures):
        return DFlareDrafter
    is_dflash_architecture = any(name in ("DFlashDraftModel", "DFlashDrafter") for name in architectures)
    if config.get("model_type") == "dflash" or is_dflash_architecture or "dflash_config" in config:
        return DFlashDrafter
    # EAGLE-3 has a reduced vocabulary too, but drafts step by step and so has no draft_length.
    is_dart_layout = config.get("draft_length") is not None and config.get("draft_vocab_size") is not None
    if config.get("model_type") == "dart" or is_dart_layout:
        return DartDrafter
    found = {
        key: config[key]
        for key in ("architectures", "model_type", "spd_type", "speculators_model_type", "draft_length")
        if config.get(key) is not None
    }
    raise ValueError(
        f"{source} describes no drafter that this package reads: found {found or 'none of the fields that tell drafters apart'}. "
        f"Known layouts: {KNOWN_LAYOUTS}. To adapt an ordinary causal LM, use PardDrafter.from_causal_lm"
    )


class AutoDrafter:
    """Loads whichever drafter a folder or Hub repository holds; not to be instantiated."""

    def __init__(self) -> None:
        raise OSError("AutoDrafter is used through AutoDrafter.from_pretrained(name_or_path)")

    @classmethod
    def from_pretrained(cls, name_or_path, **kwargs: Any) -> ParallelDrafter:
        """Load a drafter.

        Args:
            name_or_path: a folder, or a repository on the Hub.
            **kwargs: as for `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            ValueError: if the layout is not known, or a weight is missing or left over.
        """
        kwargs = with_subfolder(name_or_path, kwargs)
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(kwargs))
        return drafter_class_for(config, f"the config of {name_or_path}").from_pretrained(name_or_path, **kwargs)
