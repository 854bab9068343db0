"""Attention of a few tokens of each text on a CPU, by a kernel of our own where it can be compiled."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from .native_code import kernels_of

attention = torch.nn.functional.scaled_dot_product_attention
SOURCE = Path(__file__).with_name("token_attention.cpp")
# Tokens up to which the kernel is faster than torch's.
FEW_TOKENS = 64
# Numbers of a head that fill vectors on every processor.
VECTOR = 16
# Scores times numbers of a head up to which it takes longer to call the kernel than to compute.
FEWEST_PRODUCTS = 1 << 16

_library = torch.library.Library("hf_pardraft", "FRAGMENT")
_library.define("token_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")


@functools.lru_cache
def kernels() -> dict[tuple[torch.dtype, torch.dtype], Callable[..., None]]:
    """The kernel for each dtype, and each one of masks; none where they can't be compiled."""
    names = {
        (torch.float32, torch.float32): "attend_float32",
        (torch.float32, torch.bool): "attend_float32_by_truth",
        (torch.bfloat16, torch.bfloat16): "attend_bfloat16",
        (torch.bfloat16, torch.bool): "attend_bfloat16_by_truth",
    }
    return kernels_of(SOURCE, names, [ctypes.c_void_p] * 6 + [ctypes.c_float, ctypes.c_int64])


@torch.compiler.assume_constant_result
def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype."""
    return (dtype, dtype) in kernels()


def can_lie_side_by_side(keys: torch.Tensor) -> bool:
    """Whether keys `(..., head_dim)` may lie such that a number of each stands beside that of the next, which is faster."""
    return keys.device.type == "cpu" and keys.shape[-1] % VECTOR == 0 and has_kernel(keys.dtype)


def token_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, in a faster way where few tokens follow a text on a CPU."""
    # Heads share keys where the caller says so.
    are_alike = enable_gqa or query.shape[:-2] == key.shape[:-2]
    is_plain = are_alike and not (is_causal or dropout_p or torch.is_grad_enabled())
    if not (is_plain and takes(query, key, value, attn_mask)):
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, attn_mask, scale).transpose(1, 2)


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether [`attend`] takes this: few tokens on a CPU, of heads some of which may share keys, and a text before them."""
    # A graph may be for several lengths, and finds out while it runs.
    if not torch.compiler.is_compiling() and is_little(query, key):
        return False
    dtype, shape, of_keys, steps = query.dtype, query.shape, key.shape, key.stride()
    return (
        # What stands for other tensors has no numbers that can be read.
        type(query) is type(key) is type(value) is torch.Tensor
        and len(shape) == len(of_keys) == 4
        and shape[2] <= FEW_TOKENS
        and shape[2] < of_keys[2]
        and shape[0] == of_keys[0]
        and shape[1] % of_keys[1] == 0
        and shape[3] == of_keys[3]
        and shape[3] % VECTOR == 0
        and of_keys == value.shape
        and dtype == key.dtype == value.dtype
        and query.device.type == key.device.type == value.device.type == "cpu"
        and query.stride(3) == value.stride(3) == 1
        and (steps[2] == 1 or steps[3] == 1)
        and has_kernel(dtype)
        and (mask is None or _can_be_added(mask, dtype, shape, of_keys[2]))
    )


def is_little(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether torch is sooner done with this."""
    return query.numel() * key.shape[-2] < FEWEST_PRODUCTS


def _can_be_added(mask: torch.Tensor, dtype: torch.dtype, shape: torch.Size, columns: int) -> bool:
    """Whether a mask has a number for each column, for all items, heads and tokens or for each."""
    return (
        type(mask) is torch.Tensor
        and mask.ndim == 4
        and mask.shape[3] == columns
        and mask.dtype in (torch.bool, dtype)
        and mask.device.type == "cpu"
        and mask.stride(3) == 1
        and all(of_mask in (1, of_query) for of_mask, of_query in zip(mask.shape[:3], shape[:3], strict=True))
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention by the kernel.

    Args:
        query: `(items, heads, tokens, head_dim)`.
        key, value: `(items, heads or fewer that share them, columns, head_dim)`.
        mask: `(items or 1, heads or 1, tokens or 1, columns)`, of truth values or what is added to the scores.
        scale: what scores are multiplied by.

    Returns:
        `(items, tokens, heads, head_dim)`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.hf_pardraft.token_attention(query, key, value, mask, scale)
    return _by_kernel(query, key, value, mask, scale)


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """See [`attend`]."""
    items, heads, tokens, size = query.shape
    mixed = query.new_empty(items, tokens, heads, size)
    of_mask = (0, 0, 0) if mask is None else (mask.stride(axis) * (mask.shape[axis] > 1) for axis in range(3))
    steps = *query.stride()[:3], *key.stride(), *value.stride()[:3], *of_mask
    shape = (ctypes.c_int64 * 19)(items, key.shape[1], heads // key.shape[1], tokens, size, key.shape[2], *steps)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, mask, mixed)]
    kernels()[query.dtype, query.dtype if mask is None else mask.dtype](
        *pointers, shape, scale, torch.get_num_threads()
    )
    return mixed


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """What graphs call: [`attend`], by torch where that is sooner done, or where a graph from elsewhere finds no kernel."""
    if has_kernel(query.dtype) and not is_little(query, key):
        return _by_kernel(query, key, value, mask, scale)
    mixed = attention(query, key, value, mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return mixed.transpose(1, 2).contiguous()


_library.impl("token_attention", _attend, "CPU")


@torch.library.register_fake("hf_pardraft::token_attention", lib=_library)
def _(query, key, value, mask, scale):
    items, heads, tokens, size = query.shape
    return query.new_empty(items, tokens, heads, size)
