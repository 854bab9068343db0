"""The target's side of a round: one forward over the unread text and a tree, on a cache that can roll back."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..models.inputs import are_real, input_device, last_columns
from ..models.masks import additive_masks, attention_windows, causal_masks
from .cache import TargetCache, is_hybrid
from .pending import ENCODED_MEDIA, HANDLED, TOKEN_TYPES, Prompt, Unread
from .tree.token_tree import TokenTree


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
        self.text_config = text_config
        self.cache = TargetCache(text_config)
        self.is_hybrid = is_hybrid(text_config)
        self.takes_positions = model_kwargs.get("position_ids") is not None
        self.keeps_logits = target._supports_logits_to_keep()
        self.windows = attention_windows(text_config)
        self.has_windows = any(size is not None for size in self.windows.values())
        # How far the positions on each axis are ahead of the token's index, once the prompt is read.
        self.axis_shift: torch.LongTensor | None = None
        # Of a target that is told the type of each token: that of a prompt's last token, which all later ones have, `(batch, 1)`.
        self.token_types: torch.LongTensor | None = None
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
        self.of_all_rows = (self.axis_shift, self.token_types)
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
        if self.token_types is not None:
            given = arguments.get(TOKEN_TYPES, self.token_types[:, :0])
            types = self.token_types.expand(-1, ids.shape[1] - given.shape[1])
            arguments[TOKEN_TYPES] = torch.cat([given, types], dim=1).to(self.device)
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
        num_cached = self.cache.get_seq_length()
        if length > 1 or num_cached == 0:
            # Prompts, which are read without a draft, maybe after what an earlier call has read.
            real = are_real(unread.counts, batch, length, self.device)
            if num_cached == 0:
                return real.long()
            return causal_masks(real, self.windows, self.cache.columns_by_type(), self.target.dtype)
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
        if self.token_types is not None:
            self.token_types = self.token_types[rows]

    def forget_all(self) -> None:
        """Begin with an empty cache."""
        self.cache = self.arguments["past_key_values"] = TargetCache(self.text_config)

    def select_all_rows(self) -> None:
        """Go on with the whole batch of the prompt, and an empty cache."""
        self.forget_all()
        self.axis_shift, self.token_types = self.of_all_rows

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
