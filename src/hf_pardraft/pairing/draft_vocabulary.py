"""Draft vocabularies: which of the target's tokens a drafter proposes; it may have the rows of a head that score them itself.

The head is most of what a draft reads, and proposals from a part of the vocabulary leave the target's text as it is (FR-Spec,
arXiv 2502.14856; EAGLE-3, arXiv 2503.01840). Columns are places among the drafter's logits, tokens the target's ids.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.base import ParallelDrafter
from ..models.modeling_dart import DartDrafter
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import VOCABULARY_MAPS, PardDrafter
from .gathered_rows import gathered_rows, has_plain_rows, head_of


def checked_token_ids(
    token_ids: Sequence[int] | torch.Tensor, vocab_size: int, name: str = "draft_token_ids"
) -> torch.LongTensor:
    """Token ids in ascending order, `(tokens,)`, on the CPU.

    Args:
        token_ids: distinct tokens, one or more, in any order.
        vocab_size: of the target.
        name: how to call them in a message.

    Raises:
        ValueError: if they are something else.
    """
    expected = f"{name} must be one or more distinct tokens in [0, {vocab_size})"
    if isinstance(token_ids, Mapping):
        raise ValueError(f"{expected}, got a {type(token_ids).__name__}: pass a list or a tensor of ids")
    try:
        # An array knows its numbers as Python's, of which there are more than torch's.
        listed = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        ids = listed if isinstance(listed, torch.Tensor) else torch.tensor(list(listed))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{expected}, got {token_ids!r}: pass a list or a tensor of ids") from error
    if ids.dim() != 1 or len(ids) == 0:
        found = f"a tensor of shape {tuple(ids.shape)}" if ids.numel() else "none"
        raise ValueError(f"{expected}, got {found}: pass a list or a tensor of ids")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        found = str(ids.dtype).removeprefix("torch.")
        raise ValueError(f"{expected}, got {found}: pass whole numbers, the ids themselves")
    ids = ids.detach().cpu().long().sort().values
    num_distinct = len(ids.unique_consecutive())
    if ids[0] < 0 or ids[-1] >= vocab_size or num_distinct < len(ids):
        raise ValueError(f"{expected}, got {len(ids)} ids, {num_distinct} of them distinct, from {ids[0]} to {ids[-1]}")
    return ids


# What is made in inference mode could not be trained later.
@torch.inference_mode(False)
def set_draft_vocabulary(
    drafter: ParallelDrafter, token_ids: Sequence[int] | torch.Tensor | None, target: PreTrainedModel | None = None
) -> None:
    """See [`ParallelDrafter.set_draft_vocabulary`]."""
    vocab_size, kind = drafter.config.vocab_size, type(drafter).__name__
    if target is not None and not isinstance(drafter, DFlashDrafter):
        raise ValueError(f"a {kind} has a head of its own, whose rows are taken: leave target out")
    if vocab_size == 0:
        raise ValueError(
            f"the checkpoint of this {kind} leaves its vocabulary to the target: call drafter.check_target(target) first"
        )
    ids = None if token_ids is None else checked_token_ids(token_ids, vocab_size, "a draft vocabulary")
    check_own_rows(drafter)
    if isinstance(drafter, DartDrafter):
        cut_own_head(drafter, ids)
        return
    if ids is not None and len(ids) == vocab_size:
        ids = None
    rows = None if ids is None or target is None else rows_to_keep(target, ids)
    note_vocabulary(drafter, ids, persistent=not isinstance(drafter, PardDrafter))
    if isinstance(drafter, DFlashDrafter):
        keep_rows(drafter, rows)


def check_own_rows(drafter: ParallelDrafter) -> None:
    """Raise a `ValueError` if a drafter's rows of a head are more than rows, which others would take the place of."""
    head = None if isinstance(drafter, PardDrafter) else drafter._modules.get("lm_head")
    if head is not None and type(head) is not nn.Linear:
        raise ValueError(
            f"the lm_head of this {type(drafter).__name__} is no plain linear layer but a {type(head).__name__} (adapted, "
            "quantised), which a draft vocabulary would cost more than rows: choose it before that, or merge the adapter first"
        )


