"""Our C++ as it is compiled for processors of other kinds."""

import platform

import pytest
import torch

from hf_pardraft.generation.packing import native_code

# What they are given, as far as this one understands it. Flags that come later take precedence.
PROCESSORS = ["-march=native", "-march=x86-64-v4", "-march=x86-64-v3", "-march=x86-64"]


def compile_for(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled from now on be for one of [`PROCESSORS`]; a test that this one can't run is skipped."""
    if "x86" in processor and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("another kind of processor")
    if processor == "-march=x86-64-v4" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("a processor without AVX-512")
    monkeypatch.setattr(native_code, "FLAGS", (*native_code.FLAGS, processor))
