"""AutoDrafter: reads a config.json of any known layout and loads the drafter that it describes."""

import importlib.util
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from .models.drafting import ParallelDrafter, hub_arguments, load_generation_config
from .models.modeling_dart import DartDrafter
from .models.modeling_dflare import DFlareDrafter
from .models.modeling_dflash import DFlashDrafter
from .models.modeling_pard import PardDrafter
from .models.target_projection import with_subfolder

ADAPTER_FILE = "adapter_config.json"
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
            name_or_path: a folder, or a repository on the Hub. A PEFT adapter names the drafter or model that it belongs to,
                which is loaded, and the adapter merged into it.
            **kwargs: as for `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            ValueError: if the layout is not known, or a weight is missing or left over.
        """
        kwargs = with_subfolder(name_or_path, kwargs)
        if cached_file(
            name_or_path, ADAPTER_FILE, _raise_exceptions_for_missing_entries=False, **hub_arguments(kwargs)
        ):
            return load_adapted(name_or_path, kwargs)
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub_arguments(kwargs))
        return drafter_class_for(config, f"the config of {name_or_path}").from_pretrained(name_or_path, **kwargs)


def load_adapted(name_or_path: str, kwargs: dict[str, Any]) -> ParallelDrafter:
    """The drafter that an adapter belongs to, with the adapter merged in.

    A base that is an ordinary causal LM is adapted as training adapted it: the mask token is in the adapter's own config.

    Raises:
        ImportError: without PEFT.
        ValueError: if the adapter does not say what it belongs to, or that is no drafter and can't be made one.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{name_or_path} is an adapter, which needs the peft package: pip install peft")
    from peft import PeftConfig, PeftModel

    source = hub_arguments(kwargs)
    base_name = PeftConfig.from_pretrained(name_or_path, **source).base_model_name_or_path
    if not base_name:
        raise ValueError(
            f"the adapter in {name_or_path} does not say what it belongs to: set base_model_name_or_path in {ADAPTER_FILE}, or "
            "load the base yourself and the adapter with peft.PeftModel.from_pretrained"
        )
    # The base is another repository, so what says where in the adapter's its files are is of no use.
    options = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    base_config, _ = PreTrainedConfig.get_config_dict(base_name, **hub_arguments(options))
    config, _ = PreTrainedConfig.get_config_dict(name_or_path, **source)
    if config.get("pard_token") is not None and base_config.get("pard_token") is None:
        if config.get("spd_type") == "pard2":
            raise ValueError(
                f"the adapter in {name_or_path} is of a PARD-2 drafter, and its base {base_name} is an ordinary model without a "
                "projection: save the drafter before it is trained, and train from there, or train without keep_adapter"
            )
        drafter = PardDrafter.from_causal_lm(base_name, config["pard_token"], **options)
    else:
        drafter = AutoDrafter.from_pretrained(base_name, **options)
    merged = PeftModel.from_pretrained(drafter, name_or_path, **source).merge_and_unload()
    merged.generation_config = load_generation_config(name_or_path, **source)
    for name in config.keys() & {"target_name_or_path", "target_model_type", "target_fingerprint"}:
        setattr(merged.config, name, config[name])
    return merged.eval()
