"""A step's attention on a CPU, for keys that stand side by side."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..models.masks import additive

attention = torch.nn.functional.scaled_dot_product_attention
# Queries per head of keys, up to which two products and a softmax take less time than the kernel that does all at once.
FEW_QUERIES = 16


class StepAttention(TorchFunctionMode):
    """While it is entered, one-token attention takes the way that is fastest on a CPU; no model is changed."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return (step_attention if func is attention else func)(*args, **(kwargs or {}))


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
    """`torch.nn.functional.scaled_dot_product_attention`, by two products where the queries of a head are few and see alike.

    Such are those of one token: transformers gives heads that share keys as queries of one head.
    """
    see_alike = attn_mask is None or (attn_mask.ndim == 4 and attn_mask.shape[2] == 1)
    is_step = query.ndim == 4 and query.shape[2] <= FEW_QUERIES and query.shape[:2] == key.shape[:2]
    if not (see_alike and is_step) or is_causal or dropout_p or enable_gqa or query.requires_grad:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        is_added = attn_mask.dtype != torch.bool
        scores += attn_mask if is_added else additive(attn_mask.flatten(0, 1), scores.dtype).view(attn_mask.shape)
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
