"""Attention of a writer's step on a CPU: of one token of each text, by a kernel of our own where it can be compiled."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from ..generation.packing.native_code import compiled
from ..models.masks import additive

attention = torch.nn.functional.scaled_dot_product_attention
SOURCE = Path(__file__).with_name("step_attention.cpp")
# Queries per head of keys, up to which the kernel is faster than torch is with keys that lie as the kernel reads them.
FEW_QUERIES = 128

_library = torch.library.Library("hf_pardraft", "FRAGMENT")
_library.define("step_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor")


@functools.lru_cache
def kernels() -> dict[torch.dtype, Callable[..., None]]:
    """The kernel for each dtype; none where they can't be compiled."""
    library = compiled(SOURCE)
    if library is None:
        return {}
    found = {torch.float32: library.attend_float32, torch.bfloat16: library.attend_bfloat16}
    for kernel in found.values():
        kernel.restype, kernel.argtypes = None, [ctypes.c_void_p] * 6 + [ctypes.c_float, ctypes.c_int64]
    return found


@torch.compiler.assume_constant_result
def keys_stand_side_by_side(dtype: torch.dtype) -> bool:
    """Whether there is a kernel: keys are then to lie such that a number of each stands beside that of the next."""
    return dtype in kernels()


def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, in a faster way where the queries of a head are few and see alike.

    Such are those of one token. Heads that share keys are then one head with several queries.
    """
    see_alike = attn_mask is None or (attn_mask.ndim == 4 and attn_mask.shape[2] == 1)
    is_one_token = query.ndim == 4 and query.shape[2] == 1 and len(query) == len(key)
    is_shared = enable_gqa and is_one_token and (attn_mask is None or attn_mask.shape[1] == 1)
    heads = key.shape[1]
    grouped = query.reshape(len(query), heads, query.shape[1] // heads, query.shape[3]) if is_shared else query
    is_step = grouped.ndim == 4 and see_alike and grouped.shape[:2] == key.shape[:2]
    if not is_step or is_causal or dropout_p or enable_gqa > is_shared or query.requires_grad:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive(attn_mask.flatten(0, 1), query.dtype).view(attn_mask.shape)
    if _can_attend(grouped, key, value, attn_mask):
        mixed = torch.ops.hf_pardraft.step_attention(grouped, key, value, attn_mask, scale)
    else:
        mixed = attention(grouped, key, value, attn_mask, scale=scale)
    return mixed.view(*query.shape[:3], mixed.shape[3])


def _can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the kernel takes this."""
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    return (
        keys_stand_side_by_side(query.dtype)
        and all(tensor.dtype == query.dtype and tensor.device.type == "cpu" for tensor in tensors)
        and query.shape[2] <= FEW_QUERIES
        and query.shape[3] == key.shape[3]
        and key.shape == value.shape
        and key.stride(2) == value.stride(3) == 1
        and (mask is None or (len(mask) in (1, len(key)) and mask.shape[1] == mask.stride(3) == 1))
        # To torch one number may stand for all columns.
        and (mask is None or mask.shape[3] == key.shape[2])
    )


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention by the kernel.

    Args:
        query: `(items, heads, queries, head_dim)`, those of a head's keys.
        key, value: `(items, heads, columns, head_dim)`; of `key` a number of each column stands beside that of the next.
        mask: `(items or 1, 1, 1, columns)`, which is added to the scores.
        scale: what scores are multiplied by.

    Returns:
        What `query` is like.
    """
    query = query.contiguous()
    mixed = torch.empty_like(query)
    places = key.stride(0), key.stride(1), key.stride(3), value.stride(0), value.stride(1), value.stride(2)
    of_mask = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    shape = (ctypes.c_int64 * 12)(*query.shape, key.shape[2], *places, of_mask)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, mask, mixed)]
    kernels()[query.dtype](*pointers, shape, scale, torch.get_num_threads())
    return mixed


_library.impl("step_attention", _attend, "CPU")


@torch.library.register_fake("hf_pardraft::step_attention", lib=_library)
def _(query, key, value, mask, scale):
    return torch.empty_like(query, memory_format=torch.contiguous_format)
