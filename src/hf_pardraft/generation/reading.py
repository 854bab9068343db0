"""The target's side of a round: one forward over the unread text and a tree, on a cache that can roll back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models.drafting import are_real, input_device, last_columns
from ..models.row_masks import additive_masks, attention_windows
from .cache import TargetCache, check_cache, check_can_roll_back, is_hybrid
from .settings import DraftSettings
from .tree import TokenTree

logger = logging.get_logger(__name__)

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
# Where `generate` puts what a target's own encoders made of images, videos and sound.
ENCODED_MEDIA = "mm_encoder_outputs"
# Families whose recurrent layers go on from their state when they read several tokens at once. Of the others, some start
# anew (Jamba), and some keep their state out of the cache (RecurrentGemma): drafting would change what they write.
CONTINUING_FAMILIES = {
    "bamba",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
# Attention kernels that take no mask of their own choosing.
MASKLESS_ATTENTION = ("flash", "paged")


@dataclass
class Unread:
    """What the target has yet to read: the prompt, and later the last committed token of each row, the root.

    Attributes:
        ids, positions: `(batch, length)`, padded on the left.
        counts: how many are real in each row; `None` if all are.
        num_reread: how many of them, the first ones, the target has read before and then had to forget.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor
    counts: list[int] | None = None
    num_reread: int = 0

    @property
    def root_positions(self) -> torch.LongTensor:
        """`(batch, 1)`."""
        return self.positions if self.positions.shape[1] == 1 else self.positions[:, -1:]

    def with_slots(self, slot_depths: torch.LongTensor) -> torch.LongTensor:
        """`positions`, and behind them those of a tree's nodes, from [`TokenTree.slot_depths`]."""
        if self.positions.shape[1] == 1:
            return self.positions + slot_depths
        return torch.cat([self.positions[:, :-1], self.root_positions + slot_depths], dim=1)


@dataclass
class Prompt:
    """The prompt, and how its padding was left out.

    Attributes:
        text: what the target and the drafter read, rows of different lengths padded on the left.
        columns: for each row, where in the caller's prompt its tokens stand.
        axes: `(axes, batch, length)` or `None`, the positions of a target that has several per token (M-RoPE).
        extra: what else the target's first forward needs (an image, say), laid out as the text is.
    """

    text: Unread
    columns: list[list[int]]
    axes: torch.LongTensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def after(self, num_cached: int) -> "Prompt":
        """Without the first tokens of each row, which an earlier call's cache holds."""
        length = self.text.ids.shape[1]
        text = Unread(self.text.ids[:, num_cached:], self.text.positions[:, num_cached:])
        axes = None if self.axes is None else self.axes[:, :, num_cached - length :]
        extra = {
            name: value[:, num_cached:] if has_a_column_per_token(value, self.text.ids) else value
            for name, value in self.extra.items()
        }
        return Prompt(text, self.columns, axes, extra)


