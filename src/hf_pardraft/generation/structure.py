"""What a model is made of, found out fast: each call asks several times before its first forward."""

import copy
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

# By id, since configs have no hash: a config, what it was like, and what was found then.
_known: dict[int, tuple[weakref.ref, dict[str, Any], tuple[list[str], list[dict[str, Any]]]]] = {}


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, once each: those of `model.modules()`, in another order and a fraction of its time."""
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


def layer_types_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """For each layer of a text config its type, and arguments of its cache, as transformers finds them.

    What was found is kept until something in the config changes.
    """
    ref, as_it_was, found = _known.get(id(config), (None, None, None))
    if ref is None or ref() is not config or vars(config) != as_it_was:
        found = get_layer_types_and_kwargs(config)
        key = id(config)
        ref = weakref.ref(config, lambda gone: _known.pop(key) if _known.get(key, (None,))[0] is gone else None)
        _known[key] = ref, copy.deepcopy(vars(config)), found
    return found
