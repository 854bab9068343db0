"""AutoDrafter: reads a config.json of any known layout and loads the drafter that it describes."""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModel, GenerationConfig, PreTrainedConfig

from .checkpoints.atomic_folders import finish_interrupted
from .checkpoints.config_checks import check_config_fields
from .checkpoints.files import (
    ADAPTER_FILE,
    check_place,
    find_optional,
    find_separate,
    read_config_file,
    read_json_object,
)
from .checkpoints.published import drafter_class_for, find_drafter_class, native_fields
from .checkpoints.sources import located
from .checkpoints.tensor_files import TensorFacts, check_tensors
from .checkpoints.vocabulary import vocabulary_in
from .checkpoints.weights import account_for_weights, check_finite
from .models.base import PairedConfig, ParallelDrafter, find_file, hub_arguments, load_generation_config
from .models.modeling_pard import VOCABULARY_FILE, PardDrafter

__all__ = ["AutoDrafter", "drafter_class_for"]

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What PEFT may save of the base beside an adapter: patterns of names.
ADAPTERS_EMBEDDINGS = (r"\b(embed_tokens|lm_head)\.((token_adapter\.)?base_layer\.)?weight$",)


class AutoDrafter:
    """Loads whichever drafter a folder or Hub repository holds; not to be instantiated."""

    def __init__(self) -> None:
        raise OSError("AutoDrafter is used through AutoDrafter.from_pretrained(name_or_path)")

    @classmethod
    def from_pretrained(cls, name_or_path, **kwargs: Any) -> ParallelDrafter:
        """Load a drafter of any known layout. Code that came with it is not run, whatever its config says.

        A drafter of an unknown layout that brings its own code is loaded with that code, if `trust_remote_code=True`.

        Args:
            name_or_path: a folder, or a repository on the Hub. A PEFT adapter names the drafter or model that it belongs to,
                which is loaded, and the adapter merged into it.
            **kwargs: as for `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            OSError: if it is not there, or can't be reached (offline, gated, ...).
            ValueError: if the layout is not known, a file is damaged, or a weight is missing or left over.
        """
        return load_any(name_or_path, kwargs.pop("trust_remote_code", False), kwargs)


def find_drafter_config(name_or_path: Any, **source: Any) -> dict[str, Any] | None:
    """The config.json of a folder or repository, if it describes a drafter that this package reads.

    What is not there, can't be reached or holds no config is no drafter: whoever loads it then says what is wrong.

    Args:
        name_or_path: anything that may be a name.
        **source: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.
    """
    try:
        check_place(name_or_path)
        source = located(name_or_path, source)
        file = find_file(name_or_path, "config.json", **source)
        adapter = None if file is not None else find_file(name_or_path, ADAPTER_FILE, **source)
        if adapter is not None:
            # As PEFT saves it. What it belongs to says what it is.
            base = read_json_object(adapter).get("base_model_name_or_path")
            file = find_file(base, "config.json", **of_its_base(source))
        fields = {} if file is None else read_json_object(file)
    except (OSError, TypeError, ValueError):
        return None
    return None if find_drafter_class(fields) is None else fields


def load_any(name_or_path, trust_remote_code: bool, kwargs: dict[str, Any], adapters: tuple = ()) -> ParallelDrafter:
    """See [`AutoDrafter.from_pretrained`]; `adapters` are those that belong to what is loaded here."""
    check_place(name_or_path)
    finish_interrupted(name_or_path)
    kwargs = located(name_or_path, kwargs)
    if find_optional(name_or_path, ADAPTER_FILE, **hub_arguments(kwargs)):
        drafter = load_adapted(name_or_path, kwargs, adapters)
        # What is missing, or left over, would have been an error.
        info = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
        return (drafter, info) if kwargs.get("output_loading_info") else drafter
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        fields = config.to_dict()
    else:
        fields = read_config_file(config or name_or_path, **hub_arguments(kwargs))
    source = f"the config of {name_or_path}"
    check_config_fields(fields, source)
    if trust_remote_code and find_drafter_class(fields) is None and "AutoModel" in (fields.get("auto_map") or {}):
        return load_with_its_own_code(name_or_path, **kwargs)
    drafter_class = drafter_class_for(fields, source)
    if isinstance(config, PreTrainedConfig) and getattr(config, "drafter_kind", None) is None:
        # What AutoConfig makes of a layout that calls itself an ordinary model's.
        config_class = drafter_class.config_class
        kwargs = {**kwargs, "config": config_class.from_dict(native_fields(config_class, fields))}
    return drafter_class.from_pretrained(name_or_path, **kwargs)


