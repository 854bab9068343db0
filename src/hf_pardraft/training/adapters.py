"""PEFT: drafters of which a few weights are trained, and what is saved of them."""

import copy
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .layouts import layout_of

# Where PARD's base architectures keep the embedding, and PARD-2's projection.
EMBEDDING, PROJECTION = "embed_tokens", "target_proj"


@dataclass
class AdapterOptions:
    """A LoRA adapter that is trained rather than all weights; without a rank there is none."""

    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train an adapter of this rank (needs peft); by default all weights."},
    )
    lora_alpha: int | None = field(
        default=None, metadata={"help": "What is learned counts alpha / rank times; twice the rank by default."}
    )
    lora_dropout: float | None = field(
        default=None, metadata={"help": "Share of an adapter's inputs that training drops; none by default."}
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Layers that it changes, as q_proj v_proj, or all-linear; by default PEFT's choice (for pard and pard2)."
        },
    )

    def config(self) -> Any:
        """PEFT's `LoraConfig`, `None` without a rank; an `ImportError` without PEFT."""
        if self.lora_rank is None:
            return None
        check_peft("--lora-rank")
        from peft import LoraConfig

        names = self.lora_target_modules
        return LoraConfig(
            r=self.lora_rank,
            lora_alpha=2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            lora_dropout=self.lora_dropout or 0.0,
            # PEFT takes this one as a text, and any other text as a pattern of whole names.
            target_modules=names[0] if names == ["all-linear"] else names,
            task_type="CAUSAL_LM",
        )


def check_adapter(options: AdapterOptions, keep_adapter: bool) -> None:
    """Raise a `ValueError` for an adapter that can't be, or settings of one where there is none."""
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


def check_peft(what: str) -> None:
    """Raise an `ImportError` if PEFT, which `what` needs, is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{what} needs the peft package: pip install peft")


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    if importlib.util.find_spec("peft") is None:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_drafter(model: nn.Module) -> nn.Module:
    """The drafter itself, whose layers PEFT has changed in place."""
    return model.get_base_model() if is_adapted(model) else model


def adapted(drafter: PreTrainedModel, peft_config: Any) -> nn.Module:
    """`drafter` with an adapter to train.

    A PARD drafter's mask token has to be learned, whatever else is frozen: its embedding is trained too, unless
    `peft_config` says itself what is trained of the embedding. So is the projection of PARD-2.

    Args:
        drafter: whose layers are changed in place.
        peft_config: a `LoraConfig` or another of PEFT's, which stays as it is.

    Raises:
        ImportError: without PEFT.
        ValueError: for a method that puts tokens of its own before a text.
    """
    check_peft("peft_config")
    from peft import get_peft_model

    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(peft_config).__name__} puts tokens of its own before a text, which the drafter's positions and masks don't "
            "know: use LoRA or another method that changes weights"
        )
    config = copy.deepcopy(peft_config)
    if layout_of(drafter).learns_mask_token:
        _train_mask_token(config, drafter)
    else:
        # These are no causal LMs, whose inputs PEFT would expect.
        config.task_type = None
    return get_peft_model(drafter, config)


def _train_mask_token(config: Any, drafter: PreTrainedModel) -> None:
    settings, saved = vars(config), list(vars(config).get("modules_to_save") or [])
    if drafter.reads_target and PROJECTION not in saved:
        saved.append(PROJECTION)
    if not settings.get("trainable_token_indices") and not any(name.endswith(EMBEDDING) for name in saved):
        if "trainable_token_indices" in settings:
            config.trainable_token_indices = {EMBEDDING: drafter.config.mask_token_ids}
        else:
            # Not every method can train single rows.
            saved.append(EMBEDDING)
    config.modules_to_save = saved or None


def check_base_is_named(drafter: PreTrainedModel) -> None:
    """Raise a `ValueError` if an adapter could not say what it belongs to."""
    if not drafter.name_or_path:
        raise ValueError(
            "keep_adapter saves the adapter alone, which has to name the drafter or model that it belongs to, and this one was "
            "not loaded from anywhere: save the drafter, load it with AutoDrafter.from_pretrained, and train that one"
        )


def save_merged(model: nn.Module, folder: str | Path) -> None:
    """Save an adapted drafter as an ordinary one; `model` stays as it is."""
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)


def save_drafter_config(drafter: PreTrainedModel, folder: str | Path) -> None:
    """Save, beside an adapter, what a base model's own files do not say of the drafter."""
    drafter.config.architectures = [type(drafter).__name__]
    drafter.config.save_pretrained(folder)
    drafter.generation_config.save_pretrained(folder)
