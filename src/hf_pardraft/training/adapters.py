"""PEFT: drafters of which a few weights are trained, and what is saved of them."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..checkpoints.vocabulary import save_vocabulary
from ..models.target_projection import PROJECTION
from .adapter_checks import check_peft
from .layouts import layout_of
from .run_options import AdapterOptions

# Where PARD's base architectures keep the embedding.
EMBEDDING = "embed_tokens"


def lora_config(options: AdapterOptions) -> Any:
    """PEFT's `LoraConfig`, `None` without a rank; an `ImportError` without PEFT."""
    if options.lora_rank is None:
        return None
    check_peft("--lora-rank")
    from peft import LoraConfig

    names = options.lora_target_modules
    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha,
        lora_dropout=options.lora_dropout or 0.0,
        # PEFT takes this one as a text, and any other text as a pattern of whole names.
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )


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
        peft_config: a `LoraConfig` or another of PEFT's that has been checked, which stays as it is.
    """
    from peft import get_peft_model

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
            # Not every method can train single rows of a matrix.
            saved.append(EMBEDDING)
    config.modules_to_save = saved or None


def save_merged(model: nn.Module, folder: str | Path) -> None:
    """Save an adapted drafter as an ordinary one; `model` stays as it is."""
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)


def save_drafter_config(drafter: PreTrainedModel, folder: str | Path) -> None:
    """Save, beside an adapter, what a base model's own files do not say of the drafter."""
    drafter.config.architectures = [type(drafter).__name__]
    drafter.config.save_pretrained(folder)
    drafter.generation_config.save_pretrained(folder)
    if drafter.draft_token_ids is not None:
        save_vocabulary(drafter, folder)
