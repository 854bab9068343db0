"""RMS norms as one operation while a call runs on a CPU, to the last bit as transformers computes them in six."""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..target_side.structure import modules_of
from .native_code import kernels_of
from .replaced_forwards import ReplacedForward, has_replaced_forwards, is_called_here, replaced_forwards

# What transformers' norms call the number that is added to the mean of squares.
EPSILONS = ("variance_epsilon", "eps")
# Scales of the numbers by which a norm is tried: where that number decides, and where it doesn't.
TRIED_SCALES = (1e-3, 1.0, 1e3)
# Rows of each scale: sums in another order may come to the same in one of them.
TRIED_ROWS = 8

SOURCE = Path(__file__).with_name("rms_norm.cpp")
# Numbers of a row below which torch sums in another order than the kernel.
FEWEST_NUMBERS = 8
# Numbers up to which one thread is as fast as several.
MOST_NUMBERS = 1 << 16

# From the numbers, a weight, and what is added to the mean of squares.
Way = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
# By norm, the dtypes in which it was tried, and the fastest way that comes to the same.
_tried: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, Way | None]] = weakref.WeakKeyDictionary()


class FusedNorm(ReplacedForward):
    """Of an RMS norm that has nothing but a weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.name_of_epsilon, self.way = _name_of_epsilon(layer), way_of(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.layer._parameters["weight"]
        if len(args) != 1 or kwargs or args[0].dtype != weight.dtype or not is_called_here():
            return self.usual(*args, **kwargs)
        return self.way(args[0], weight, getattr(self.layer, self.name_of_epsilon))


def torch_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`states (..., size)` over the root of the mean of their squares, times `weight (size,)`, rounded before that."""
    return weight * torch.rms_norm(states, weight.shape, None, epsilon)


@functools.lru_cache
def kernels() -> dict[torch.dtype, Callable[..., None]]:
    """The kernel for each dtype; none where they can't be compiled."""
    names = {torch.float32: "norm_float32", torch.bfloat16: "norm_bfloat16"}
    arguments = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]
    return kernels_of(SOURCE, names, arguments, rounds_twice=True)


def kernel_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As [`torch_norm`], of few rows by a kernel of our own, which takes a third of the time."""
    size, kernel = len(weight), kernels().get(states.dtype)
    if (
        kernel is None
        or type(states) is not torch.Tensor
        or torch.compiler.is_compiling()
        or not (states.is_contiguous() and weight.is_contiguous())
        or states.device.type != "cpu"
        or states.numel() > MOST_NUMBERS
        or states.shape[-1] != size
    ):
        return torch_norm(states, weight, epsilon)
    normed = torch.empty_like(states)
    pointers = states.data_ptr(), weight.data_ptr(), normed.data_ptr()
    kernel(*pointers, states.numel() // size, size, epsilon)
    return normed


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
    if not norms or has_replaced_forwards(model):
        return []
    return [norm for norm in norms if way_of(norm) is not None]


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


def way_of(norm: nn.Module) -> Way | None:
    """The fastest way that agrees with a norm's own forward to the last bit, as was found when it was first asked for."""
    tried, dtype = _tried.setdefault(norm, {}), norm._parameters["weight"].dtype
    if dtype not in tried:
        tried[dtype] = _found_way(norm)
    return tried[dtype]


@torch.no_grad()
def _found_way(norm: nn.Module) -> Way | None:
    weight, epsilon = norm.weight, getattr(norm, _name_of_epsilon(norm))
    # Everybody's random numbers stay as they are.
    scales = torch.tensor(TRIED_SCALES, device="cpu").repeat(TRIED_ROWS)[:, None]
    angles = torch.arange(len(scales) * len(weight), dtype=torch.float32, device="cpu").view(-1, len(weight))
    states = (scales * (angles**2).sin()).to(weight.dtype)
    has_kernel = len(weight) >= FEWEST_NUMBERS and weight.dtype in kernels()
    with torch.autocast("cpu", enabled=False):
        try:
            usual = type(norm).forward(norm, states)
        except (RuntimeError, TypeError):
            # It takes something else besides, or is of a dtype that it can't compute with.
            return None
        ways = [kernel_norm, torch_norm] if has_kernel else [torch_norm]
        agreeing = (way for way in ways if torch.equal(usual, way(states, weight, epsilon)))
        return next(agreeing, None) if usual.dtype == weight.dtype else None
