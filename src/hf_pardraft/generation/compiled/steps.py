"""The parts of a compiled round: tensors of fixed shapes in and out, and no look at their values.

What lasts from round to round (buffers, lengths, news) is changed in place, as CUDA graphs need it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.base import ParallelDrafter
from ...models.inputs import DraftState, StaticDraftInputs, take_rows
from ...models.masks import buffer_masks
from ..host import for_host
from ..target_forward import root_and_nodes
from ..tree.token_tree import TokenTree, build_tree
from ..tree.verify import accept
from .static_cache import Buffers


@dataclass
class Standing:
    """Where every row of the batch stands between two rounds.

    Attributes:
        lengths: `(batch,)`, entries of each row in the target's buffers.
        draft_lengths: `(batch,)`, in the drafter's.
        roots, root_positions: `(batch, 1)`, the last committed token, which the target has not read, and its position.
        growing: `(batch,)`, 1 for rows that go on, 0 for rows that are over, which stay as they are.
        axis_shift: `(axes, batch, 1)` or `None`, how far a target's positions on each axis are ahead.
    """

    lengths: torch.LongTensor
    draft_lengths: torch.LongTensor
    roots: torch.LongTensor
    root_positions: torch.LongTensor
    growing: torch.LongTensor
    axis_shift: torch.LongTensor | None = None

    def reset(self, row: int) -> None:
        """Let a row that is over stand at the beginning of its buffers, and stay there."""
        for values in (self.lengths, self.draft_lengths, self.root_positions, self.growing):
            values[row] = 0


@dataclass
class TargetSide:
    """The target, and what its forwards take besides a tree.

    Attributes:
        model, arguments: the model, and keyword arguments for it.
        windows: its attention windows, by layer type.
        taps: hidden states to return.
        cache: its buffers.
        standing: of the rows.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    windows: dict[str, int | None]
    taps: list[int]
    cache: Buffers
    standing: Standing


@dataclass
class DrafterSide:
    """The drafter, and what it drafts from.

    Attributes:
        model: the drafter.
        state: its own, which has its buffers.
        news: what it has not read yet.
        depth: how many tokens to draft.
    """

    model: ParallelDrafter
    state: DraftState
    news: StaticDraftInputs
    depth: int


@dataclass
class Draft:
    """What a drafter drafts.

    Attributes:
        logits: `(batch, depth, vocab)`, marginal ones.
        chain: `(batch, depth)`, the likeliest tokens.
        tree: what grew from the logits, if it did.
    """

    logits: torch.Tensor
    chain: torch.LongTensor
    tree: TokenTree | None = None


