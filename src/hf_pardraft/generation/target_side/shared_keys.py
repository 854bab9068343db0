"""Attention of heads that share keys, on a CPU: where several tokens have a mask, the keys are not copied for each head."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention

from .structure import modules_of

# transformers (5.23) repeats keys and values wherever there is a mask, for the sake of kernels of other devices. The CPU's does
# without, and its results are the same to the last bit. (Of a single token the heads become the queries of one, unless it is
# compiled; that is as fast, and rounds otherwise.) What decides is a function of the module.
DECIDES = "use_gqa_in_sdpa"

_lock = threading.Lock()
_num_calls, _replaced = 0, None


@contextmanager
def shared_keys(model: PreTrainedModel) -> Iterator[None]:
    """While a call on a CPU runs, scaled dot-product attention on a CPU keeps the keys that heads share as they are.

    Args:
        model: the target. What somebody has compiled of it would be compiled anew for this, and is left alone.
    """
    global _num_calls, _replaced
    if model.device.type != "cpu" or any(module._compiled_call_impl is not None for module in modules_of(model)):
        yield
        return
    with _lock:
        if not _num_calls:
            _replaced = mock.patch.object(sdpa_attention, DECIDES, _deciding(getattr(sdpa_attention, DECIDES)))
            _replaced.start()
        _num_calls += 1
    try:
        yield
    finally:
        with _lock:
            _num_calls -= 1
            if not _num_calls:
                _replaced.stop()


def _deciding(usual: Callable[..., bool]) -> Callable[..., bool]:
    """What decides in the place of `usual`. Other threads may train meanwhile, for which it is slower."""

    def use_gqa_in_sdpa(attention_mask: torch.Tensor | None, key: torch.Tensor, *args: torch.Tensor) -> bool:
        are_several = attention_mask is None or attention_mask.shape[-2] > 1 or torch.compiler.is_compiling()
        is_ours = key.device.type == "cpu" and not torch.is_grad_enabled() and are_several
        return is_ours or usual(attention_mask, key, *args)

    return use_gqa_in_sdpa
