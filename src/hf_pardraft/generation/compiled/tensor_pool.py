"""Tensors that compiled rounds change in place, and that the next call of `generate` finds at the same addresses.

A CUDA graph reads and writes where it did when it was recorded. For other tensors it is recorded again, which takes as long as
many rounds, and the old recording stays in memory.
"""

import weakref
from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

# Devices that have graphs. On others tensors are made anew, and nothing is held between two calls.
HELD_ON = ("cuda",)
# Bytes that are held for calls unlike the last one (of other batch sizes, say).
SPARE_BYTES = 2**30

_free: "weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, list[torch.Tensor]]]" = weakref.WeakKeyDictionary()


class LastingTensors:
    """Hands out tensors to one call, and takes them back for later ones.

    Two calls at the same time never share any.

    Args:
        target: the model whose calls they serve.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        # What was given back last stands last.
        self.free = _free.setdefault(target, {})
        self.taken: list[tuple[Hashable, torch.Tensor]] = []

    def zeros(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros, with the dtype and device of `like`; the same one for a name and shape in every call."""
        if like.device.type not in HELD_ON:
            return like.new_zeros(shape)
        key = (name, shape, like.dtype, like.device)
        if self.free.get(key):
            tensor = self.free[key].pop().zero_()
        else:
            self._forget_spare()
            # A call under inference_mode would otherwise make tensors that no later call may change.
            with torch.inference_mode(False):
                tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)
            torch._dynamo.mark_static_address(tensor)
        self.taken.append((key, tensor))
        return tensor

    def copy(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The same for given values, with the strides that follow from their shape, on which compiled code depends."""
        return self.zeros(name, tuple(values.shape), values).copy_(values)

    def give_back(self) -> None:
        """Leave all that was handed out to the next call."""
        self._forget_spare()
        for key, tensor in self.taken:
            self.free[key] = [*self.free.pop(key, []), tensor]
        self.taken = []

    def _forget_spare(self) -> None:
        """Let go of the oldest of what is free, where that is more than may be held."""
        num_bytes = {key: sum(tensor.nbytes for tensor in tensors) for key, tensors in self.free.items()}
        excess = sum(num_bytes.values()) - SPARE_BYTES
        for key, size in num_bytes.items():
            if excess <= 0:
                return
            del self.free[key]
            excess -= size
