"""Our C++ on a CPU, compiled once for a machine: in a second, by the compiler that inductor uses, into inductor's cache."""

import ctypes
from pathlib import Path

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What each of our sources begins with.
NUMBERS = Path(__file__).with_name("numbers.h")
# Inductor does without both unless it is told to.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")


def compiled(source: Path) -> ctypes.CDLL | None:
    """What a source was compiled to; `None` where there is no compiler for it, or no folder that can be written to."""
    # It takes a moment to import, and most machines with a GPU never need it.
    from torch._inductor.codecache import CppCodeCache

    try:
        # Code is kept by its text, and a folder may be shared by processors that have other instructions.
        instructions = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()
        text = f"// {instructions}\n{NUMBERS.read_text()}\n{source.read_text()}"
        return CppCodeCache.load(text, needs_vec_isa=False, extra_flags=FLAGS)
    except (RuntimeError, OSError, ImportError) as error:
        logger.info(f"Without {source.name} torch's libraries compute here, since it can't be compiled: {error}")
        return None
