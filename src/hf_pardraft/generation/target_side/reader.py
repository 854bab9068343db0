"""The target's side of a round: one forward over the pending text and a tree, on a cache that can roll back."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.inputs import are_real, input_device, last_columns
from ...models.masks import additive_masks, padded_masks
from ..finished import FinishedItems
from ..tree.token_tree import TokenTree
from .cache import Entries, TargetCache
from .callers_cache import is_offloading, wanted_entries
from .prompt import ENCODED_MEDIA, HANDLED, TOKEN_TYPES, PendingTokens, Prompt
from .structure import is_hybrid, layer_types_of, text_config_of, windows_of

# What experts' routers put out: a target's configuration, or a call, may ask for it.
ROUTER_LOGITS = "output_router_logits"


class TargetReader:
    """Runs the target, and keeps its cache at the committed text.

    Args:
        target: the model.
        model_kwargs: as `generate` prepared them.
        requested: keyword arguments for every forward (which hidden states to return, attentions).
    """

    def __init__(self, target: PreTrainedModel, model_kwargs: dict[str, Any], requested: dict[str, Any]) -> None:
        text_config = text_config_of(target)
        self.target, self.device = target, input_device(target)
        self.text_config = text_config
        given = model_kwargs.get("past_key_values")
        self.on_host, self.wanted = is_offloading(given), wanted_entries(given, layer_types_of(text_config)[0])
        self.cache = TargetCache(text_config, self.on_host, self.wanted)
        self.is_hybrid = is_hybrid(text_config)
        self.takes_positions = model_kwargs.get("position_ids") is not None
        self.keeps_logits = target._supports_logits_to_keep()
        self.windows = windows_of(text_config)
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
        if (vars(text_config) | others).get(ROUTER_LOGITS):
            # Of them a loss is made that nobody sees, and that knows masks of `(batch, length)` only.
            others[ROUTER_LOGITS] = False
        self.arguments = {**others, **requested, "use_cache": True, "return_dict": True, "past_key_values": self.cache}

    def read_prompt(self, prompt: Prompt, tree: TokenTree | None) -> Any:
        """The first forward, which may need more than the text; see [`read`]."""
        if prompt.axes is not None:
            self.axis_shift = prompt.axes[:, :, -1:] - prompt.text.positions[:, -1:]
        self.of_all_items = (self.axis_shift, self.token_types)
        return self.read(prompt.text, tree, prompt.axes, prompt.extra)

    def read(
        self,
        pending: PendingTokens,
        tree: TokenTree | None,
        axes: torch.LongTensor | None = None,
        extra: dict[str, Any] | None = None,
        last_positions: torch.LongTensor | None = None,
    ) -> Any:
        """Forward over the pending tokens, whose last is the anchor, and the nodes after it.

        Args:
            pending, tree: what to read.
            axes: `(axes, batch, length)`, the positions of pending tokens that are not their index.
            extra: other inputs of the forward.
            last_positions: `(batch, 1)`, the last that plain `generate` would read of each item: there may be none after it, and
                no node there is ever committed.

        Returns:
            The target's outputs; `logits` are `(batch, slots, vocab)`, one slot for the anchor and each node.
        """
        ids, positions, num_slots = pending.ids, pending.positions, 1
        if tree is not None:
            ids = torch.cat([ids, tree.tokens], dim=1)
            positions = pending.with_slots(tree.slot_depths)
            num_slots += tree.num_nodes
            if last_positions is not None:
                positions = torch.minimum(positions, last_positions)
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
        mask = self.attention_mask(pending, tree)
        if mask is not None:
            arguments["attention_mask"] = mask
        outputs = self.target(input_ids=ids.to(self.device), **arguments)
        if outputs.logits.shape[1] != num_slots:
            outputs.logits = outputs.logits[:, -num_slots:]
        return outputs

    def attention_mask(self, pending: PendingTokens, tree: TokenTree | None) -> Any:
        """The mask of this forward; `None` where the target's own is right: items of one length, and a chain."""
        batch, length = pending.ids.shape
        is_chain = tree is None or tree.is_chain
        if is_chain and (batch == 1 or (length == 1 and self.cache.is_even)):
            return None
        if length > 1 or self.cache.get_seq_length() == 0:
            # Prompts, which are read without a draft, maybe after what an earlier call has read.
            real = are_real(pending.counts, batch, length, self.device)
            return padded_masks(real, self.windows, self.cache, self.target.dtype)
        within = anchor_and_nodes(tree, batch, self.device)
        depths = within.new_zeros(1, dtype=torch.long)
        if tree is not None and self.has_windows:
            depths = tree.slot_depths.to(depths.device)
        depths = depths.expand(batch, -1)
        return additive_masks(within, depths, self.windows, self.cache.held_columns(), self.target.dtype)

    def select_items(self, items: list[int]) -> None:
        """Go on with only some items of the batch."""
        self.cache.select_items(items)
        if self.axis_shift is not None:
            self.axis_shift = self.axis_shift[:, items]
        if self.token_types is not None:
            self.token_types = self.token_types[items]

    def forget_all(self) -> None:
        """Begin with an empty cache."""
        self.cache = self.arguments["past_key_values"] = TargetCache(self.text_config, self.on_host, self.wanted)

    def select_all_items(self) -> None:
        """Go on with the whole batch of the prompt, and an empty cache."""
        self.forget_all()
        self.axis_shift, self.token_types = self.of_all_items

    def keep(self, start: int, pending: PendingTokens, nodes: list[list[int]]) -> None:
        """Of what the last forward appended to the cache, keep the pending tokens and, for each item, some nodes."""
        batch, length = pending.ids.shape
        read = last_columns(pending.counts, batch, length)
        self.cache.keep(
            start, [item + [length + node for node in kept] for item, kept in zip(read, nodes, strict=True)]
        )

    def read_missing(
        self, finished: FinishedItems, lengths: list[int], missing: list[list[int]], last_positions: torch.LongTensor
    ) -> dict[int, Entries]:
        """Read, for a cache that is returned, what plain `generate` reads of items that are over before others.

        Args:
            finished: all items of the batch.
            lengths: of what was read of each item.
            missing: for each item, the tokens to be read: its last one, and padding up to the batch's last column but one.
            last_positions: `(batch, 1)`, of the last of these columns.

        Returns:
            The items' cache entries.
        """
        self.select_all_items()
        items = range(len(lengths))
        self.cache.hold([finished.entries[item] for item in items], lengths)
        counts, most = list(map(len, missing)), max(map(len, missing))
        ids = [[finished.padding] * (most - len(tokens)) + tokens for tokens in missing]
        positions = last_positions + torch.arange(1 - most, 1, device=last_positions.device)
        pending = PendingTokens(torch.tensor(ids, device=positions.device), positions.clamp(min=0), counts)
        start = self.cache.get_seq_length()
        self.read(pending, None)
        self.keep(start, pending, [[]] * len(lengths))
        return {item: self.cache.entries_of(item) for item in items}


def anchor_and_nodes(tree: TokenTree | None, batch: int, device: torch.device) -> torch.BoolTensor:
    """Which slots a slot sees: the anchor, its ancestors and itself. `(batch, slots, slots)`."""
    if tree is None:
        return torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    within = torch.nn.functional.pad(tree.ancestors.to(device), (1, 0, 1, 0))
    within[:, :, 0].fill_(True)
    return within
