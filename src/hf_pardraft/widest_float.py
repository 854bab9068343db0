"""The most precise numbers that a device computes with."""

import torch


def widest_float(device: torch.device | None) -> torch.dtype:
    """float64, but for Apple's GPUs, which have none; `None` is a CPU."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64
