"""Rotary frequencies keep their precision when a model changes its dtype, as they do when it is loaded in that dtype."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def exact_frequencies(model: nn.Module) -> Iterator[None]:
    """Let `model` be converted inside: floating-point buffers that no file holds change their device and not their dtype.

    Rotary frequencies are computed from the config, in float32. Rounded to bfloat16 they are off by up to 0.4 %, which at
    position 1,000 is radians, and a model that was converted would not be the one that is loaded from what it saved.
    """
    computed = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and buffer.is_floating_point() and not buffer.is_meta
    ]
    yield
    for module, name, buffer in computed:
        converted = module._buffers[name]
        if isinstance(converted, torch.Tensor) and converted.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(converted.device)