def changing(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those tensors among a piece's arguments that it changes, and that must be as before if it is to run again.

    What it writes to keys and values lies behind the entries that `lengths` counts, and is then written again.
    """
    found = []
    for value in arguments:
        owner = value.standing if isinstance(value, TargetSide) else value
        owner = owner.news if isinstance(owner, DrafterSide) else owner
        if isinstance(owner, (Standing, StaticDraftInputs)):
            found += [tensor for tensor in vars(owner).values() if tensor is not None]
    return found


def draft(drafter: DrafterSide, standing: Standing) -> Draft:
    """A draft of the whole batch, without a tree; the news are none any more."""
    news, state = drafter.news, drafter.state
    logits = drafter.model.draft_static(news, state, standing.draft_lengths, drafter.depth)
    state.cache.columns = None
    standing.draft_lengths.add_(news.counts * standing.growing)
    news.counts.zero_()
    return Draft(logits, logits.argmax(dim=-1))


def grow_tree(
    draft_logits: torch.Tensor,
    end_tokens: torch.LongTensor | None,
    settings: tuple[tuple[str, Any], ...],
    deepest: torch.LongTensor | None = None,
) -> TokenTree:
    """[`build_tree`] with some settings."""
    return build_tree(draft_logits.float(), end_token_id=end_tokens, deepest=deepest, **dict(settings))


def read(target: TargetSide, tree: TokenTree) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's forward over the root and a tree.

    Args:
        target: the target's side.
        tree: of one number of nodes in all rounds; tokens are below 0 where there is no node.

    Returns:
        Logits `(batch, slots, vocab)` in float32, and the tapped states `(batch, slots, taps * hidden)`.
    """
    cache, standing = target.cache, target.standing
    ids = torch.cat([standing.roots, tree.tokens.clamp(min=0)], dim=1)
    slots = torch.arange(ids.shape[1], device=ids.device)[None]
    if tree.is_chain:
        depths, within = slots, slots[:, None] <= slots[:, :, None]
    else:
        depths, within = tree.slot_depths, root_and_nodes(tree, len(ids), ids.device)
    # Behind the longest text that a target has positions for, there may be none for slots without a node.
    is_empty = torch.nn.functional.pad(tree.tokens < 0, (1, 0))
    positions = standing.root_positions + depths.masked_fill(is_empty, 0)
    if standing.axis_shift is not None:
        positions = positions + standing.axis_shift
    cache.columns = standing.lengths[:, None] + slots
    mask = buffer_masks(within, depths, target.windows, standing.lengths, cache.capacity, target.model.dtype)
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
    target: TargetSide, tree: TokenTree, choices: torch.LongTensor, states: torch.Tensor | None, news: StaticDraftInputs
) -> torch.LongTensor:
    """Accept, keep the accepted part of the buffers, and say what is new.

    Args:
        target: the target's side, whose buffers and standing change in place.
        tree: what was proposed, N nodes.
        choices: `(batch, N + 1)`, the target's.
        states: `(batch, N + 1, taps * hidden)`.
        news: changed in place.

    Returns:
        What the host wants to know of it, see [`for_host`].
    """
    cache, standing = target.cache, target.standing
    acceptance = accept(tree, choices)
    # No path is longer than what there is room for news.
    most = min(choices.shape[1], news.ids.shape[1])
    slots = torch.arange(most, device=choices.device)
    # Off the path there may be no choice, but the drafter reads whole rows, and looks all of their tokens up.
    tokens = acceptance.tokens[:, :most].clamp(min=0)
    counts = (acceptance.num_accepted + 1) * standing.growing
    if acceptance.path is not None:
        path, start = acceptance.path[:, :most], standing.lengths[:, None]
        for layer in cache.layers:
            # What lies behind the path goes behind the end of the row, where it is overwritten.
            layer.move(start + path, start + slots)
        if states is not None:
            states = take_rows(states, path)
    elif states is not None:
        states = states[:, :most]
    # Of rows that are over, nobody reads the news.
    places = (news.counts[:, None] + slots).clamp(max=news.ids.shape[1] - 1)
    news.ids.scatter_(1, places, tokens)
    news.positions.scatter_(1, places, standing.root_positions + 1 + slots)
    if states is not None:
        news.features.scatter_(1, places[:, :, None].expand(-1, -1, states.shape[2]), states.to(news.features.dtype))
    news.counts.add_(counts)
    newest = tokens.gather(1, (counts[:, None] - 1).clamp(min=0))
    standing.roots.copy_(torch.where(counts[:, None] > 0, newest, standing.roots))
    standing.root_positions.add_(counts[:, None])
    standing.lengths.add_(counts)
    return for_host(acceptance)


def read_and_commit(target: TargetSide, tree: TokenTree, news: StaticDraftInputs) -> torch.LongTensor:
    """[`read`] and [`commit`] in one, where the target's choice is its likeliest token."""
    logits, states = read(target, tree)
    return commit(target, tree, logits.argmax(dim=-1), states, news)


def read_commit_and_draft(
    target: TargetSide,
    drafter: DrafterSide,
    tree: TokenTree,
    end_tokens: torch.LongTensor | None,
    tree_settings: tuple[tuple[str, Any], ...] | None,
) -> tuple[torch.LongTensor, Draft]:
    """[`read_and_commit`], the next [`draft`] and, with settings for it, [`grow_tree`] in one."""
    outcome = read_and_commit(target, tree, drafter.news)
    drafted = draft(drafter, target.standing)
    if tree_settings is not None:
        drafted.tree = grow_tree(drafted.logits, end_tokens, tree_settings)
    return outcome, drafted
