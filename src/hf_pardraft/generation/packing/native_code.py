"""Our C++ on a CPU, compiled once for a machine: in a second, by the compiler that inductor uses, into inductor's cache."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What each of our sources begins with.
NUMBERS = Path(__file__).with_name("numbers.h")
# Inductor does without them unless it is told to; clang makes vectors of loops by itself, and refuses GCC's flag for it.
FLAGS = ("-ffp-contract=fast",)
FLAGS_OF_GCC = ("-ftree-loop-vectorize",)
# Of several, the last one counts.
ROUNDING_TWICE = ("-ffp-contract=off",)


def compiled(source: Path, rounds_twice: bool = False) -> ctypes.CDLL | None:
    """What a source was compiled to; `None` where there is no compiler for it, or no folder that can be written to.

    Args:
        source: a file beside this one.
        rounds_twice: whether a product is rounded before something is added to it, which takes longer.
    """
    # It takes a moment to import, and most machines with a GPU never need it.
    from torch._inductor import cpp_builder
    from torch._inductor.codecache import CppCodeCache

    try:
        flags = (*FLAGS_OF_GCC, *FLAGS) if cpp_builder.is_gcc() else FLAGS
        flags = (*flags, *ROUNDING_TWICE) if rounds_twice else flags
        # Code is kept by its text, and a folder may be shared by processors that have other instructions.
        instructions = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()
        text = f"// {instructions}\n{NUMBERS.read_text()}\n{source.read_text()}"
        # What vectors the processor has is found out by compiling, and of no use here. torch 2.7 always finds it out.
        begin = CppCodeCache.load_async
        told = {"needs_vec_isa": False} if "needs_vec_isa" in signature(begin).parameters else {}
        return begin(text, extra_flags=flags, **told)()
    except (RuntimeError, OSError, ImportError) as error:
        logger.info(f"Without {source.name} torch's libraries compute here, since it can't be compiled: {error}")
        return None


def kernels_of(
    source: Path, names: Mapping[Any, str], arguments: Sequence[type], rounds_twice: bool = False
) -> dict[Any, Callable[..., None]]:
    """Functions of a source that return nothing, by what tells them apart; none where it can't be compiled.

    Args:
        source, rounds_twice: see [`compiled`].
        names: of the functions.
        arguments: what each of them takes.
    """
    library = compiled(source, rounds_twice)
    if library is None:
        return {}
    found = {key: getattr(library, name) for key, name in names.items()}
    for kernel in found.values():
        kernel.restype, kernel.argtypes = None, arguments
    return found
