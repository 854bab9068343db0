"""The layouts in which a matrix of weights is read: with several tokens in little more time than with one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .panels import multiply_panels, pack_panels

# Layouts are made for about so many tokens, and serve any number of them.
ONEDNN_TOKENS, MKL_TOKENS = 16, 64
ONEDNN_SUPPORTS = {
    torch.float32: torch.backends.mkldnn.is_available,
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
# What a layout is tried with before it is used: matrices of two shapes, and tokens.
SHAPES, TOKENS = ((32, 16), (48, 80)), (1, 2, 8, 17, 130)


@dataclass(frozen=True)
class WeightLayout:
    """How a matrix `(out, in)` is packed, and tokens are multiplied by it.

    Attributes:
        name: of the library that does it, or of the layout.
        pack: what it makes of the matrix, which lies in one piece.
        multiply: `(..., out)`, from tokens `(..., in)`, what was packed, the matrix that it was packed of, and a bias.
    """

    name: str
    pack: Callable[[torch.Tensor], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _pack_onednn(matrix: torch.Tensor) -> torch.Tensor:
    if not ONEDNN_SUPPORTS[matrix.dtype]():
        raise NotImplementedError(f"this processor has no instructions for {matrix.dtype}")
    # For one token it would be no layout of its own; from two on it is the same for all.
    return torch.ops.mkldnn._reorder_linear_weight(matrix, ONEDNN_TOKENS)


def _multiply_onednn(
    tokens: torch.Tensor, packed: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(tokens, packed, bias, "none", [], "")


def _pack_mkl(matrix: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(matrix, MKL_TOKENS)


def _multiply_mkl(
    tokens: torch.Tensor, packed: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # torch takes the packed matrix for as many tokens alone as are named here; MKL serves any number by one that was packed for
    # another, only not as fast everywhere.
    return torch.ops.mkl._mkl_linear(tokens, packed, matrix, bias, tokens.numel() // tokens.shape[-1])


PANELS = WeightLayout("panels", pack_panels, multiply_panels)
ONEDNN = WeightLayout("oneDNN", _pack_onednn, _multiply_onednn)
MKL = WeightLayout("MKL", _pack_mkl, _multiply_mkl)


LAYOUTS = {torch.float32: (PANELS, ONEDNN, MKL), torch.bfloat16: (PANELS, ONEDNN), torch.float16: (ONEDNN,)}


@functools.lru_cache
def layouts_for(dtype: torch.dtype) -> tuple[WeightLayout, ...]:
    """The layouts by which weights are multiplied rightly on this machine. What rounds are made of is first."""
    return tuple(layout for layout in LAYOUTS.get(dtype, ()) if _multiplies(layout, dtype))


@torch.no_grad()
def _multiplies(layout: WeightLayout, dtype: torch.dtype) -> bool:
    """Whether a layout's products of small whole numbers, which no order of adding rounds, are what they should be here."""
    try:
        for rows, columns in SHAPES:
            matrix = (torch.arange(rows * columns, device="cpu").view(rows, columns) % 3 - 1).to(dtype)
            packed, bias = layout.pack(matrix), torch.arange(rows, device="cpu").to(dtype) % 2
            for count in TOKENS:
                tokens = (torch.arange(count * columns, device="cpu").view(1, count, columns) % 2).to(dtype)
                expected = functional.linear(tokens.float(), matrix.float(), bias.float())
                if not torch.equal(layout.multiply(tokens, packed, matrix, bias).float(), expected):
                    return False
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
