"""Scaled dot-product attention of transformers' models on a CPU while a call runs: of few tokens by a kernel of our own."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..target_side.structure import modules_of
from .replaced_forwards import called_here, is_called_here
from .token_attention import attend, takes

NAME = "sdpa"
# What makes it another attention, if a model says it.
SAYS_MORE = ("position_bias", "softcap", "cache")
# transformers (5.23) repeats keys and values that heads share wherever there is a mask, for the sake of kernels of other devices.
# The CPU's does without, and its results are the same to the last bit. What decides is a function of the module.
DECIDES = "use_gqa_in_sdpa"

_lock = threading.Lock()
_num_calls, _put_back = 0, None


@contextmanager
def fast_attention(model: PreTrainedModel) -> Iterator[None]:
    """While a call on a CPU runs, attention of few tokens is computed by our kernel, and keys that heads share are not copied.

    Args:
        model: the target. What somebody has compiled of it would be compiled anew for this, and is left alone.
    """
    global _num_calls, _put_back
    if model.device.type != "cpu" or any(module._compiled_call_impl is not None for module in modules_of(model)):
        yield
        return
    with _lock:
        if not _num_calls:
            _put_back = _replace()
        _num_calls += 1
    try:
        with called_here():
            yield
    finally:
        with _lock:
            _num_calls -= 1
            if not _num_calls:
                _put_back()


def _replace() -> Callable[[], None]:
    """Replace transformers' functions, unless somebody else has; returns what puts them back."""
    decides = mock.patch.object(sdpa_attention, DECIDES, _deciding(getattr(sdpa_attention, DECIDES)))
    decides.start()
    usual = ALL_ATTENTION_FUNCTIONS[NAME]
    if usual is not sdpa_attention.sdpa_attention_forward:
        return decides.stop
    ALL_ATTENTION_FUNCTIONS[NAME] = ours = _attending(usual)

    def put_back() -> None:
        decides.stop()
        if ALL_ATTENTION_FUNCTIONS[NAME] is ours:
            del ALL_ATTENTION_FUNCTIONS[NAME]

    return put_back


def _is_ours() -> bool:
    """Whether this is for a call of ours. Other threads may train meanwhile, or write without a drafter."""
    return not torch.is_grad_enabled() if torch.compiler.is_compiling() else is_called_here()


def _attending(usual: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """What attends in the place of `usual`."""

    @functools.wraps(usual)
    def sdpa_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if takes(query, key, value, attention_mask) and _is_ours():
            says_more = dropout or any(kwargs.get(name) is not None for name in SAYS_MORE)
            sees_all = attention_mask is not None or query.shape[2] == 1 or not _is_causal(module, is_causal)
            if sees_all and not says_more:
                scale = query.shape[-1] ** -0.5 if scaling is None else scaling
                return attend(query, key, value, attention_mask, scale), None
        return usual(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)

    return sdpa_attention_forward


def _is_causal(module: torch.nn.Module, says: bool | None) -> bool:
    return getattr(module, "is_causal", True) if says is None else says


def _deciding(usual: Callable[..., bool]) -> Callable[..., bool]:
    """What decides in the place of `usual`."""

    def use_gqa_in_sdpa(attention_mask: torch.Tensor | None, key: torch.Tensor, *args: torch.Tensor) -> bool:
        # Of a single token the heads become the queries of one, unless it is compiled.
        are_several = attention_mask is None or attention_mask.shape[-2] > 1 or torch.compiler.is_compiling()
        is_ours = key.device.type == "cpu" and not torch.is_grad_enabled() and are_several
        return is_ours or usual(attention_mask, key, *args)

    return use_gqa_in_sdpa
