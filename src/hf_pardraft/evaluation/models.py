"""Load what `pardraft eval` compares: a target (or its shape with random weights), drafters, small assistants."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..models.base import ParallelDrafter, check_vocabulary
from ..pairing.remembered import public_place
from ..user_input.models import load_config, load_drafter, load_model, load_tokenizer
from ..user_input.options import DEVICE_MAPS, checked_device, checked_dtype


@dataclass(frozen=True)
class Placement:
    """Where models go and in what precision, as `from_pretrained` takes it, and whether the target's own code may run.

    Raises:
        ValueError: if there is no such dtype or device.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        checked_dtype(self.dtype)
        checked_device(self.device)

    def arguments(self) -> dict[str, str]:
        return {"dtype": self.dtype, "device_map": self.device}


@dataclass(frozen=True)
class DrafterSource:
    """A drafter to load.

    Attributes:
        name: of its result rows.
        source: folder or Hub repository.
    """

    name: str
    source: str

    @property
    def public_source(self) -> str:
        """What results call it."""
        return public_place(self.source)


def load_fitting_drafter(source: DrafterSource, placement: Placement, vocab_size: int) -> ParallelDrafter:
    """Load a drafter, and see that it has the target's vocabulary.

    Raises:
        OSError, ValueError: if it can't be loaded or does not fit.
    """
    drafter = load_drafter(source.source, **placement.arguments())
    name, advice = f"the drafter {source.name}", drafter.vocab_mismatch_advice
    check_vocabulary(name, drafter.config.vocab_size, vocab_size, advice)
    return drafter.eval()


def load_target(name: str, placement: Placement, random_weights: bool = False) -> PreTrainedModel:
    """Load the target, or make one of its shape."""
    if not random_weights:
        return load_model(name, placement.trust_remote_code, **placement.arguments()).eval()
    config = load_config(name, placement.trust_remote_code)
    dtype = config.dtype or torch.float32 if placement.dtype == "auto" else getattr(torch, placement.dtype)
    torch.manual_seed(0)
    # Weights are drawn where they are to be: on the host it would take minutes.
    with torch.device(chosen_device(placement.device)):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=placement.trust_remote_code)
    target.generation_config.eos_token_id = None
    return target.eval()


def chosen_device(device: str) -> torch.device:
    """The device of that name; "auto" and the like are the accelerator, if there is one."""
    if device not in DEVICE_MAPS:
        return torch.device(device)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def assistant_tokenizers(
    name: str, assistant: PreTrainedModel, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """What assisted decoding needs where vocabularies differ in size: both tokenizers."""
    if assistant.config.get_text_config(decoder=True).vocab_size == vocab_size:
        return {}
    if tokenizer is None:
        raise ValueError(
            f"{name} has another vocabulary than the target, so that its tokenizer is needed: pass --tokenizer"
        )
    return {"tokenizer": tokenizer, "assistant_tokenizer": load_tokenizer(name)}
