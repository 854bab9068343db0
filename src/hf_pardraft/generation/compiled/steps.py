"""The step functions of a compiled round: tensors of fixed shapes in and out, and no look at their values.

What lasts from round to round (caches, lengths, pending tokens) is changed in place, as CUDA graphs need it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...likeliest import likeliest
from ...models.base import ParallelDrafter
from ...models.cache import StaticColumns
from ...models.inputs import DraftState, StaticDraftInputs, take_positions
from ...models.masks import additive_masks
from ..target_side.prompt import PendingTokens
from ..target_side.reader import anchor_and_nodes
from ..tree.columns import tokens_of
from ..tree.token_tree import TokenTree, build_tree
from ..tree.verify import accept, for_host
from .static_cache import StaticKVCache, contiguous_copy, static


@dataclass
class DecodeState:
    """Where every batch item stands between two rounds.

    Attributes:
        lengths: `(batch,)`, entries of each batch item in the target's cache.
        draft_lengths: `(batch,)`, in the drafter's.
        anchors, anchor_positions: `(batch, 1)`, the last committed token, which the target has not read, and its position.
        growing: `(batch,)`, 1 for items that go on, 0 for items that are over, which stay as they are.
        last_positions: `(batch, 1)`, the last position that is read of each item's text, if that grows as long as it may.
        axis_shift: `(axes, batch, 1)` or `None`, how far a target's positions on each axis are ahead.
    """

    lengths: torch.LongTensor
    draft_lengths: torch.LongTensor
    anchors: torch.LongTensor
    anchor_positions: torch.LongTensor
    growing: torch.LongTensor
    last_positions: torch.LongTensor
    axis_shift: torch.LongTensor | None = None

    def reset(self, item: int) -> None:
        """Let a batch item that is over stand at the beginning of its cache, and stay there."""
        for values in (self.lengths, self.draft_lengths, self.anchor_positions, self.growing):
            values[item] = 0


def first_decode_state(
    lengths: list[int],
    draft_lengths: list[int],
    pending: PendingTokens,
    last_positions: torch.LongTensor,
    axis_shift: torch.LongTensor | None,
) -> DecodeState:
    """Where batch items stand that have `lengths` entries in the target's cache, and the anchors to be read."""
    device = pending.ids.device
    tensors = (
        torch.tensor(lengths, device=device),
        torch.tensor(draft_lengths, device=device),
        contiguous_copy(pending.ids),
        contiguous_copy(pending.anchor_positions),
        torch.ones(len(lengths), dtype=torch.long, device=device),
        contiguous_copy(last_positions),
        None if axis_shift is None else contiguous_copy(axis_shift),
    )
    return DecodeState(*(None if tensor is None else static(tensor) for tensor in tensors))


@dataclass
class TargetSide:
    """The target, and what its forwards take besides a tree.

    Attributes:
        model, arguments: the model, and keyword arguments for it.
        windows: its attention windows, by layer type.
        taps: hidden states to return.
        cache: its own.
        decode_state: of the batch.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    windows: dict[str, int | None]
    taps: list[int]
    cache: StaticKVCache
    decode_state: DecodeState


@dataclass
class DrafterSide:
    """The drafter, and what it drafts from.

    Attributes:
        model: the drafter.
        state: its own, with its static KV cache.
        inputs: its pending tokens.
        depth: how many tokens to draft.
        token_ids: tokens of the columns of its logits; `None` if they are the same.
    """

    model: ParallelDrafter
    state: DraftState
    inputs: StaticDraftInputs
    depth: int
    token_ids: torch.LongTensor | None = None


@dataclass
class Draft:
    """What a drafter drafts.

    Attributes:
        logits: `(batch, depth, columns)`, marginal ones.
        chain: `(batch, depth)`, the likeliest tokens.
        num_read: `(batch,)`, the pending tokens that were read for it; `None` if it was drafted uncompiled.
        tree: what grew from the logits, if it did.
    """

    logits: torch.Tensor
    chain: torch.LongTensor
    num_read: torch.LongTensor | None = None
    tree: TokenTree | None = None

    @property
    def depth(self) -> int:
        """How many tokens were drafted."""
        return self.chain.shape[1]


def changing(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those tensors among a step's arguments that it changes, and that must be as before if it is to run again.

    What it writes to keys and values lies after the entries that `lengths` counts, and is then written again.
    """
    found = []
    for value in arguments:
        owner = value.decode_state if isinstance(value, TargetSide) else value
        owner = owner.inputs if isinstance(owner, DrafterSide) else owner
        if isinstance(owner, (DecodeState, StaticDraftInputs)):
            found += [tensor for tensor in vars(owner).values() if tensor is not None]
    return found


def draft(drafter: DrafterSide, decode_state: DecodeState) -> Draft:
    """A draft of the whole batch, without a tree; no tokens are pending any more."""
    inputs, state = drafter.inputs, drafter.state
    logits = drafter.model.draft_static(inputs, state, decode_state.draft_lengths, drafter.depth)
    state.cache.columns = None
    num_read = inputs.counts * decode_state.growing
    decode_state.draft_lengths.add_(num_read)
    inputs.counts.zero_()
    return Draft(logits, tokens_of(likeliest(logits), drafter.token_ids), num_read)


def take_back(drafted: Draft, inputs: StaticDraftInputs, decode_state: DecodeState) -> None:
    """Let the tokens that were read for a draft be pending again: the one of another depth that follows reads them, too."""
    num_read = drafted.num_read * decode_state.growing
    decode_state.draft_lengths.sub_(num_read)
    inputs.counts.copy_(num_read)


