"""The rows of a head that score a drafter's tokens, and no others: gathered once, and anew when the head has changed."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.base import ParallelDrafter
from ..models.modeling_dflash import DFlashDrafter

# How many rows are looked at to see whether those that were gathered still are the head's.
SAMPLED_ROWS = 16


class ChosenColumns(nn.Module):
    """Some of a head's logits, where its rows can't be had by themselves: quantised, adapted, offloaded, watched by hooks.

    Args:
        head: it is run whole.
        token_ids: `(columns,)`.
    """

    def __init__(self, head: nn.Module, token_ids: torch.LongTensor) -> None:
        super().__init__()
        self.head, self.token_ids = head, token_ids

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., hidden)` to `(..., columns)`."""
        logits = self.head(states)
        return logits.index_select(-1, self.token_ids.to(logits.device))


def has_plain_rows(head: nn.Module) -> bool:
    """Whether the logits of a head are its weight's rows times the states, and nothing else."""
    # While another call multiplies by packed weights, the layer has a forward that comes to the same.
    forward = vars(head).get("forward")
    is_replaced = forward is not None and not getattr(forward, "is_product", False)
    # A bias that is a buffer is none of the parameters. Subclasses of tensors are quantised, or spread over devices.
    return (
        type(head) is nn.Linear
        and head._parameters.keys() == {"weight", "bias"}
        and not (head._forward_hooks or head._forward_pre_hooks or is_replaced)
        and all(type(weight) is nn.Parameter and not weight.is_meta for weight in head.parameters())
    )


def head_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A frozen head of some rows, `(tokens, hidden)`, and `bias (tokens,)`."""
    head = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias, requires_grad=False)
    return head


@torch.no_grad()
def gathered_rows(head: nn.Linear, token_ids: torch.LongTensor, dtype: torch.dtype | None = None) -> nn.Linear:
    """A head of some rows of another one, as they are now: a copy on the same device, to be read only.

    Args:
        head: whose rows.
        token_ids: `(rows,)`.
        dtype: of the copy; by default the head's.
    """
    # What a call under inference_mode makes, no later one could use in autograd.
    with torch.inference_mode(False):
        ids = token_ids.to(head.weight.device)
        return head_of(**{name: part.detach().index_select(0, ids).to(dtype) for name, part in head.named_parameters()})


def dtype_of_rows(drafter: ParallelDrafter, head: nn.Linear) -> torch.dtype:
    """Of rows that a drafter gathers from a head: its own where that is smaller, since to read them is most of a draft."""
    return min(head.weight.dtype, drafter.dtype, key=lambda dtype: dtype.itemsize)


@dataclass(frozen=True)
class GatheredRows:
    """Rows of a head, and how the head was.

    Attributes:
        head: of these rows.
        token_ids: `(rows,)`.
        facts: see [`facts_of`].
        sample: `(sampled,)`, some places among the rows, from the first to the last.
    """

    head: nn.Linear
    token_ids: torch.LongTensor
    facts: tuple[Any, ...]
    sample: torch.LongTensor

    def are_of(self, head: nn.Linear, token_ids: torch.LongTensor, dtype: torch.dtype) -> bool:
        """Whether they still are these rows of this head, in this dtype."""
        is_alike = self.facts == facts_of(head) and self.head.weight.dtype == dtype
        if not (is_alike and torch.equal(self.token_ids, token_ids)):
            return False
        # What is written to `weight.data`, as PEFT does where it merges, no version counts.
        chosen = self.token_ids[self.sample].to(head.weight.device)
        return torch.equal(self.head.weight[self.sample.to(chosen.device)], head.weight[chosen].to(dtype))


def facts_of(head: nn.Linear) -> tuple[Any, ...]:
    """What changes with a head's weights, as a rule: which they are, where, and how often they were written to."""
    return tuple(
        (id(weight), weight.data_ptr(), weight._version, weight.device, weight.dtype) for weight in head.parameters()
    )


# The rows that each drafter gathered last.
_gathered: "weakref.WeakKeyDictionary[ParallelDrafter, GatheredRows]" = weakref.WeakKeyDictionary()


def draft_head(drafter: ParallelDrafter, head: nn.Module) -> nn.Module:
    """What scores a drafter's tokens: its own rows, or those of `head`, gathered once.

    Where the head has changed since, other weights or the same ones rewritten, they are gathered anew.

    Args:
        drafter: whose vocabulary it is; the rows of one head are remembered beside it.
        head: scores all tokens: the target's, or its own.
    """
    token_ids = drafter.draft_token_ids
    if token_ids is None:
        return head
    if isinstance(drafter, DFlashDrafter) and "lm_head" in drafter._modules:
        return drafter.lm_head
    if not has_plain_rows(head):
        return ChosenColumns(head, token_ids)
    dtype = dtype_of_rows(drafter, head)
    if any(weight.is_inference() for weight in head.parameters()):
        # Nothing tells whether it has changed.
        return gathered_rows(head, token_ids, dtype)
    known = _gathered.get(drafter)
    if known is None or not known.are_of(head, token_ids, dtype):
        last, count = len(token_ids) - 1, min(SAMPLED_ROWS, len(token_ids))
        sample = torch.linspace(0, last, count, device=token_ids.device).long()
        known = GatheredRows(gathered_rows(head, token_ids, dtype), token_ids, facts_of(head), sample)
        _gathered[drafter] = known
    return known.head
