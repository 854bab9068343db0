"""A layout of our own for weights on a CPU: products of a few tokens in the time in which the memory gives the weights.

Libraries read a matrix and compute with it in turns; `panels.cpp` asks for weights long before it computes with them, so that
eight tokens take hardly more time than one.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch.nn import functional

from . import huge_pages
from .native_code import compiled

SOURCE = Path(__file__).with_name("panels.cpp")
# Inputs that share a word of 32 bits.
INPUTS_OF_STEP = {torch.float32: 1, torch.bfloat16: 2}
# Of `panels.cpp`.
SHIFT = 29
# So many rows are summed at once where nothing is compiled, since each step copies them.
ROWS_AT_ONCE = 256


@functools.lru_cache
def library() -> ctypes.CDLL | None:
    """What `panels.cpp` was compiled to; `None` where it can't be."""
    library = compiled(SOURCE)
    if library is None:
        return None
    library.columns_of_panel.restype = ctypes.c_int64
    for multiply in (library.multiply_float32, library.multiply_bfloat16):
        multiply.restype, multiply.argtypes = None, [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    library.sum_rows.restype, library.sum_rows.argtypes = None, [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
    return library


def pack_panels(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as `panels.cpp` reads it.

    Args:
        matrix: `(out, in)` in float32 or bfloat16.

    Returns:
        `(panels, steps, columns, inputs of a step)`, filled up with zeros.

    Raises:
        RuntimeError: nothing was compiled, or not for this dtype.
    """
    if library() is None or matrix.dtype not in INPUTS_OF_STEP:
        raise RuntimeError(f"there are no panels of {matrix.dtype} on this machine")
    columns, inputs = library().columns_of_panel(), INPUTS_OF_STEP[matrix.dtype]
    matrix = functional.pad(matrix, (0, -matrix.shape[1] % inputs, 0, -matrix.shape[0] % columns))
    panels = matrix.view(-1, columns, matrix.shape[1] // inputs, inputs).transpose(1, 2)
    return huge_pages.empty(panels.shape, panels.dtype).copy_(panels)


def multiply_panels(
    tokens: torch.Tensor, packed: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`(..., out)` in the tokens' dtype, from tokens `(..., in)`, what [`pack_panels`] made, its matrix, and a bias `(out,)`.

    Sums are made in float32.
    """
    multiply = library().multiply_float32 if tokens.dtype == torch.float32 else library().multiply_bfloat16
    num_outputs, num_inputs = matrix.shape
    product = tokens.new_empty(*tokens.shape[:-1], num_outputs)
    tokens, bias = tokens.contiguous(), None if bias is None else bias.contiguous()
    pointers = tokens.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), product.data_ptr()
    multiply(*pointers, tokens.numel() // num_inputs, num_inputs, num_outputs, torch.get_num_threads())
    return product


def sum_rows(numbers: torch.LongTensor, factors: torch.LongTensor) -> torch.LongTensor:
    """For each row of `numbers (rows, columns)`, which lie in one piece, a sum that any change of it alters, if chance allows.

    Each number is mixed with the odd one of its column in `factors (columns,)`, so that no other one becomes the same, and a
    change of its high bits alters the low ones of the sum.
    """
    if library() is None:
        return torch.cat([_mixed(rows, factors).sum(dim=1) for rows in numbers.split(ROWS_AT_ONCE)])
    sums = numbers.new_empty(len(numbers))
    pointers = numbers.data_ptr(), factors.data_ptr(), sums.data_ptr()
    library().sum_rows(*pointers, *numbers.shape, torch.get_num_threads())
    return sums


def _mixed(numbers: torch.LongTensor, factors: torch.LongTensor) -> torch.LongTensor:
    """What `panels.cpp` calls so."""
    return (numbers ^ (numbers >> SHIFT & (1 << 64 - SHIFT) - 1)) * factors
