"""A drafter's side of a round, for transformers' assisted decoding and for our own loop alike."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from ..likeliest import likeliest
from ..models.base import ParallelDrafter
from ..models.inputs import DraftInputs, cached_arange, last_columns, take_positions
from .pending import PendingInputs
from .settings import DraftSettings, settings_of_call
from .stats import DecodeStats, Proposal
from .target_side.positions import num_positions, room_before
from .target_side.prompt import PendingTokens
from .target_side.rope import RopeChanges, longest_text, rope_changes
from .target_side.structure import modules_of, text_config_of
from .tree.columns import tokens_of

# Of each drafter, in how many calls it drafts, and the modules that were in training mode before them.
_trained: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[nn.Module]]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def evaluating(drafter: PreTrainedModel) -> Iterator[None]:
    """Let a drafter that is being trained draft as it will later: dropout would take numbers from the caller's generator.

    Of several calls, in threads, the last one that ends puts its modules back.
    """
    with _lock:
        num_calls, trained = _trained.get(drafter, (0, []))
        modules = [module for module in modules_of(drafter) if module.training]
        _trained[drafter] = num_calls + 1, trained + modules
        for module in modules:
            module.training = False
    try:
        yield
    finally:
        with _lock:
            num_calls, trained = _trained.pop(drafter)
            if num_calls > 1:
                _trained[drafter] = num_calls - 1, trained
            for module in trained if num_calls == 1 else ():
                module.training = True


class ParallelCandidateGenerator(CandidateGenerator):
    """Owns the draft cache, feeds the drafter what was committed, and yields marginal logits.

    Our loop calls [`observe`] and [`draft_logits`]; transformers' loop calls [`get_candidates`], which is built on them.

    Args:
        drafter: any drafter of this package, or of its code on the Hub.
        target: the model that is being sped up.
        generation_config: that of the `generate` call; gives the maximum length.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: ParallelDrafter,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
    ) -> None:
        self.drafter = drafter
        self.settings: DraftSettings = settings_of_call(drafter, generation_config)
        self.depth = self.settings.depth
        self.device = drafter.device
        self.taps = drafter.taps_for(target, self.settings.use_target_features)
        returns_states = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        # Of all layers, if the caller is to have them.
        wanted = True if returns_states else self.taps
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": wanted} if wanted else {}
        self.max_length = generation_config.max_length
        self.target_config = text_config_of(target)
        self.state = drafter.new_draft_state(target)
        self.stats = DecodeStats()
        self.pending = PendingInputs()
        self._num_seen = 0
        self._first_pending = 0
        self._last_depth = 0
        self._last_chain: torch.LongTensor | None = None

    @cached_property
    def rope(self) -> RopeChanges:
        """Where the target's rotary frequencies change; our own loop knows it already."""
        return rope_changes(self.target_config)

    def gathered_heads(self) -> list[nn.Linear]:
        """What scores a part of the target's tokens, if that is no module of target or drafter."""
        head, has_own_tokens = self.state.lm_head, self.drafter.draft_token_ids is not None
        return [head] if has_own_tokens and type(head) is nn.Linear else []

    def observe(self, context: DraftInputs) -> None:
        """Note newly committed tokens, and the tapped states of what the target has read."""
        self.pending.add(context)

    def draft_logits(self, depth: int) -> torch.Tensor | None:
        """Marginal logits `(batch, depth, columns)` after the committed text, see [`ParallelDrafter.draft`], from one forward.

        `None` where there is nothing to draft (`depth` is 0) or nothing to draft from: a drafter that taps the target has
        to wait until the target has read the prompt.
        """
        if depth == 0 or (self.taps and not self.pending.has_features):
            return None
        return self.drafter.draft(self.pending.take(), self.state, depth)

    def token_ids(self, device: torch.device) -> torch.LongTensor | None:
        """`(columns,)`, the tokens of the columns of [`draft_logits`]; `None` if they are the same."""
        token_ids = self.drafter.draft_token_ids
        return None if token_ids is None else token_ids.to(device)

    def select_items(self, items: list[int]) -> None:
        """Go on with only some items of the batch."""
        self.state.cache.select_items(items)
        self.pending.select_items(items)

    def add_features(
        self,
        inputs: DraftInputs,
        outputs: Any,
        pending: PendingTokens,
        positions: torch.LongTensor,
        nodes: list[list[int]],
    ) -> None:
        """Add to `inputs` the tapped states of what the target has just read, and where it stands.

        Args:
            inputs: the newly committed tokens, which end one place after what was read.
            outputs: of the target's forward.
            pending: the tokens that it read before a tree.
            positions: `(batch, length + nodes)`, of all that it read.
            nodes: for each batch item, the nodes that were kept.
        """
        length, num_reread = pending.ids.shape[1], pending.num_reread
        first = list(range(len(nodes[0])))
        if pending.counts is None and all(kept == first for kept in nodes):
            read = slice(num_reread, length + len(first))
            positions = positions[:, read]
        else:
            kept = [
                [column for column in columns if column >= num_reread] + [length + node for node in chosen]
                for columns, chosen in zip(last_columns(pending.counts, len(nodes), length), nodes, strict=True)
            ]
            counts, most = list(map(len, kept)), max(map(len, kept))
            inputs.feature_counts = None if min(counts) == most else counts
            read = torch.tensor([columns[:1] * (most - len(columns)) + columns for columns in kept], device="cpu")
            # What is read ends one place before the anchor. A prompt has positions of its own.
            last = inputs.new_positions[:, -1:]
            is_prompt = length - num_reread > 1
            positions = pending.positions if is_prompt else last + cached_arange(-most, 0, last.device)
        inputs.features = self.tapped(outputs.hidden_states, read)
        inputs.feature_positions = positions

    def tapped(
        self, hidden_states: tuple[torch.Tensor | None, ...], positions: slice | torch.LongTensor
    ) -> torch.Tensor:
        """The tapped states, side by side, of some positions of a forward.

        Args:
            hidden_states: of the target's forward, `(batch, length, hidden)` each.
            positions: a slice, or `(batch, kept)` indices.

        Returns:
            `(batch, kept, taps * hidden)`.
        """
        device = self.device
        if isinstance(positions, slice):
            return torch.cat([hidden_states[tap][:, positions].to(device) for tap in self.taps], dim=-1)
        states = [hidden_states[tap] for tap in self.taps]
        return torch.cat([take_positions(s, positions).to(device) for s in states], dim=-1)

    # transformers' assisted loop

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, None]:
        """The text `(1, length)` with a drafted chain after it, for transformers' own loop.

        No logits come back: the drafts are not drawn from them, and a rejection step that believed they were would sample
        another law. Without them that loop draws the target's token and compares, as ours does.
        """
        self._observe_stock(input_ids, model_kwargs, model_outputs)
        depth = max(0, min(self.depth, self.max_length - input_ids.shape[1] - 1))
        end = num_positions(self.target_config)
        if self.rope.any or (end is not None and input_ids.shape[1] + depth > end):
            longest = longest_text(model_kwargs.get("position_ids"), input_ids.shape[1])
            depth = room_before(end, longest, self.rope.room(longest, depth))
        logits = self.draft_logits(depth)
        self._last_depth = 0 if logits is None else depth
        if logits is None:
            return input_ids, None
        token_ids = self.token_ids(input_ids.device)
        chain = tokens_of(likeliest(logits).to(input_ids.device), token_ids)
        self._last_chain = chain if self.settings.record_drafts else None
        return torch.cat([input_ids, chain], dim=1), None

    def _observe_stock(self, input_ids, model_kwargs, model_outputs) -> None:
        """Work out from the stock loop's arguments what was committed in its last round."""
        attention_mask = model_kwargs.get("attention_mask")
        real = torch.ones_like(input_ids[0], dtype=torch.bool) if attention_mask is None else attention_mask[0].bool()
        positions = model_kwargs.get("position_ids")
        # A drafter counts tokens, whatever several positions per token the target has.
        if positions is None or positions.ndim == 3:
            positions = (real.long().cumsum(dim=0) - 1).clamp(min=0)[None]
        is_new = real.clone()
        is_new[: self._num_seen] = False
        features = feature_positions = None
        if model_outputs is not None and self.taps:
            # The last forward read, from the first token pending before it, all but the anchor.
            read = slice(self._first_pending, input_ids.shape[1] - 1)
            features = self.tapped(model_outputs.hidden_states, slice(0, read.stop - read.start))
            features = features[:, real[read].to(features.device)]
            feature_positions = positions[:, read][:, real[read]]
        self.observe(DraftInputs(input_ids[:, is_new], positions[:, is_new], features, feature_positions))
        if model_outputs is not None:
            self._first_pending = input_ids.shape[1] - 1
        self._num_seen = input_ids.shape[1]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called by transformers' loop after each round: note what was accepted."""
        num_matches = int(num_matches)
        if self._last_chain is not None and self._last_depth:
            num_before = sum(self.stats.tokens_per_round)
            tokens, depths = self._last_chain[0].tolist(), range(1, self._last_depth + 1)
            self.stats.proposals.append(
                Proposal(0, num_before, tuple(tokens), tuple(depths), num_matches, num_matches + 1)
            )
        self.stats.add_round([self._last_depth], [num_matches], [num_matches + 1])