def read_prompt(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> Prompt:
    """Drop masked-out columns: no token attends to them, so a row decodes the same without them."""
    batch, length = input_ids.shape
    attention_mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions, axes = model_kwargs.get("position_ids"), None
    if positions is None or positions.ndim == 3:
        positions, axes = (real.long().cumsum(dim=1) - 1).clamp(min=0), positions
    positions = positions.expand(batch, -1)
    extra = first_inputs(model_kwargs)
    if bool(real.all()):
        return Prompt(Unread(input_ids, positions), [list(range(length))] * batch, axes, extra)
    counts = real.sum(dim=1).tolist()
    order = real.long().argsort(dim=1, stable=True)[:, length - max(counts) :]
    columns = [row[len(row) - count :] for row, count in zip(order.tolist(), counts, strict=True)]
    text = Unread(
        input_ids.gather(1, order), positions.gather(1, order), None if min(counts) == max(counts) else counts
    )
    if axes is not None:
        axes = axes[:, :, order[0]] if batch == 1 else axes.gather(2, order.expand(len(axes), -1, -1))
    extra = {
        name: value.gather(1, order) if has_a_column_per_token(value, input_ids) else value
        for name, value in extra.items()
    }
    return Prompt(text, columns, axes, extra)


def first_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What besides the text goes into the target's first forward: an image (or what an encoder made of it), and where it is."""
    return {
        name: value
        for name, value in model_kwargs.items()
        if name not in HANDLED and (isinstance(value, torch.Tensor) or (name == ENCODED_MEDIA and value))
    }


def has_a_column_per_token(value: Any, ids: torch.LongTensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == ids.shape


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
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "drafting continues prompts from their last column, got some that are padded on the right: set "
            'tokenizer.padding_side = "left"'
        )
    text_config = target.config.get_text_config(decoder=True)
    if attention_mask is not None and any(size is not None for size in attention_windows(text_config).values()):
        check_has_no_gap(attention_mask)
    check_can_roll_back(text_config)
    if is_hybrid(text_config):
        check_hybrid(text_config.model_type, batch, settings)
    elif batch > 1 or settings.tree_budget:
        check_takes_masks(target, model_kwargs)
    check_cache(model_kwargs.get("past_key_values"), batch, length)
    others = sorted(first_inputs(model_kwargs))
    if others and text_config is target.config:
        raise ValueError(
            f"a {type(target).__name__} drafts with text alone, got {', '.join(others)}: leave them out, or call generate "
            "without assistant_model"
        )


def check_has_no_gap(attention_mask: torch.Tensor) -> None:
    """Raise a `ValueError` for a mask `(batch, length)` with zeros behind a one."""
    real = attention_mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "a target with sliding windows counts masked-out tokens as distance, and drafting leaves them out, got an "
            "attention_mask with zeros inside the text: take these tokens out of input_ids, or pad on the left only"
        )


def check_hybrid(model_type: str, batch: int, settings: DraftSettings) -> None:
    """Raise a `ValueError` where recurrent layers can't read a draft, or are given a batch; warn of a tree."""
    if model_type not in CONTINUING_FAMILIES:
        raise ValueError(
            f"the recurrent layers of a {model_type} target are not known to go on from their state when they read several "
            f"tokens at once, as those of {', '.join(sorted(CONTINUING_FAMILIES))} do: call generate without assistant_model"
        )
    if batch > 1:
        raise ValueError(
            "a target with recurrent layers reads its drafts one sequence at a time, since its rows would go back to "
            f"different states; got a batch of {batch}: call generate for each row, or without assistant_model"
        )
    if settings.tree_budget:
        logger.warning_once(
            "This target has recurrent layers, which read one branch only: drafting chains instead of trees of "
            f"{settings.tree_budget} nodes. Set tree_budget to 0 to avoid this warning."
        )


