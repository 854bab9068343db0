"""Linear layers that multiply by packed weights while a call runs, without compiling anything."""

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .packed_weights import can_pack, forget, forget_changed, is_packed, multiply

# Layers that hold their weights as `(out, in)`, and as `(in, out)`.
IS_TRANSPOSED = {nn.Linear: False, Conv1D: True}
# Copies may take this share of the memory that is free.
MEMORY_SHARE = 0.5
# What a container may use, and what it uses, in bytes; the first may say "max".
CONTAINER_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))

# In which threads calls are running. Layers are replaced for all threads, since a model is one, but pack for these alone.
_calls = threading.local()
_lock = threading.Lock()


class PackedForward:
    """The forward of a linear layer that some call has replaced.

    Args:
        layer: a linear layer.

    Attributes:
        num_calls: how many calls need it; the last one to end puts the usual forward back.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.usual, self.num_calls = layer, layer.forward, 0
        self.is_transposed = IS_TRANSPOSED[type(layer)]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        parameters = self.layer._parameters
        weight = parameters["weight"]
        if not packs_here() or input.dtype != weight.dtype:
            return self.usual(input)
        tokens = multiply(input.reshape(-1, input.shape[-1]), weight, parameters["bias"], self.is_transposed)
        return tokens.view(*input.shape[:-1], tokens.shape[-1])


def packs_here() -> bool:
    """Whether to multiply by packed weights at this moment, in this thread.

    Besides the calls that wanted it, other threads may run a layer, and a caller's criterion may train it. Autocast has products
    of its own.
    """
    return getattr(_calls, "number", 0) > 0 and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


class PackedLayers:
    """While it is entered, layers multiply by packed weights.

    Args:
        layers: linear layers that [`packable_layers`] has found.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        forget_changed(layer.weight for layer in self.layers)
        with _lock:
            for layer in self.layers:
                vars(layer).setdefault("forward", PackedForward(layer)).num_calls += 1
        _calls.number = getattr(_calls, "number", 0) + 1

    def __exit__(self, *error: object) -> None:
        _calls.number -= 1
        with _lock:
            for layer in self.layers:
                forward = vars(layer)["forward"]
                forward.num_calls -= 1
                if not forward.num_calls:
                    del vars(layer)["forward"]


def packed_layers(*models: PreTrainedModel, wanted: bool) -> AbstractContextManager:
    """What a call's forwards run in such that models on a CPU multiply by packed weights, if there is memory for the copies.

    Args:
        *models: the target, and a drafter.
        wanted: whether the call's settings allow it; if not, the copies that there are go.
    """
    layers = [layer for model in models for layer in packable_layers(model)]
    if not wanted:
        forget(layer.weight for layer in layers)
        return nullcontext()
    missing = {id(layer.weight): layer.weight.nbytes for layer in layers if not _is_packed(layer)}
    if not layers or sum(missing.values()) > MEMORY_SHARE * free_memory():
        return nullcontext()
    return PackedLayers(layers)


def packable_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The linear layers of a model whose weights can be packed, and stay where they are.

    Left out are layers that somebody has changed: others' forwards (compilation, offloading), parametrised, quantised, sharded or
    offloaded weights.
    """
    if any("_hf_hook" in vars(module) for module in model.modules()):
        return []
    return [module for module in model.modules() if type(module) in IS_TRANSPOSED and _can_pack(module)]


def _can_pack(layer: nn.Module) -> bool:
    weight, forward = layer._parameters.get("weight"), vars(layer).get("forward")
    is_usual = forward is None or type(forward) is PackedForward
    return is_usual and type(weight) is nn.Parameter and can_pack(weight) and multiplies(weight.dtype)


@functools.lru_cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether packed weights are multiplied rightly on this machine. What calls do by default is tried first."""
    with torch.no_grad():
        weight, tokens = nn.Parameter(torch.eye(16, dtype=dtype)), torch.arange(32, dtype=dtype).view(2, 16)
        try:
            return torch.equal(multiply(tokens, weight, None, False), tokens)
        except (AttributeError, NotImplementedError, RuntimeError):
            return False


def _is_packed(layer: nn.Module) -> bool:
    return is_packed(layer.weight, IS_TRANSPOSED[type(layer)])


def free_memory() -> int:
    """Bytes that this machine, or the container in which we run, has left."""
    free = psutil.virtual_memory().available
    try:
        most, used = (int(path.read_text()) for path in CONTAINER_FILES)
    except (OSError, ValueError):
        return free
    return min(free, most - used)
