"""Load what `pardraft eval` compares: a target (or its shape with random weights), drafters, small assistants."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.config_checks import check_fresh_fields
from ..models.base import ParallelDrafter
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflare import DFlareDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import PardDrafter
from ..user_input.files import quoted
from ..user_input.models import load_config, load_model, load_tokenizer
from ..user_input.models import load_drafter as load_named_drafter
from ..user_input.options import DEVICE_MAPS

NEW = "new:"
NEW_KINDS = {"dflash": DFlashDrafter, "dflare": DFlareDrafter, "dart": DartDrafter}


@dataclass(frozen=True)
class Placement:
    """Where models go and in what precision, as `from_pretrained` takes it, and whether the target's own code may run."""

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def arguments(self) -> dict[str, str]:
        return {"dtype": self.dtype, "device_map": self.device}


@dataclass(frozen=True)
class DrafterSource:
    """A drafter to load, or (`kind`) an untrained one to make for the target, for simulations.

    Attributes:
        name: of its rows.
        source: folder or Hub repository; of a new PARD drafter, that of the model whose shape it has.
        kind: "pard", "dflash", "dflare" or "dart".
        fields: of a new drafter, for `for_target`.
    """

    name: str
    source: str | None
    kind: str | None = None
    fields: dict[str, Any] | None = None

    @property
    def public_source(self) -> str:
        """What results call it: of a local folder only its own name."""
        if self.source is None:
            return f"untrained {self.kind}"
        return Path(self.source).resolve().name if Path(self.source).is_dir() else self.source


def read_drafters(specs: list[str]) -> dict[str, DrafterSource]:
    """Understand `--drafter`: a folder or repository, `name=` before it, or `new:KIND,field=value,...`.

    Raises:
        ValueError: for an unknown kind, or a name that comes twice.
    """
    sources = {}
    for spec in specs:
        source = read_drafter(spec)
        if source.name in sources:
            raise ValueError(f"two drafters are called {source.name!r}: name one of them, as in --drafter other={spec}")
        sources[source.name] = source
    return sources


def read_drafter(spec: str) -> DrafterSource:
    if spec.startswith(NEW):
        return read_new_drafter(spec)
    name, has_name, source = spec.partition("=")
    if not has_name or Path(spec).exists():
        name, source = Path(spec).resolve().name if Path(spec).exists() else spec.rstrip("/").split("/")[-1], spec
    if source.startswith(NEW):
        made = read_new_drafter(source)
        return DrafterSource(name, made.source, made.kind, made.fields)
    return DrafterSource(name, source)


def read_new_drafter(spec: str) -> DrafterSource:
    """Understand `new:KIND,field=value,...`."""
    kind, *fields = spec.removeprefix(NEW).split(",")
    values = read_values(fields)
    known = (*NEW_KINDS, "pard")
    if kind not in known:
        raise ValueError(
            f"no new drafter of the kind {kind!r}: expected one of {', '.join(known)}, as in new:dflash,num_layers=5"
        )
    check_fresh_fields(values)
    # As it is written: a name may look like a number.
    values.pop("like", None)
    source = next((field.removeprefix("like=") for field in fields if field.startswith("like=")), None)
    if (kind == "pard") != (source is not None):
        raise ValueError(
            "a new PARD drafter needs the shape of a small language model, as in new:pard,like=Qwen/Qwen3-0.6B"
        )
    return DrafterSource(f"new {kind}", source, kind, values)


def read_values(pairs: list[str]) -> dict[str, Any]:
    """`name=value` texts as a dict; values are JSON where they can be, and texts otherwise.

    Raises:
        ValueError: if one is no pair.
    """
    values = {}
    for pair in pairs:
        name, has_value, text = pair.partition("=")
        if not has_value or not name:
            raise ValueError(f"expected name=value, got {pair!r}")
        values[name] = read_value(text)
    return values


def read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"expected a value, got JSON nested without end: {quoted(text)}") from error
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def load_drafter(source: DrafterSource, placement: Placement, vocab_size: int) -> ParallelDrafter:
    """Load a drafter, and see that it has the target's vocabulary.

    Raises:
        OSError, ValueError: if it can't be loaded or does not fit.
    """
    drafter = load_named_drafter(source.source, **placement.arguments())
    if drafter.config.vocab_size != vocab_size:
        raise ValueError(
            f"the drafter {source.name} has {drafter.config.vocab_size} tokens and the target {vocab_size}, and they must share "
            f"a tokenizer. {drafter.vocab_mismatch_advice}"
        )
    return drafter.eval()


def new_drafter(
    source: DrafterSource, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> ParallelDrafter:
    """An untrained drafter that fits the target, in its dtype."""
    if source.kind != "pard":
        drafter = NEW_KINDS[source.kind].for_target(target, **masked(source, target, tokenizer))
    else:
        config = load_config(source.source)
        config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        drafter = PardDrafter.from_causal_lm(
            AutoModelForCausalLM.from_config(config, trust_remote_code=False), tokenizer=tokenizer, **source.fields
        )
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def masked(source: DrafterSource, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """The fields of a new drafter; DART has no mask token, and so no use for a tokenizer."""
    return dict(source.fields) if source.kind == "dart" else {"tokenizer": tokenizer, **source.fields}


def load_target(name: str, placement: Placement, random_weights: bool) -> PreTrainedModel:
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