def grow_tree(
    draft_logits: torch.Tensor,
    end_tokens: torch.LongTensor | None,
    settings: tuple[tuple[str, Any], ...],
    deepest: torch.LongTensor | None = None,
    token_ids: torch.LongTensor | None = None,
) -> TokenTree:
    """[`build_tree`] with some settings."""
    logits = draft_logits.float()
    return build_tree(logits, end_token_id=end_tokens, deepest=deepest, token_ids=token_ids, **dict(settings))


def read(target: TargetSide, tree: TokenTree) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's forward over the anchor and a tree.

    Args:
        target: the target's side.
        tree: of one number of nodes in all rounds; tokens are below 0 where there is no node.

    Returns:
        Logits `(batch, slots, vocab)` in float32, and the tapped states `(batch, slots, taps * hidden)`.
    """
    cache, decode_state = target.cache, target.decode_state
    ids = torch.cat([decode_state.anchors, tree.tokens.clamp(min=0)], dim=1)
    slots = torch.arange(ids.shape[1], device=ids.device)[None]
    if tree.is_chain:
        depths, within = slots, slots[:, None] <= slots[:, :, None]
    else:
        depths, within = tree.slot_depths, anchor_and_nodes(tree, len(ids), ids.device)
    # After the longest text that a target has positions for, there may be none for slots that are never committed.
    positions = torch.minimum(decode_state.anchor_positions + depths, decode_state.last_positions)
    if decode_state.axis_shift is not None:
        positions = positions + decode_state.axis_shift
    cache.columns = decode_state.lengths[:, None] + slots
    columns = StaticColumns(decode_state.lengths, cache.capacity)
    mask = additive_masks(within, depths, target.windows, columns, target.model.dtype)
    outputs = target.model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **target.arguments,
    )
    cache.columns = None
    states = torch.cat([outputs.hidden_states[tap] for tap in target.taps], dim=-1) if target.taps else None
    return outputs.logits.float(), states


def commit(
    target: TargetSide,
    tree: TokenTree,
    choices: torch.LongTensor,
    states: torch.Tensor | None,
    inputs: StaticDraftInputs,
) -> torch.LongTensor:
    """Accept, keep the accepted part of the cache, and say what is new.

    Args:
        target: the target's side, whose cache and decode state change in place.
        tree: what was proposed, N nodes.
        choices: `(batch, N + 1)`, the target's.
        states: `(batch, N + 1, taps * hidden)`.
        inputs: changed in place.

    Returns:
        What the host wants to know of it, see [`for_host`].
    """
    cache, decode_state = target.cache, target.decode_state
    acceptance = accept(tree, choices)
    # No path is longer than there is room for pending tokens.
    most = min(choices.shape[1], inputs.ids.shape[1])
    slots = torch.arange(most, device=choices.device)
    # Off the path there may be no choice, but the drafter reads the whole width, and looks all of its tokens up.
    tokens = acceptance.tokens[:, :most].clamp(min=0)
    counts = (acceptance.num_accepted + 1) * decode_state.growing
    if acceptance.path is not None:
        path, start = acceptance.path[:, :most], decode_state.lengths[:, None]
        for layer in cache.layers:
            # What lies after the path goes after the end of the text, where it is overwritten.
            layer.move(start + path, start + slots)
        if states is not None:
            states = take_positions(states, path)
    elif states is not None:
        states = states[:, :most]
    # Of batch items that are over, nobody reads the pending tokens.
    places = (inputs.counts[:, None] + slots).clamp(max=inputs.ids.shape[1] - 1)
    inputs.ids.scatter_(1, places, tokens)
    inputs.positions.scatter_(1, places, decode_state.anchor_positions + 1 + slots)
    if states is not None:
        inputs.features.scatter_(
            1, places[:, :, None].expand(-1, -1, states.shape[2]), states.to(inputs.features.dtype)
        )
    inputs.counts.add_(counts)
    newest = tokens.gather(1, (counts[:, None] - 1).clamp(min=0))
    decode_state.anchors.copy_(torch.where(counts[:, None] > 0, newest, decode_state.anchors))
    decode_state.anchor_positions.add_(counts[:, None])
    decode_state.lengths.add_(counts)
    return for_host(acceptance)


def read_and_commit(target: TargetSide, tree: TokenTree, inputs: StaticDraftInputs) -> torch.LongTensor:
    """[`read`] and [`commit`] in one, where the target's choice is its likeliest token."""
    logits, states = read(target, tree)
    return commit(target, tree, likeliest(logits), states, inputs)


def narrowed(inputs: StaticDraftInputs, width: int) -> StaticDraftInputs:
    """The same memory, for so many tokens an item at most."""
    if width >= inputs.ids.shape[1]:
        return inputs
    features = None if inputs.features is None else inputs.features[:, :width]
    return StaticDraftInputs(inputs.ids[:, :width], inputs.positions[:, :width], inputs.counts, features)


def read_commit_and_draft(
    target: TargetSide,
    drafter: DrafterSide,
    tree: TokenTree,
    end_tokens: torch.LongTensor | None,
    tree_settings: tuple[tuple[str, Any], ...] | None,
) -> tuple[torch.LongTensor, Draft]:
    """[`read_and_commit`], the next [`draft`] and, with settings for it, [`grow_tree`] in one.

    The drafter has read all tokens before those that are committed here, so that there are no more than the tree has slots.
    """
    inputs = narrowed(drafter.inputs, tree.num_nodes + 1)
    outcome = read_and_commit(target, tree, inputs)
    reader = DrafterSide(drafter.model, drafter.state, inputs, drafter.depth, drafter.token_ids)
    drafted = draft(reader, target.decode_state)
    if tree_settings is not None:
        drafted.tree = grow_tree(drafted.logits, end_tokens, tree_settings, token_ids=drafter.token_ids)
    return outcome, drafted