def note_vocabulary(drafter: ParallelDrafter, ids: torch.LongTensor | None, persistent: bool = True) -> None:
    """Let a drafter's maps and config say which tokens it proposes.

    Args:
        ids: `(tokens,)`, ascending; `None` for all.
        persistent: whether the maps are among its weights; an ordinary causal LM has none.
    """
    for name in VOCABULARY_MAPS:
        if name in drafter._buffers:
            delattr(drafter, name)
    drafter.config.draft_vocab_size = None if ids is None else len(ids)
    if ids is None:
        return
    is_known = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    is_known[ids] = True
    for name, values in zip(VOCABULARY_MAPS, (ids - torch.arange(len(ids)), is_known), strict=True):
        drafter.register_buffer(name, values.to(drafter.device), persistent=persistent)


def rows_to_keep(target: PreTrainedModel, ids: torch.LongTensor) -> torch.Tensor:
    """The rows of a target's head, `(ids, hidden)`, that a drafter is to have itself.

    Raises:
        ValueError: if they can't be had by themselves.
    """
    head = target.get_output_embeddings()
    if head is None or not has_plain_rows(head) or head.bias is not None:
        raise ValueError(
            f"the head of this {type(target).__name__} is no plain linear layer without a bias (there is none, or it is "
            "quantised, adapted, offloaded, watched by hooks), so a drafter can't have rows of it: leave target out"
        )
    return gathered_rows(head, ids).weight


def keep_rows(drafter: DFlashDrafter, rows: torch.Tensor | None) -> None:
    """Let a drafter have rows of a head, `(tokens, hidden)`, in its own dtype; `None` takes those that it has."""
    if "lm_head" in drafter._modules:
        del drafter.lm_head
    drafter.config.own_head = rows is not None
    if rows is not None:
        drafter.lm_head = head_of(rows.to(drafter.device, drafter.dtype))


@dataclass(frozen=True)
class WholeHead:
    """All rows that the lm_head of a DART drafter has had: `weight (tokens, hidden)` and `token_ids (tokens,)`, ascending."""

    weight: torch.Tensor
    token_ids: torch.LongTensor


# What was cut off the heads of DART drafters, as long as they are in memory.
_cut: "weakref.WeakKeyDictionary[DartDrafter, WholeHead]" = weakref.WeakKeyDictionary()


def whole_head(drafter: DartDrafter) -> WholeHead:
    """The head before it was cut down, with the rows that it still has as they are now."""
    weight, ids = drafter.lm_head.weight.detach(), drafter.d2t.cpu() + torch.arange(len(drafter.d2t))
    before = _cut.get(drafter)
    if before is None:
        return WholeHead(weight, ids)
    places = torch.searchsorted(before.token_ids, ids).to(weight.device)
    return WholeHead(before.weight.to(weight).index_copy(0, places, weight), before.token_ids)


def cut_own_head(drafter: DartDrafter, ids: torch.LongTensor | None) -> None:
    """Leave a DART drafter the rows of some tokens, `ids (tokens,)`; `None` gives back what was cut off.

    Raises:
        ValueError: if it has no rows of some of them.
    """
    whole = whole_head(drafter)
    ids = whole.token_ids if ids is None else ids
    places = torch.searchsorted(whole.token_ids, ids).clamp(max=len(whole.token_ids) - 1)
    missing = ids[whole.token_ids[places] != ids]
    if len(missing):
        raise ValueError(
            f"the lm_head of this DartDrafter has rows of {len(whole.token_ids)} tokens, and none of {len(missing)} that the "
            f"draft vocabulary names (the first is {int(missing[0])}): leave these out, or make a drafter that knows them with "
            "DartDrafter.for_target"
        )
    is_trained = drafter.lm_head.weight.requires_grad
    note_vocabulary(drafter, ids)
    drafter.lm_head = head_of(whole.weight[places.to(whole.weight.device)]).requires_grad_(is_trained)
    if len(ids) < len(whole.token_ids):
        _cut[drafter] = whole
    else:
        _cut.pop(drafter, None)
