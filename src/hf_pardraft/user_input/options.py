"""What a user may ask for as a dtype, a device or a temperature: checked by name, before anything is loaded."""

import torch

# What `from_pretrained` understands besides devices, to spread a model over several.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# Below, logits divided by a temperature leave the range of float32; above, all tokens are alike.
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 1e-6, 1e6


def checked_dtype(name: str) -> str:
    """The name of a dtype that weights can have.

    Raises:
        ValueError: if it is none.
    """
    found = vars(torch).get(name)
    is_float = isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1
    if name != "auto" and not is_float:
        raise ValueError(f"no dtype {name!r} for weights: expected auto, float32, bfloat16, float16 or float64")
    return name


def available_devices() -> list[str]:
    """The devices of this machine that torch can use."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count()
    names = [] if accelerator is None else [f"{accelerator.type}:{index}" for index in range(count)]
    return ["cpu", *names]


def checked_device(name: str) -> str:
    """The name of a device that is there, or a way to spread a model over all of them.

    Raises:
        ValueError: if it is none.
    """
    if name in DEVICE_MAPS:
        return name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device {name!r}: expected auto or one of {', '.join(available_devices())}") from error
    there = available_devices()
    if device.type != "cpu" and f"{device.type}:{device.index or 0}" not in there:
        raise ValueError(
            f"device {name!r} is not to be had, or not by this build of torch: expected auto or one of {', '.join(there)}"
        )
    return name


def check_temperature(value: float, name: str = "temperature") -> None:
    """Raise a `ValueError` unless logits can be divided by `value`, or it is 0, which means greedy."""
    if value != 0 and not LEAST_TEMPERATURE <= value <= GREATEST_TEMPERATURE:
        raise ValueError(
            f"expected {name} 0 (greedy), or from {LEAST_TEMPERATURE:g} to {GREATEST_TEMPERATURE:g}, got {value}"
        )