def check_takes_masks(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the target takes the masks and positions of a tree or of rows of different lengths."""
    attention = target.config.get_text_config(decoder=True)._attn_implementation
    if any(name in attention for name in MASKLESS_ATTENTION):
        raise ValueError(
            f"trees and batches need an attention mask of their own, which {attention} does not take: load the target with "
            'attn_implementation="sdpa", or draft chains (tree_budget=0) for one sequence at a time'
        )
    # A model that transformers lists neither as compilable nor as open to attention kernels (GPT-Neo) makes masks of its own
    # from the columns of its cache, and ALiBi makes its biases from them.
    if not (target._can_compile_fullgraph or target._supports_attention_backend) or uses_alibi(target):
        raise ValueError(
            f"trees and batches need a target that takes masks and positions as they are, and {type(target).__name__} derives "
            "its own from the columns of its cache: draft chains (tree_budget=0) for one sequence at a time"
        )
    if model_kwargs.get("position_ids") is None:
        raise ValueError(
            f"trees and batches need position_ids, which {type(target).__name__} does not take: draft chains "
            "(tree_budget=0) for one sequence at a time"
        )


def uses_alibi(target: PreTrainedModel) -> bool:
    return bool(target.config.get_text_config(decoder=True).to_dict().get("alibi"))


class TargetReader:
    """Runs the target, and keeps its cache at the committed text.

    Args:
        target: the model.
        model_kwargs: as `generate` prepared them.
        requested: keyword arguments for every forward (which hidden states to return, attentions).
    """

    def __init__(self, target: PreTrainedModel, model_kwargs: dict[str, Any], requested: dict[str, Any]) -> None:
        text_config = target.config.get_text_config(decoder=True)
        self.target, self.device = target, input_device(target)
        self.cache = TargetCache(text_config)
        self.is_hybrid = is_hybrid(text_config)
        self.takes_positions = model_kwargs.get("position_ids") is not None
        self.keeps_logits = target._supports_logits_to_keep()
        self.windows = attention_windows(text_config)
        self.has_windows = any(size is not None for size in self.windows.values())
        # How far the positions on each axis are ahead of the token's index, once the prompt is read.
        self.axis_shift: torch.LongTensor | None = None
        # Of the tokens that the last forward read, `(batch, length + nodes)`.
        self.positions: torch.LongTensor | None = None
        others = {
            name: value
            for name, value in model_kwargs.items()
            if name not in HANDLED
            and name != ENCODED_MEDIA
            and value is not None
            and not isinstance(value, torch.Tensor)
        }
        self.arguments = {**others, **requested, "use_cache": True, "return_dict": True, "past_key_values": self.cache}

    def read_prompt(self, prompt: Prompt, tree: TokenTree | None) -> Any:
        """The first forward, which may need more than the text; see [`read`]."""
        if prompt.axes is not None:
            self.axis_shift = prompt.axes[:, :, -1:] - prompt.text.positions[:, -1:]
        return self.read(prompt.text, tree, prompt.axes, prompt.extra)

    def read(
        self,
        unread: Unread,
        tree: TokenTree | None,
        axes: torch.LongTensor | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Any:
        """Forward over the unread tokens, whose last is the root, and the nodes behind it.

        Args:
            unread, tree: what to read.
            axes: `(axes, batch, length)`, the positions of unread tokens that are not their index.
            extra: other inputs of the forward.

        Returns:
            The target's outputs; `logits` are `(batch, slots, vocab)`, one row for the root and each node.
        """
        ids, positions, num_slots = unread.ids, unread.positions, 1
        if tree is not None:
            ids = torch.cat([ids, tree.tokens], dim=1)
            positions = unread.with_slots(tree.slot_depths)
            num_slots += tree.num_nodes
        self.positions = positions
        arguments = {**self.arguments, **(extra or {})}
        if self.axis_shift is not None:
            positions = positions + self.axis_shift
            if axes is not None:
                positions[:, :, : axes.shape[2]] = axes
        if self.takes_positions:
            arguments["position_ids"] = positions.to(self.device)
        if self.keeps_logits:
            arguments["logits_to_keep"] = num_slots
        mask = self.attention_mask(unread, tree)
        if mask is not None:
            arguments["attention_mask"] = mask
        outputs = self.target(input_ids=ids.to(self.device), **arguments)
        if outputs.logits.shape[1] != num_slots:
            outputs.logits = outputs.logits[:, -num_slots:]
        return outputs

    def attention_mask(self, unread: Unread, tree: TokenTree | None) -> Any:
        """The mask of this forward; `None` where the target's own is right: one sequence, and a chain."""
        batch, length = unread.ids.shape
        is_chain = tree is None or tree.is_chain
        if is_chain and batch == 1:
            return None
        if length > 1 or self.cache.get_seq_length() == 0:
            # Prompts, which are read without a draft.
            return are_real(unread.counts, batch, length, self.device).long()
        within = root_and_nodes(tree, batch, self.device)
        depths = within.new_zeros(1, dtype=torch.long)
        if tree is not None and self.has_windows:
            depths = tree.slot_depths.to(depths.device)
        depths = depths.expand(batch, -1)
        return additive_masks(within, depths, self.windows, self.cache.columns_by_type(), self.target.dtype)

    def select_rows(self, rows: list[int]) -> None:
        """Go on with only some rows of the batch."""
        self.cache.select_rows(rows)
        if self.axis_shift is not None:
            self.axis_shift = self.axis_shift[:, rows]

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
    within[:, :, 0].fill_(True)
    return within
