"""Whether a call may run under `torch.inference_mode`, which costs less than `no_grad`: where nobody can tell the difference."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import SequenceBiasLogitsProcessor

from .choosing.processors import see_the_batch
from .packing.replaced_forwards import has_replaced_forwards
from .target_side.callers_cache import is_callers
from .target_side.probing import KNOWN_PACKAGES, OURS, attention_of_others, package_of, packages_of
from .target_side.rope import rope_changes
from .target_side.structure import hooks_of, is_hybrid, modules_of, text_config_of


def mode_for(
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    cache: Cache,
    drafter: nn.Module | None = None,
) -> AbstractContextManager:
    """What a call's forwards run in: inference mode, or, as ever, the `no_grad` of `generate`.

    A tensor that is made in inference mode can't be used in autograd, nor changed in place later. So nobody may get hold of one
    but those who are known not to keep it: the caller gets the text alone, made after the call; no processor, criterion or layer
    is a caller's own or keeps a tensor, no forward, nor function that it calls, was replaced or hooked (compilation, offloading,
    adapters for each item), nobody watches all modules or all functions of torch, attention is a known package's, and no layer
    changes a tensor of its own or is of a tensor subclass (quantised or sharded weights, frequencies that follow the text).

    Args:
        target, generation_config, logits_processor, stopping_criteria: as `generate` prepared them.
        cache: the one that `generate` prepared.
        drafter: whose forwards are meant, too.
    """
    is_returned = generation_config.return_dict_in_generate or is_callers(cache)
    looks = see_the_batch(logits_processor, stopping_criteria)
    # It makes its bias when it is first called.
    keeps = any(isinstance(processor, SequenceBiasLogitsProcessor) for processor in logits_processor)
    text_config = text_config_of(target)
    changes = is_hybrid(text_config) or rope_changes(text_config).any
    if is_returned or looks or keeps or changes or is_watched() or not is_untouched(target):
        return nullcontext()
    return torch.inference_mode() if drafter is None or is_untouched(drafter, "hf_pardraft") else nullcontext()


def is_untouched(model: nn.Module, *packages: str) -> bool:
    """Whether a model consists of known modules as their packages made them, with plain tensors for weights."""
    modules = modules_of(model)
    known = KNOWN_PACKAGES.union(packages)
    if not packages_of(modules) <= known or has_replaced_forwards(model):
        return False
    classes = set(map(type, modules))
    forwards = (getattr(of_class, "forward", None) for of_class in classes)
    if not all(is_of(scope.get(name), known) for forward in forwards for scope, name in called_by(forward)):
        return False
    weight_types = {type(weight) for module in modules for weight in module._parameters.values()}
    if not (all(map(is_transformers_own, hooks_of(model))) and weight_types <= {nn.Parameter, type(None)}):
        return False
    return not attention_of_others(modules) and getattr(model, "hf_quantizer", None) is None


@functools.lru_cache(maxsize=1024)
def called_by(forward: Callable | None) -> list[tuple[dict[str, Any], str]]:
    """What a forward may call of its module, as the names that it has there: other things may stand there later."""
    forward = inspect.unwrap(forward)
    # Compiled to something else, it has no code of Python's.
    if not isinstance(forward, FunctionType):
        return []
    scope = forward.__globals__
    return [(scope, name) for name in forward.__code__.co_names if callable(scope.get(name))]


def is_of(called: Any, packages: set[str]) -> bool:
    """Whether a function or class is from one of some packages, or Python's own, or another callable is of a class of theirs."""
    if isinstance(called, (type, FunctionType, BuiltinFunctionType)):
        return package_of(called) in packages or package_of(called) in sys.stdlib_module_names
    return package_of(type(called)) in packages


def is_watched() -> bool:
    """Whether somebody is shown what all modules put out, or what all functions of torch do."""
    is_hooked = torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return bool(is_hooked) or not {package_of(type(mode)) for mode in modes} <= KNOWN_PACKAGES | OURS


def is_transformers_own(hook: Callable) -> bool:
    """Whether a hook is one of those by which transformers collects hidden states, which hands them to the loop alone."""
    return package_of(hook if isinstance(hook, FunctionType) else type(hook)) == "transformers"
