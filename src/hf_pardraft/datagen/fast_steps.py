"""A step of plain `generate` on a CPU: its attention, and its choice of tokens."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..likeliest import likeliest
from ..models.masks import additive

attention = torch.nn.functional.scaled_dot_product_attention
# Queries per head of keys, up to which two products and a softmax take less time than the kernel that does all at once.
FEW_QUERIES = 16


class FastSteps(TorchFunctionMode):
    """While it is entered, a token's attention and a greedy choice take the ways that are fastest on a CPU.

    No model is changed.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.argmax and len(args) == 1 and kwargs == {"dim": -1}:
            return likeliest(*args)
        return (step_attention if func is attention else func)(*args, **kwargs)


def keys_stand_side_by_side(dtype: torch.dtype) -> bool:
    """Whether [`step_attention`] multiplies by all keys of a head in one product, as it does in full precision.

    They are then read in half the time if the same number of each stands beside that of the next. In half precision such a
    product would copy them first.
    """
    return dtype.itemsize > 2


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

    Such are those of one token. Heads that share keys are then one head with several queries. In full precision these are two
    products and a softmax. In half precision it is the kernel that does all at once, with a query for each head.
    """
    see_alike = attn_mask is None or (attn_mask.ndim == 4 and attn_mask.shape[2] == 1)
    is_one_token = query.ndim == 4 and query.shape[2] == 1 and len(query) == len(key)
    is_shared = enable_gqa and is_one_token and (attn_mask is None or attn_mask.shape[1] == 1)
    grouped = query.view(*key.shape[:2], -1, query.shape[3]) if is_shared else query
    are_few = grouped.ndim == 4 and grouped.shape[2] <= FEW_QUERIES
    is_step = are_few and see_alike and grouped.shape[:2] == key.shape[:2]
    is_usual = not (is_step or is_shared) or is_causal or dropout_p or enable_gqa > is_shared or query.requires_grad
    if is_usual:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not are_few:
        mixed = attention(grouped, key, value, attn_mask, scale=scale)
    elif keys_stand_side_by_side(key.dtype):
        mixed = _by_products(grouped, key, value, attn_mask, scale)
    else:
        if attn_mask is not None and attn_mask.shape[1] != 1:
            attn_mask = attn_mask.repeat_interleave(grouped.shape[2], dim=1)
        heads = grouped.flatten(1, 2).unsqueeze(2)
        mixed = attention(heads, key, value, attn_mask, scale=scale, enable_gqa=True)
    return mixed.view(*query.shape[:3], -1)


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    if mask is not None:
        is_added = mask.dtype != torch.bool
        scores += mask if is_added else additive(mask.flatten(0, 1), scores.dtype).view(mask.shape)
    return scores.softmax(dim=-1) @ value
