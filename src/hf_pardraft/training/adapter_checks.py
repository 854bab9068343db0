"""What is refused of adapters before any work: settings that can't be, methods that no drafter can have."""

import importlib.util
from typing import Any

from transformers import PreTrainedModel

from ..models.base import ParallelDrafter
from .run_options import AdapterOptions

# PEFT has a choice of layers for their base architectures, and knows none of the other drafters.
KINDS_OF_PEFTS_CHOICE = ("pard", "pard2")
# Where a setting of PEFT names the layers.
NAMING_LAYERS = ("target_modules", "target_parameters")


def check_adapter(options: AdapterOptions, keep_adapter: bool, kind: str | None) -> None:
    """Raise a `ValueError` for an adapter that can't be, or settings of one where there is none.

    Args:
        options: of the adapter.
        keep_adapter: whether it is to be saved as it is.
        kind: of a fresh drafter; `None` if one is gone on with, which is looked at when it is loaded.
    """
    if options.lora_rank is None:
        said = [f"--{name.replace('_', '-')}" for name, value in vars(options).items() if value is not None]
        if said or keep_adapter:
            also = ", ".join([*said, *(["--keep-adapter"] if keep_adapter else [])])
            raise ValueError(f"{also}: settings of an adapter, and none is trained: set --lora-rank, or leave them out")
        return
    if options.lora_rank < 1:
        raise ValueError(f"lora_rank must be at least 1, got {options.lora_rank}: leave it out to train all weights")
    if options.lora_alpha is not None and options.lora_alpha < 1:
        raise ValueError(f"lora_alpha must be at least 1, got {options.lora_alpha}")
    if options.lora_dropout is not None and not 0 <= options.lora_dropout < 1:
        raise ValueError(f"lora_dropout must be in [0, 1), got {options.lora_dropout}")
    if kind not in (None, *KINDS_OF_PEFTS_CHOICE) and not options.lora_target_modules:
        raise layers_not_named(kind)


def layers_not_named(kind: str) -> ValueError:
    """The error of an adapter that nobody says the layers of."""
    return ValueError(
        f"an adapter of a {kind} drafter needs the names of the layers that it changes, which PEFT knows for pard and pard2 "
        "alone: set --lora-target-modules (lora_target_modules in a recipe, target_modules of peft_config), as to q_proj v_proj, "
        "or to all-linear"
    )


def check_peft(what: str) -> None:
    """Raise an `ImportError` if PEFT, which `what` needs, is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{what} needs the peft package: pip install peft")


def check_peft_config(peft_config: Any, drafter: ParallelDrafter) -> None:
    """Raise an error for settings of PEFT that this drafter can't be trained with.

    Raises:
        ImportError: without PEFT.
        TypeError: if they are none of PEFT's.
        ValueError: for a method that puts tokens of its own before a text, and where nobody says which layers are changed.
    """
    check_peft("peft_config")
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config must be a LoraConfig or another of PEFT's, got a {type(peft_config).__name__}")
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(peft_config).__name__} puts tokens of its own before a text, which the drafter's positions and masks don't "
            "know: use LoRA or another method that changes weights"
        )
    settings, kind = vars(peft_config), drafter.config.drafter_kind
    is_named = any(settings.get(name) for name in NAMING_LAYERS) or NAMING_LAYERS[0] not in settings
    if kind not in KINDS_OF_PEFTS_CHOICE and not is_named:
        raise layers_not_named(kind)


def check_base_is_named(drafter: PreTrainedModel) -> None:
    """Raise a `ValueError` if an adapter could not say what it belongs to."""
    if not drafter.name_or_path:
        raise ValueError(
            "keep_adapter saves the adapter alone, which has to name the drafter or model that it belongs to, and this one was "
            "not loaded from anywhere: save the drafter, load it with AutoDrafter.from_pretrained, and train that one"
        )
