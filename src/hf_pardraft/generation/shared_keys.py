"""Attention of heads that share keys, on a CPU: with a mask, too, the keys are not copied for each head."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from transformers.integrations import sdpa_attention

# transformers (5.23) repeats keys and values wherever there is a mask, for the sake of kernels of other devices. The CPU's does
# without, and its results are the same to the last bit. What decides is a function of the module; older ones have none.
DECIDES = "use_gqa_in_sdpa"

_lock = threading.Lock()
_num_calls, _replaced = 0, None


@contextmanager
def shared_keys(device: torch.device) -> Iterator[None]:
    """While a call on a CPU runs, scaled dot-product attention on a CPU keeps the keys that heads share as they are."""
    global _num_calls, _replaced
    if device.type != "cpu" or not hasattr(sdpa_attention, DECIDES):
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


def _deciding(usual):
    """What decides in the place of `usual`. Other threads may train meanwhile, for which it is slower."""

    def use_gqa_in_sdpa(attention_mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
        is_ours = key.device.type == "cpu" and not torch.is_grad_enabled()
        return is_ours or usual(attention_mask, key, value)

    return use_gqa_in_sdpa