def load_with_its_own_code(name_or_path, **kwargs: Any) -> ParallelDrafter:
    """Load a drafter with the code that came with it, which the user trusts.

    Raises:
        ValueError: if what it loads is no drafter.
    """
    model = AutoModel.from_pretrained(name_or_path, trust_remote_code=True, **kwargs)
    # A class loaded from a repository is not the class that we import.
    missing = [name for name in ("draft", "new_draft_state", "check_target") if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"{name_or_path} holds a {type(model).__name__}, which is no parallel drafter (it has no {', '.join(missing)}): load "
            "it with transformers' own classes"
        )
    return model


def of_its_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for what an adapter belongs to."""
    # The base is another repository, so what says where in the adapter's its files are is of no use.
    adapters_own = ("revision", "subfolder", "output_loading_info", "generation_config")
    return {name: value for name, value in kwargs.items() if name not in adapters_own}


def base_of_adapter(name_or_path, kwargs: dict[str, Any], adapters: tuple) -> str:
    """What an adapter belongs to, by name.

    Raises:
        ValueError: if it does not say that, is no adapter of PEFT's, or belongs to one of `adapters`, which belong to it.
    """
    from peft import PeftConfig

    source = hub_arguments(kwargs)
    file = find_optional(name_or_path, ADAPTER_FILE, **source)
    read_json_object(file)
    try:
        base_name = PeftConfig.from_pretrained(name_or_path, **source).base_model_name_or_path
    # A foreign file may be wrong in any way.
    except Exception as error:
        raise ValueError(
            f"{file} describes no adapter that PEFT reads ({type(error).__name__}: {error}): get the file again, or update peft"
        ) from error
    if not base_name or not isinstance(base_name, str):
        raise ValueError(
            f"the adapter in {name_or_path} does not say what it belongs to (got {base_name!r}): set base_model_name_or_path in "
            f"{ADAPTER_FILE}, or load the base yourself and the adapter with peft.PeftModel.from_pretrained"
        )
    seen = {os.path.realpath(name) for name in (*adapters, str(name_or_path))}
    if os.path.realpath(base_name) in seen:
        raise ValueError(
            f"the adapter in {name_or_path} says that it belongs to {base_name}, which is itself or belongs to it: set "
            f"base_model_name_or_path in {ADAPTER_FILE} to the model that it was trained on"
        )
    return base_name


def describe_adapter(name_or_path, source: dict[str, Any]) -> dict[str, TensorFacts]:
    """What the weight file of an adapter holds.

    Raises:
        OSError: if there is none.
        ValueError: if it is damaged, holds a program, or is a link that leads out of the folder.
    """
    path = find_separate(name_or_path, ADAPTER_WEIGHTS, **source)
    if path is None:
        raise OSError(
            f"the adapter in {name_or_path} has no weights: expected one of {', '.join(ADAPTER_WEIGHTS)}, get it again"
        )
    return check_tensors(path)


@contextmanager
def naming_base(name_or_path, base_name: str) -> Iterator[None]:
    """Say whose base it is that can't be read or reached."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the adapter in {name_or_path} belongs to {base_name}, which can't be loaded ({error}): get that, or set "
            f"base_model_name_or_path in {ADAPTER_FILE} to where it is"
        ) from error


