"""The target's side of a round: one forward over the unread text and a tree, on a cache that can roll back."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.drafting import are_real, last_columns
from ..models.row_masks import additive_masks, attention_windows, token_indices, visible_columns
from .cache import TargetCache, check_cache, check_can_roll_back
from .settings import DraftSettings
from .tree import TokenTree

# What `generate` prepares and this room handles itself; anything else goes to the target's forward as it is.
HANDLED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
}
# Attention kernels that take no mask of their own choosing.
MASKLESS_ATTENTION = ("flash", "paged")


@dataclass
class Unread:
    """What the target has yet to read: the prompt, and later the last committed token of each row, the root.

    Attributes:
        ids, positions: `(batch, length)`, padded on the left.
        counts: how many are real in each row; `None` if all are.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor
    counts: list[int] | None = None


@dataclass
class Prompt:
    """The prompt, and how its padding was left out.

    Attributes:
        text: what the target and the drafter read, rows of different lengths padded on the left.
        columns: for each row, where in the caller's prompt its tokens stand.
    """

    text: Unread
    columns: list[list[int]]


def read_prompt(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> Prompt:
    """Drop masked-out columns: no token attends to them, so a row decodes the same without them."""
    batch, length = input_ids.shape
    device = input_ids.device
    attention_mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions = model_kwargs.get("position_ids")
    if positions is None:
        positions = (real.long().cumsum(dim=1) - 1).clamp(min=0)
    if positions.ndim != 2:
        raise ValueError(
            f"this target takes position_ids of {positions.ndim} dimensions; drafting works with (batch, length) only. Call "
            "generate without assistant_model"
        )
    if attention_mask is None or bool(real.all()):
        return Prompt(Unread(input_ids, positions.expand(batch, -1)), [list(range(length))] * batch)
    counts = real.sum(dim=1).tolist()
    order = real.long().argsort(dim=1, stable=True)[:, length - max(counts) :]
    columns = [row[len(row) - count :] for row, count in zip(order.tolist(), counts, strict=True)]
    text = Unread(
        input_ids.gather(1, order),
        positions.expand(batch, -1).gather(1, order).to(device),
        None if min(counts) == max(counts) else counts,
    )
    return Prompt(text, columns)


def check_request(
    target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], settings: DraftSettings
) -> None:
    """Raise a `ValueError`, before any forward, for inputs that drafting can't serve."""
    batch, length = input_ids.shape
    if not model_kwargs.get("use_cache"):
        raise ValueError("drafting needs the key/value cache: call generate with use_cache=True")
    if length == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs the prompt as input_ids, got inputs_embeds or an empty prompt: pass token ids")
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is not None and batch > 1 and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "drafting continues a batch from its last column, got prompts that are padded on the right: set "
            'tokenizer.padding_side = "left"'
        )
    check_cache(model_kwargs.get("past_key_values"), batch, length)
    check_can_roll_back(target.config.get_text_config(decoder=True))
    if batch > 1 or settings.tree_budget:
        check_takes_masks(target, model_kwargs)
    tensors = sorted(
        name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor) and name not in HANDLED
    )
    if tensors:
        raise ValueError(
            f"drafting works with text alone, got {', '.join(tensors)}: leave them out, or call generate without "
            "assistant_model"
        )


def check_takes_masks(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the target takes the masks and positions of a tree or of rows of different lengths."""
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if any(name in attention for name in MASKLESS_ATTENTION):
        raise ValueError(
            f"trees and batches need an attention mask of their own, which {attention} does not take: load the target with "
            'attn_implementation="sdpa", or draft chains (tree_budget=0) for one sequence at a time'
        )
    if model_kwargs.get("position_ids") is None:
        raise ValueError(
            f"trees and batches need position_ids, which {type(target).__name__} does not take: draft chains "
            "(tree_budget=0) for one sequence at a time"
        )


class TargetReader:
    """Runs the target, and keeps its cache at the committed text.

    Args:
        target: the model.
        model_kwargs: as `generate` prepared them.
        requested: keyword arguments for every forward (which hidden states to return, attentions).
    """

    def __init__(self, target: PreTrainedModel, model_kwargs: dict[str, Any], requested: dict[str, Any]) -> None:
        self.target = target
        self.cache = TargetCache()
        self.takes_positions = model_kwargs.get("position_ids") is not None
        self.keeps_logits = target._supports_logits_to_keep()
        self.windows = attention_windows(target.config.get_text_config(decoder=True))
        extra = {name: value for name, value in model_kwargs.items() if name not in HANDLED and value is not None}
        self.arguments = {**extra, **requested, "use_cache": True, "return_dict": True, "past_key_values": self.cache}

    def read(self, unread: Unread, tree: TokenTree | None) -> Any:
        """Forward over the unread tokens, whose last is the root, and the nodes behind it.

        Returns:
            The target's outputs; `logits` are `(batch, slots, vocab)`, one row for the root and each node.
        """
        ids, positions, num_slots = unread.ids, unread.positions, 1
        if tree is not None:
            ids = torch.cat([ids, tree.tokens], dim=1)
            positions = torch.cat([positions, positions[:, -1:] + tree.depths], dim=1)
            num_slots += tree.num_nodes
        arguments = dict(self.arguments)
        if self.takes_positions:
            arguments["position_ids"] = positions.to(self.target.device)
        if self.keeps_logits:
            arguments["logits_to_keep"] = num_slots
        mask = self.attention_mask(unread, tree)
        if mask is not None:
            arguments["attention_mask"] = mask
        outputs = self.target(input_ids=ids.to(self.target.device), **arguments)
        outputs.logits = outputs.logits[:, -num_slots:]
        return outputs

    def attention_mask(self, unread: Unread, tree: TokenTree | None) -> Any:
        """The mask of this forward; `None` where the target's own is right: one sequence, and a chain."""
        batch, length = unread.ids.shape
        is_chain = tree is None or tree.is_chain
        if is_chain and batch == 1:
            return None
        if length > 1:
            # Only prompts are longer, and they are read without a draft.
            return are_real(unread.counts, batch, length, self.target.device).long()
        within = root_and_nodes(tree, batch, self.target.device)
        start = self.cache.get_seq_length()
        row_lengths = self.cache.row_lengths
        indices = None
        if any(size is not None for size in self.windows.values()):
            depths = within.new_zeros(batch, 1, dtype=torch.long)
            if tree is not None:
                depths = torch.cat([depths, tree.depths.to(depths.device)], dim=1)
            indices = token_indices(row_lengths, start, depths)
        return additive_masks(visible_columns(row_lengths, start, within), self.windows, indices, self.target.dtype)

    def keep(self, start: int, unread: Unread, nodes: list[list[int]]) -> None:
        """Of what the last forward appended to the cache, keep the unread tokens and, for each row, some nodes."""
        batch, length = unread.ids.shape
        read = last_columns(unread.counts, batch, length)
        self.cache.keep(start, [row + [length + node for node in kept] for row, kept in zip(read, nodes, strict=True)])


def root_and_nodes(tree: TokenTree | None, batch: int, device: torch.device) -> torch.BoolTensor:
    """Which slots a slot sees: the root, its ancestors and itself. `(batch, slots, slots)`."""
    if tree is None:
        return torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    within = torch.nn.functional.pad(tree.ancestors.to(device), (1, 0, 1, 0))
    within[:, :, 0] = True
    return within
