"""A step of plain `generate` on a CPU: its attention, and its choice of tokens."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..generation.packing.token_attention import attention, token_attention
from ..likeliest import likeliest


class FastSteps(TorchFunctionMode):
    """While it is entered, a token's attention and a greedy choice take the ways that are fastest on a CPU.

    No model is changed.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.argmax and len(args) == 1 and kwargs == {"dim": -1}:
            return likeliest(*args)
        return (token_attention if func is attention else func)(*args, **kwargs)
