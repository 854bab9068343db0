"""Where transformers is given a model's name, and the name is a drafter's: the drafter, not the model that its layout is like.

A PARD drafter's config.json is an ordinary Llama's or Qwen's, as its readers want it, and so is a published DFlash drafter's, so
that no registration of a `model_type` tells them apart. Classes that are named (`Qwen3ForCausalLM`) load what they always do.
"""

import functools
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pipelines import base as pipelines

from .auto import AutoDrafter, find_drafter_config
from .checkpoints.published import MUSE_GLIMMER, find_drafter_class
from .generation import hooks
from .models.base import CUSTOM_GENERATE, ParallelDrafter, find_file, hub_arguments
from .models.inputs import input_device

AUTO_CLASSES = (AutoModel, AutoModelForCausalLM)
_originals: dict[Any, Any] = {}
# By target: what calls of its `generate` named, by name, the time of the newest file there, and where and in what the target was.
_loaded: "weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int, torch.device, torch.dtype], ParallelDrafter]]"
_loaded = weakref.WeakKeyDictionary()


def install() -> None:
    """Let transformers' Auto classes, pipelines and `generate` take drafters by name. Calling it again changes nothing."""
    if _originals:
        return
    for auto_class in AUTO_CLASSES:
        _originals[auto_class] = vars(auto_class)["from_pretrained"]
        auto_class.from_pretrained = drafters_too(_originals[auto_class].__func__)
    _originals[pipelines] = pipelines.load_assistant_model
    pipelines.load_assistant_model = load_assistant_model
    hooks.load_named = arguments_with_drafter


def uninstall() -> None:
    """Put transformers' own back."""
    for auto_class in AUTO_CLASSES:
        auto_class.from_pretrained = _originals.pop(auto_class)
    pipelines.load_assistant_model = _originals.pop(pipelines)
    hooks.load_named = None


def drafters_too(original: Any) -> classmethod:
    """`from_pretrained` of an Auto class, which gives a drafter where there is one."""

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        if model_args or not names_a_drafter(cls, pretrained_model_name_or_path, kwargs):
            return original(cls, pretrained_model_name_or_path, *model_args, **kwargs)
        kwargs.pop("code_revision", None)
        return AutoDrafter.from_pretrained(pretrained_model_name_or_path, **kwargs)

    return classmethod(from_pretrained)


def names_a_drafter(auto_class: type, name: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what an Auto class is to load is a drafter, and not to be loaded with code of its own that the user trusts."""
    if kwargs.get("gguf_file") is not None:
        return False
    fields, config = find_drafter_config(name, **hub_arguments(kwargs)), kwargs.get("config")
    is_another = isinstance(config, PreTrainedConfig) and find_drafter_class(config.to_dict()) is None
    if fields is None or is_another or fields.get("model_type") == MUSE_GLIMMER:
        return False
    auto_map = fields.get("auto_map")
    brings_code = isinstance(auto_map, dict) and auto_class.__name__ in auto_map
    return not (brings_code and kwargs.get("trust_remote_code"))


def load_assistant_model(model, assistant_model, assistant_tokenizer):
    """transformers' own, for pipelines; a drafter shares its target's tokenizer, and has none to be compared."""
    if isinstance(assistant_model, (str, os.PathLike)):
        if model.can_generate() and find_drafter_config(assistant_model) is not None:
            return load_beside(model, assistant_model), None
    elif hooks.is_drafter(assistant_model):
        return assistant_model, None
    return _originals[pipelines](model, assistant_model, assistant_tokenizer)


def arguments_with_drafter(target: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the drafter in place of its name.

    `custom_generate` with the name of a drafter is how one is used where this package may not be installed. Here the package
    drafts, unless the user trusts code of that name's own.

    Args:
        target: whose `generate` was called.
        arguments: by keyword.

    Raises:
        OSError, ValueError: see [`AutoDrafter.from_pretrained`].
    """
    place = arguments.get("custom_generate")
    is_place = isinstance(place, (str, os.PathLike)) and not hooks.is_drafter(target)
    if is_place and find_drafter_config(place) is not None:
        arguments = {**arguments, "custom_generate": os.fspath(place)}
        arguments["assistant_model"] = arguments.get("assistant_model") or place
        if not arguments.get("trust_remote_code") or find_file(place, CUSTOM_GENERATE) is None:
            del arguments["custom_generate"]
            arguments.pop("trust_remote_code", None)
    name = arguments.get("assistant_model")
    if isinstance(name, (str, os.PathLike)):
        arguments = {**arguments, "assistant_model": drafter_named(name, target)}
    return arguments


def drafter_named(name: str | os.PathLike, target: PreTrainedModel) -> ParallelDrafter:
    """[`load_beside`], once for each target: calls of `generate` are many. A folder that has changed since is read again.

    So is one whose target was moved or converted: the drafter follows.
    """
    folder = Path(name)
    newest = max((file.lstat().st_mtime_ns for file in folder.rglob("*")), default=0) if folder.is_dir() else 0
    beside, key = _loaded.setdefault(target, {}), (str(name), newest, input_device(target), target.dtype)
    if key not in beside:
        drafter = load_beside(target, name)
        for outdated in [other for other in beside if other[0] == key[0]]:
            del beside[outdated]
        beside[key] = drafter
    return beside[key]


def load_beside(target: PreTrainedModel, name: str | os.PathLike) -> ParallelDrafter:
    """The drafter in a folder or repository, on its target's device and in its precision.

    Raises:
        OSError, ValueError: see [`AutoDrafter.from_pretrained`].
    """
    return AutoDrafter.from_pretrained(name, dtype=target.dtype).to(input_device(target))
