"""A drafter's side of a round, for transformers' assisted decoding and for our own loop alike."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from ..models.drafting import DraftContext, ParallelDrafter
from .settings import DraftSettings, read_settings
from .stats import DecodeStats


class ParallelCandidateGenerator(CandidateGenerator):
    """Owns the draft cache, feeds the drafter what was committed, and yields marginal logits.

    Our loop calls [`observe`] and [`draft_logits`]; transformers' loop calls [`get_candidates`], which is built on them.

    Args:
        drafter: any drafter of this package, or of its code on the Hub.
        target: the model that is being sped up.
        generation_config: that of the `generate` call; gives the maximum length.
    """

    requires_model_outputs = True

    def __init__(self, drafter: ParallelDrafter, target: PreTrainedModel, generation_config: GenerationConfig) -> None:
        self.drafter = drafter
        self.settings: DraftSettings = read_settings(drafter.generation_config)
        self.depth = drafter.draft_depth
        self.taps = drafter.tapped_hidden_states
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": self.taps} if self.taps else {}
        self.max_length = generation_config.max_length
        self.state = drafter.new_draft_state(target)
        self.stats = DecodeStats()
        self._pending: list[DraftContext] = []
        self._num_seen = 0
        self._first_unread = 0
        self._last_depth = 0

    def observe(
        self,
        new_ids: torch.LongTensor,
        new_positions: torch.LongTensor,
        features: torch.Tensor | None = None,
        feature_positions: torch.LongTensor | None = None,
    ) -> None:
        """Note newly committed tokens, and the tapped states of what the target has read; see [`DraftContext`]."""
        self._pending.append(DraftContext(new_ids, new_positions, features, feature_positions))

    def draft_logits(self, depth: int) -> torch.Tensor | None:
        """Marginal logits `(batch, depth, vocab)` behind the committed text, from one forward of the drafter.

        `None` where there is nothing to draft (`depth` is 0) or nothing to draft from: a drafter that taps the target has
        to wait until the target has read the prompt.
        """
        context = self._pending_context()
        if depth == 0 or (self.taps and context.features is None):
            return None
        self._pending.clear()
        return self.drafter.draft(context, self.state, depth)

    def _pending_context(self) -> DraftContext:
        """All that was observed since the last draft, as one context."""
        if len(self._pending) == 1:
            return self._pending[0]

        def joined(name: str) -> torch.Tensor | None:
            parts = [part for context in self._pending if (part := vars(context)[name]) is not None]
            return torch.cat(parts, dim=1) if parts else None

        merged = DraftContext(
            joined("new_ids"), joined("new_positions"), joined("features"), joined("feature_positions")
        )
        self._pending = [merged]
        return merged

    def tapped(self, hidden_states: tuple[torch.Tensor | None, ...], num_unread: int, nodes: list[int]) -> torch.Tensor:
        """The tapped states, side by side, of a forward's unread rows and of some of the nodes behind them.

        Returns:
            `(batch, num_unread + len(nodes), taps * hidden)`.
        """
        rows = slice(0, num_unread + len(nodes))
        if nodes != list(range(len(nodes))):
            rows = [*range(num_unread), *(num_unread + node for node in nodes)]
        device = self.drafter.device
        return torch.cat([hidden_states[tap][:, rows].to(device) for tap in self.taps], dim=-1)

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
        """The text `(1, length)` with a drafted chain behind it, for transformers' own loop.

        No logits come back: the drafts are not drawn from them, and a rejection step that believed they were would sample
        another law. Without them that loop draws the target's token and compares, as ours does.
        """
        self._observe_stock(input_ids, model_kwargs, model_outputs, n_last_matches)
        depth = max(0, min(self.depth, self.max_length - input_ids.shape[1] - 1))
        logits = self.draft_logits(depth)
        self._last_depth = 0 if logits is None else depth
        if logits is None:
            return input_ids, None
        return torch.cat([input_ids, logits.argmax(dim=-1).to(input_ids.device)], dim=1), None

    def _observe_stock(self, input_ids, model_kwargs, model_outputs, num_matches) -> None:
        """Work out from the stock loop's arguments what was committed in its last round."""
        attention_mask = model_kwargs.get("attention_mask")
        positions = model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        real = torch.ones_like(input_ids[0], dtype=torch.bool) if attention_mask is None else attention_mask[0].bool()
        is_new = real.clone()
        is_new[: self._num_seen] = False
        features = feature_positions = None
        if model_outputs is not None and self.taps:
            # The last forward read, from the first token unread before it, all but the newest token.
            read = slice(self._first_unread, input_ids.shape[1] - 1)
            features = self.tapped(model_outputs.hidden_states, read.stop - read.start, [])[:, real[read]]
            feature_positions = positions[:, read][:, real[read]]
        self.observe(input_ids[:, is_new], positions[:, is_new], features, feature_positions)
        if model_outputs is not None:
            self._first_unread = input_ids.shape[1] - 1
        self._num_seen = input_ids.shape[1]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called by transformers' loop after each round: note what was accepted."""
        num_matches = int(num_matches)
        self.stats.add_round(self._last_depth, num_matches, num_matches + 1)
