"""Linear layers that multiply by packed weights while a call runs, without compiling anything."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from ..target_side.structure import modules_of, parameters_of
from .packed_weights import (
    can_pack,
    forget,
    forget_changed,
    forget_slower,
    has_copies,
    is_packed,
    multiply,
    packed_product,
)
from .packing_trials import Trial, is_never_faster, trial_of
from .replaced_forwards import (
    ReplacedForward,
    has_replaced_forwards,
    is_called_here,
    may_compute_otherwise,
    replaced_forwards,
)

# Layers that hold their weights as `(out, in)`, and as `(in, out)`.
IS_TRANSPOSED = {nn.Linear: False, Conv1D: True}
# Copies may take this share of the memory that is free.
MEMORY_SHARE = 0.5
# What a container may use, and what it uses, in bytes; the first may say "max".
CONTAINER_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


class PackedForward(ReplacedForward):
    """Of a linear layer.

    Attributes:
        trials: which way is faster, by how many tokens come at once.
        is_product: as of the layer itself: rows of the weight times the input.
    """

    is_product = True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.is_transposed = _is_transposed(layer)
        self.trials: dict[int, Trial] = {}

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.layer._parameters["weight"]
        if not is_called_here() or input.dtype != weight.dtype:
            return self.usual(input)
        num_tokens = input.numel() // input.shape[-1]
        trial = self.trials.get(num_tokens)
        if trial is None:
            trial = self.trials[num_tokens] = trial_of(weight, self.is_transposed, num_tokens)
        if trial.packs is None:
            ways = functools.partial(self.usual, input), functools.partial(self._packed, input)
            return trial.product(*ways, is_packed(weight, self.is_transposed))
        return self._packed(input) if trial.packs else self.usual(input)

    def _packed(self, input: torch.Tensor) -> torch.Tensor:
        parameters = self.layer._parameters
        return packed_product(input, parameters["weight"], parameters["bias"], self.is_transposed)


class PackedProducts(TorchFunctionMode):
    """While it is entered, linear layers multiply by packed weights in this thread, and none of them is changed by it.

    So what is compiled of a model, in whatever thread, finds its layers as they are. Each function of torch costs more while it
    is entered, so that it is for single forwards over many tokens; rounds have [`packed_layers`].

    Args:
        *models: whose layers.
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.weights = {id(layer.weight) for model in models for layer in packable_layers(model)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        product = None if kwargs else _product_of(function, args)
        if product is not None and may_compute_otherwise():
            tokens, weight, *_ = product
            if id(weight) in self.weights and tokens.dtype == weight.dtype:
                return multiply(*product)
        return function(*args, **(kwargs or {}))


def _product_of(function: Callable, args: tuple) -> tuple | None:
    """What [`multiply`] takes, if this is how a linear layer multiplies: tokens, weight, bias, and whether it is transposed."""
    if function is functional.linear and len(args) == 3:
        return *args, False
    if function is torch.addmm and len(args) == 3 and args[0].ndim == 1:
        bias, tokens, weight = args
        return tokens, weight, bias, True
    return None


@contextmanager
def packed_layers(*models: nn.Module, wanted: bool) -> Iterator[None]:
    """While it is entered, models on a CPU multiply by packed weights, if there is memory for the copies.

    Args:
        *models: the target, a drafter, and what scores its tokens.
        wanted: whether the call's settings allow it; if not, the copies that there are go.
    """
    layers = [*{id(layer): layer for model in models for layer in packable_layers(model)}.values()]
    if not (wanted and layers) and has_copies():
        # Of layers, too, that can't be packed any more: they have moved, or become of another dtype.
        forget(parameters_of(*models))
    if not (wanted and layers and fit_in_memory(layers)):
        yield
        return
    forget_changed(parameters_of(*models))
    try:
        with replaced_forwards(layers, PackedForward):
            yield
    finally:
        forget_slower(layer.weight for layer in layers)


def fit_in_memory(layers: list[nn.Module]) -> bool:
    """Whether there is memory for the copies that are missing."""
    weights = {
        id(layer.weight): layer.weight for layer in layers if _may_be_packed(layer.weight, _is_transposed(layer))
    }
    missing = sum(weight.nbytes for weight in weights.values())
    # To ask takes reading files.
    return missing == 0 or missing <= MEMORY_SHARE * free_memory()


def _may_be_packed(weight: torch.Tensor, transposed: bool) -> bool:
    return not (is_packed(weight, transposed) or is_never_faster(weight, transposed))


def packable_layers(model: nn.Module) -> list[nn.Module]:
    """The linear layers of a model whose weights can be packed, and stay where they are.

    None of a model that accelerate hooks, or in which somebody has replaced a forward: what is compiled would be compiled anew
    for our layers. Parametrised, pruned, quantised, sharded or offloaded weights are left out.
    """
    if has_replaced_forwards(model):
        return []
    return [module for module in modules_of(model) if type(module) in IS_TRANSPOSED and _can_pack(module)]


def _is_transposed(layer: nn.Module) -> bool:
    return IS_TRANSPOSED[type(layer)]


def _can_pack(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    # A bias that is pruned, or a buffer, is none of the parameters.
    return type(weight) is nn.Parameter and "bias" in layer._parameters and can_pack(weight)


def free_memory() -> int:
    """Bytes that this machine, or the container in which we run, has left."""
    free = psutil.virtual_memory().available
    try:
        most, used = (int(path.read_text()) for path in CONTAINER_FILES)
    except (OSError, ValueError):
        return free
    return min(free, most - used)