def with_adapter(drafter: ParallelDrafter, name_or_path, source: dict[str, Any], facts: dict[str, TensorFacts]) -> Any:
    """`drafter` inside PEFT's model of it with an adapter, each weight of which is accounted for.

    Args:
        drafter: whose layers are changed in place.
        name_or_path, source: of the adapter.
        facts: what its weight file holds.

    Raises:
        ValueError: if its weights are not exactly those that its config asks for.
    """
    from peft import PeftModel, get_peft_model_state_dict

    try:
        with warnings.catch_warnings():
            # Told below, as an error.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(drafter, name_or_path, **source)
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        account_for_weights(facts, expected, ignored=ADAPTERS_EMBEDDINGS)
    except (ImportError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    # An adapter may fail to fit in any way, each with an error of another kind.
    except Exception as error:
        reason = " ".join((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}").split())
        raise ValueError(
            f"the weights of the adapter in {name_or_path} do not fit its {ADAPTER_FILE} and its base, a "
            f"{type(drafter).__name__} ({reason}). No weight is left random: get it again, or correct base_model_name_or_path"
        ) from error
    return adapted


def settings_with_adapter(drafter: ParallelDrafter, name_or_path, kwargs: dict[str, Any]) -> GenerationConfig:
    """The settings of an adapted drafter: the caller's, those beside the adapter, or, as PEFT saves none, its base's."""
    source, given = hub_arguments(kwargs), kwargs.get("generation_config")
    if given is not None:
        return GenerationConfig.from_dict(given.to_dict())
    is_saved = find_optional(name_or_path, "generation_config.json", **source) is not None
    return load_generation_config(name_or_path, **source) if is_saved else drafter.generation_config


def load_adapted(name_or_path: str, kwargs: dict[str, Any], adapters: tuple = ()) -> ParallelDrafter:
    """The drafter that an adapter belongs to, with the adapter merged in.

    A base that is an ordinary causal LM is adapted as training adapted it: the mask token is in the adapter's own config.

    Raises:
        ImportError: without PEFT.
        OSError: if its weights are not there, or what it belongs to can't be read or reached.
        ValueError: if the adapter does not say what it belongs to, that is no drafter and can't be made one, a file is damaged or
            a link that leads out of the folder, or a weight is missing or left over.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{name_or_path} is an adapter, which needs the peft package: pip install peft")
    source = hub_arguments(kwargs)
    base_name = base_of_adapter(name_or_path, kwargs, adapters)
    options = of_its_base(kwargs)
    with naming_base(name_or_path, base_name):
        base_config, _ = PreTrainedConfig.get_config_dict(base_name, **hub_arguments(options))
    config, _ = PreTrainedConfig.get_config_dict(name_or_path, **source)
    if find_drafter_class(config) is not None:
        check_config_fields(config, f"the config of {name_or_path}")
    if config.get("pard_token") is not None and base_config.get("pard_token") is None:
        if config.get("spd_type") == "pard2":
            raise ValueError(
                f"the adapter in {name_or_path} is of a PARD-2 drafter, and its base {base_name} is an ordinary model without a "
                "projection: save the drafter before it is trained, and train from there, or train without keep_adapter"
            )
        with naming_base(name_or_path, base_name):
            drafter = PardDrafter.from_causal_lm(
                base_name, config.get("pard_tokens") or config["pard_token"], **options
            )
    else:
        with naming_base(name_or_path, base_name):
            drafter = load_any(base_name, False, options, (*adapters, str(name_or_path)))
    facts = describe_adapter(name_or_path, source)
    vocabulary = find_separate(name_or_path, [VOCABULARY_FILE], **source)
    if vocabulary is not None:
        ids = vocabulary_in(vocabulary, drafter.config.vocab_size, config.get("draft_vocab_size"))
        known = drafter.draft_token_ids
        # An adapter of a head of its own is as large as that was. Where it is the base's, that keeps its head.
        if known is None or not torch.equal(known.cpu(), ids):
            drafter.set_draft_vocabulary(ids)
    # PEFT freezes what an adapter belongs to, and the whole drafter shall be trainable as ever.
    learned = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    merged = with_adapter(drafter, name_or_path, source, facts).merge_and_unload()
    check_finite(merged, name_or_path)
    for name, weight in merged.named_parameters():
        weight.requires_grad_(name in learned)
    merged.generation_config = settings_with_adapter(merged, name_or_path, kwargs)
    if config.keys() & PairedConfig.__annotations__.keys():
        # What the base was trained with is not what the adapter was; a field without a value is not written.
        for name in PairedConfig.__annotations__:
            setattr(merged.config, name, config.get(name))
    return merged.eval()
