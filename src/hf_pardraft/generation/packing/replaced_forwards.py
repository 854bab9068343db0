"""Forwards of a model's layers that take the place of the usual ones while a call runs."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..target_side.structure import modules_of, once_a_call

# In which threads calls are running. Layers are replaced for all threads, since a model is one, but compute otherwise for these
# alone.
_calls = threading.local()
_lock = threading.Lock()


class ReplacedForward:
    """The forward of a layer that some call has replaced.

    Args:
        layer: whose forward it is.

    Attributes:
        usual: the layer's own.
        num_calls: how many calls need it; the last one to end puts the usual forward back.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.usual, self.num_calls = layer, layer.forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@contextmanager
def replaced_forwards(layers: Iterable[nn.Module], forward: Callable[[nn.Module], ReplacedForward]) -> Iterator[None]:
    """While it is entered, layers have another forward.

    Args:
        layers: each once.
        forward: makes it.
    """
    replaced: list[nn.Module] = []
    try:
        with _lock:
            for layer in layers:
                vars(layer).setdefault("forward", forward(layer)).num_calls += 1
                replaced.append(layer)
        with called_here():
            yield
    finally:
        with _lock:
            for layer in replaced:
                own = vars(layer)["forward"]
                own.num_calls -= 1
                if not own.num_calls:
                    del vars(layer)["forward"]


@contextmanager
def called_here() -> Iterator[None]:
    """While it is entered, a call runs in this thread."""
    _calls.number = getattr(_calls, "number", 0) + 1
    try:
        yield
    finally:
        _calls.number -= 1


def is_called_here() -> bool:
    """Whether to compute otherwise at this moment, in this thread, of which others may run a layer, too."""
    return getattr(_calls, "number", 0) > 0 and may_compute_otherwise()


def may_compute_otherwise() -> bool:
    """Whether nobody trains here, such as a caller's criterion, nor wants autocast, which has ways of its own."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def has_replaced_forwards(model: nn.Module) -> bool:
    """Whether accelerate, or somebody but us, has replaced or compiled the forward of some module of a model."""
    return once_a_call(_has_replaced_forwards, model)


def _has_replaced_forwards(model: nn.Module) -> bool:
    return any(map(_is_replaced, map(vars, modules_of(model))))


def _is_replaced(own: dict[str, Any]) -> bool:
    """[`has_replaced_forwards`], of a module with these attributes of its own."""
    is_ours = "forward" not in own or isinstance(own["forward"], ReplacedForward)
    return not is_ours or "_hf_hook" in own or own.get("_compiled_call_impl") is not None
