"""RMS norms as one operation of torch while a call runs on a CPU, to the last bit as transformers computes them in six."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..target_side.structure import modules_of
from .replaced_forwards import ReplacedForward, have_replaced_forwards, is_called_here, replaced_forwards

# What transformers' norms call the number that is added to the mean of squares.
EPSILONS = ("variance_epsilon", "eps")
# Scales of the numbers by which a norm is tried: where that number decides, and where it doesn't.
TRIED_SCALES = (1e-3, 1.0, 1e3)

# By norm, the dtypes in which it was tried, and whether it comes to the same.
_tried: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = weakref.WeakKeyDictionary()


class FusedNorm(ReplacedForward):
    """Of an RMS norm that has nothing but a weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.name_of_epsilon = _name_of_epsilon(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.layer._parameters["weight"]
        if len(args) != 1 or kwargs or args[0].dtype != weight.dtype or not is_called_here():
            return self.usual(*args, **kwargs)
        return fused_norm(args[0], weight, getattr(self.layer, self.name_of_epsilon))


def fused_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`states (..., size)` over the root of the mean of their squares, times `weight (size,)`, rounded before that."""
    return weight * torch.rms_norm(states, weight.shape, None, epsilon)


@contextmanager
def fused_norms(*models: nn.Module) -> Iterator[None]:
    """While it is entered, models on a CPU compute RMS norms in one operation; for rounds that are not compiled.

    Args:
        *models: the target, and a drafter.
    """
    norms = {id(norm): norm for model in models for norm in fusable_norms(model)}
    with replaced_forwards(norms.values(), FusedNorm):
        yield


def fusable_norms(model: nn.Module) -> list[nn.Module]:
    """The norms of a model that come to the same in one operation: those of transformers that were tried.

    None of a model that accelerate hooks, or in which somebody has replaced a forward.
    """
    modules = modules_of(model)
    kinds = {kind for kind in {*map(type, modules)} if _is_rms_norm(kind)}
    norms = [module for module in modules if type(module) in kinds and _has_plain_weight(module)]
    if not norms or have_replaced_forwards(modules):
        return []
    return [norm for norm in norms if _comes_to_the_same(norm)]


def _is_rms_norm(kind: type) -> bool:
    """Whether modules of this kind may be norms of transformers."""
    return kind.__name__.endswith("RMSNorm") and kind.__module__.startswith("transformers.")


def _has_plain_weight(norm: nn.Module) -> bool:
    """Whether a norm has a plain weight on a CPU, and a number that is added to the mean of squares."""
    weight = norm._parameters.get("weight")
    is_plain = type(weight) is nn.Parameter and weight.ndim == 1 and weight.device.type == "cpu"
    return is_plain and _name_of_epsilon(norm) is not None


def _name_of_epsilon(norm: nn.Module) -> str | None:
    own = vars(norm)
    return next((name for name in EPSILONS if name in own), None)


def _comes_to_the_same(norm: nn.Module) -> bool:
    """Whether a norm's own forward and one operation agree to the last bit, as was found when it was first asked for."""
    tried, dtype = _tried.setdefault(norm, {}), norm._parameters["weight"].dtype
    if dtype not in tried:
        tried[dtype] = _agrees(norm)
    return tried[dtype]


@torch.no_grad()
def _agrees(norm: nn.Module) -> bool:
    weight, epsilon = norm.weight, getattr(norm, _name_of_epsilon(norm))
    # Everybody's random numbers stay as they are.
    angles = torch.arange(len(TRIED_SCALES) * len(weight), dtype=torch.float32, device="cpu").view(-1, len(weight))
    states = (torch.tensor(TRIED_SCALES, device="cpu")[:, None] * (angles**2).sin()).to(weight.dtype)
    with torch.autocast("cpu", enabled=False):
        try:
            usual = type(norm).forward(norm, states)
        except (RuntimeError, TypeError):
            # It takes something else besides, or is of a dtype that it can't compute with.
            return False
        return usual.dtype == weight.dtype and torch.equal(usual, fused_norm(states, weight, epsilon))
