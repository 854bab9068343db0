"""What a model is made of, found out fast: each call asks several times before its first forward."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

# By id, since configs have no hash: a config, what it was like, and what was found then.
_known: dict[int, tuple[weakref.ref, Any, tuple[list[str], list[dict[str, Any]]]]] = {}
# Values that say themselves whether they are as before; layers do not follow from others (a tensor, a function).
PLAIN_TYPES = (str, int, float, bool, type(None))
# Lists and dicts in a config are as deep as this at most, if they count.
DEEPEST = 4
# Layers with an entry per token, so that what a rejected draft left can be removed.
ROLLBACK_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers whose state has no entry per token: what they have read can only be forgotten by going back to a snapshot.
RECURRENT_LAYER_TYPES = {"linear_attention", "conv"}


# `found` of the call that this thread is in: by what was looked for and where, that place and what was found.
_call = threading.local()


@contextmanager
def walking_once() -> Iterator[None]:
    """For one generate call: models are walked, and configs read, once each, though whoever looks at layers asks for them."""
    outer, _call.found = getattr(_call, "found", None), {}
    try:
        yield
    finally:
        _call.found = outer


def once_a_call(find: Callable[[Any], Any], place: Any) -> Any:
    """`find(place)`, which is found once in a call of `generate`."""
    in_call = getattr(_call, "found", None)
    if in_call is None:
        return find(place)
    key = find, id(place)
    if key not in in_call:
        # Kept, so that nothing else comes to have its id.
        in_call[key] = place, find(place)
    return in_call[key][1]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, once each: those of `model.modules()`, in another order and a fraction of its time.

    The list is not the caller's to change.
    """
    return once_a_call(_walked, model)


def text_config_of(target: PreTrainedModel) -> PreTrainedConfig:
    """The config of a target's text decoder: what its layers are like."""
    return once_a_call(_text_config, target.config)


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True)


def _walked(model: nn.Module) -> list[nn.Module]:
    found, ids = [model], {id(model)}
    # It grows on the way.
    for module in found:
        for part in module._modules.values():
            if part is not None and id(part) not in ids:
                ids.add(id(part))
                found.append(part)
    return found


def hooks_of(model: nn.Module) -> list[Callable]:
    """The hooks of the forwards of a model's modules."""
    return once_a_call(_hooks, model)


def _hooks(model: nn.Module) -> list[Callable]:
    found = []
    for module in modules_of(model):
        # Mostly there are none.
        if module._forward_pre_hooks or module._forward_hooks:
            found += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return found


def parameters_of(*models: nn.Module) -> list[nn.Parameter]:
    """All parameters of some models, once each, in a fraction of the time of `model.parameters()`."""
    modules = (module for model in models for module in modules_of(model))
    found = {id(value): value for module in modules for value in module._parameters.values() if value is not None}
    return list(found.values())


def told_by_hooks(target: PreTrainedModel) -> set[str]:
    """What PEFT tells the layers in each forward of this call, by name: which adapter is for which item, say."""
    told = (hook.keywords for hook in hooks_of(target) if isinstance(hook, partial))
    return {name for keywords in told for name, value in keywords.items() if value is not None}


def layer_types_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """For each layer of a text config its type, and arguments of its cache, as transformers finds them.

    What was found is kept until something in the config changes, between two calls of `generate`.
    """
    return once_a_call(_layer_types_of, config)


def _layer_types_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    ref, as_it_was, found = _known.get(id(config), (None, None, None))
    as_it_is = plain_values(vars(config))
    if ref is None or ref() is not config or as_it_is != as_it_was:
        found = get_layer_types_and_kwargs(config)
        ref = weakref.ref(config, partial(_forget, _known, id(config)))
        _known[id(config)] = ref, as_it_is, found
    return found


def _forget(known: dict, key: int, gone: weakref.ref) -> None:
    """A config is gone. At interpreter exit module globals may be gone already, so everything needed is passed in."""
    if known.get(key, (None,))[0] is gone:
        del known[key]


def plain_values(value: Any, depth: int = DEEPEST) -> Any:
    """A copy of a value in which numbers, texts, lists and dicts count, and all else stands for its type."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if depth and kind in (list, tuple):
        return [plain_values(item, depth - 1) for item in value]
    if depth and kind is dict:
        return {name: plain_values(item, depth - 1) for name, item in value.items()}
    return kind


def windows_of(config: PreTrainedConfig) -> dict[str, int | None]:
    """As [`attention_windows`], of which each call asks, too."""
    layers = zip(*layer_types_of(config), strict=True)
    return {layer_type: kwargs.get("sliding_window") for layer_type, kwargs in layers if layer_type != "dummy"}


def attended_layers(config: PreTrainedConfig) -> list[int]:
    """For each layer, the one whose entries it attends to: itself, or, if it stores none, the last of its type that does."""
    stored_types = layer_types_of(config)[0]
    last_of_type = {layer_type: index for index, layer_type in enumerate(stored_types)}
    return [
        last_of_type.get(config.layer_types[index], index) if layer_type == "dummy" else index
        for index, layer_type in enumerate(stored_types)
    ]


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether a target with this text config has recurrent layers besides attention."""
    layer_types = set(layer_types_of(config)[0])
    return bool(layer_types & RECURRENT_LAYER_TYPES and layer_types & ROLLBACK_LAYER_TYPES)


def has_attention_only(config: PreTrainedConfig) -> bool:
    """Whether the layers of a target of a recurrent family are, as its text config lists them, none of them recurrent.

    Granite 4.0's dense models are of this kind. A config that lists no layers is not believed: RWKV's, say.
    """
    layer_types = set(layer_types_of(config)[0])
    return "layer_types" in config.to_dict() and layer_types <= ROLLBACK_LAYER_TYPES | {"dummy"}
