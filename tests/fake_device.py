"""Pretended devices, on a machine without any: their tensors compute on the CPU, and refuse to meet those of another device.

Within [`PretendedDevices`] the devices `PRETENDED[0]` and `PRETENDED[1]` exist: `.to(device)`, `device=device` and modules work
as ever. An operation on tensors of two devices raises what torch raises on a machine that has them.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A type that torch knows, that no CPU or GPU build implements, and that has nothing to initialise.
PRETENDED = (torch.device("maia:0"), torch.device("maia:1"))
CPU = torch.device("cpu")

aten = torch.ops.aten
TRANSFERS = {aten._to_copy.default, aten.copy_.default}
# Their indices may also be on the CPU; torch moves them.
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# A scalar tensor on the CPU may meet tensors of any device in these, besides the elementwise ones.
TAKE_SCALARS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor, *INDEXED}


class PretendedTensor(torch.Tensor):
    """A tensor that says it is on a pretended device, around one on the CPU whose storage it shares with its views."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False):
        if device is None:
            # accelerate makes a parameter by the class of the one that it replaces, which may be on any device.
            return torch.nn.Parameter(data, requires_grad)
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=device
        )
        self.on_cpu = data
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"PretendedTensor({self.on_cpu!r}, device={self.device})"

    # Torch's own versions of the following want a device that it was built for.

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def contiguous(self) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self.on_cpu.copy_(unwrapped(source))
        return self

    def __invert__(self) -> torch.Tensor:
        return self.bitwise_not()

    def __bool__(self) -> bool:
        return bool(self.on_cpu)

    def __int__(self) -> int:
        return int(self.on_cpu)

    def __float__(self) -> float:
        return float(self.on_cpu)

    def __index__(self) -> int:
        return self.on_cpu.__index__()

    def __getitem__(self, key: Any) -> torch.Tensor:
        self.check_key(key)
        return placed(self.on_cpu[unwrapped(key)], self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        # A slice takes a value from any device, as copy_ does.
        if self.check_key(key) and isinstance(value, torch.Tensor) and value.ndim:
            check_one_device([self.device, value.device], "index_put_")
        self.on_cpu[unwrapped(key)] = unwrapped(value)

    def check_key(self, key: Any) -> bool:
        """Raise torch's error for indices on the wrong device; says whether there are indices at all."""
        indices = tensors_in(key)
        check_one_device([self.device, *devices_of(indices, ignore=lambda index: index.device == CPU)], "index")
        return bool(indices)


class PretendedDevices(TorchDispatchMode):
    """The context in which the devices `PRETENDED` exist. Without gradients: autograd wants a device that torch was built for."""

    def __enter__(self):
        self.gradients = torch.no_grad()
        self.gradients.__enter__()
        # Else torch.tensor(..., device=...) makes its tensor where no mode sees it.
        self.lifts_cpu_only = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception):
        torch._C._set_only_lift_cpu_tensors(self.lifts_cpu_only)
        self.gradients.__exit__(*exception)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operator on the CPU, and say that its result is where torch would have put it."""
    device = args[0].device if func in TRANSFERS else device_of_operands(func, args, kwargs)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs = {**kwargs, "device": CPU if device in PRETENDED else device}
    result = func(*unwrapped(args), **{name: unwrapped(value) for name, value in kwargs.items()})
    if not func._schema.is_mutable:
        return placed(result, device)
    if result is not unwrapped(args[0]) or result.shape != args[0].shape:
        raise NotImplementedError(f"pretended devices can't do {func}")
    return args[0]


def device_of_operands(func, args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Where an operator's tensors are; raises torch's error if that is more than one device."""
    indices = tensors_in(args[1]) if func in INDEXED else []
    operands = tensors_in([args[0], *args[2:]] if func in INDEXED else args) + tensors_in(list(kwargs.values()))
    takes_scalars = torch.Tag.pointwise in func.tags or func in TAKE_SCALARS
    # What is written to is always bound to its device.
    devices = [args[0].device] if func._schema.is_mutable else []
    devices += devices_of(operands, ignore=lambda x: takes_scalars and x.ndim == 0 and x.device == CPU)
    devices += devices_of(indices, ignore=lambda x: x.device == CPU)
    check_one_device(devices, func)
    return devices[0] if devices else CPU


def devices_of(tensors: list[torch.Tensor], ignore) -> list[torch.device]:
    return [x.device for x in tensors if not ignore(x)]


def check_one_device(devices: list[torch.device], func: Any) -> None:
    if any(device != devices[0] for device in devices):
        first, second = sorted(set(map(str, devices)))[:2]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! ({func})"
        )


def tensors_in(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in tensors_in(value)] if isinstance(values, (list, tuple)) else []


def unwrapped(value: Any) -> Any:
    """Tensors of pretended devices as the tensors on the CPU that they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(unwrapped(item) for item in value)
    return value.on_cpu if isinstance(value, PretendedTensor) else value


def placed(result: Any, device: torch.device) -> Any:
    """The opposite of [`unwrapped`], for what an operator returns."""
    if isinstance(result, (list, tuple)):
        return type(result)(placed(item, device) for item in result)
    return PretendedTensor(result, device) if isinstance(result, torch.Tensor) and device in PRETENDED else result
