"""What each supervised row says of its label and of the target's law, a few rows at a time, so that no (rows, vocab) tensor is
ever whole."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .terms import kl_divergences, label_log_probs


class RowScorer:
    """Called with an lm_head and the hidden states of the supervised rows, it returns what the objectives are made of.

    The rows go through the head in chunks, whose logits are dropped at once and computed again in the backward pass. Values and
    gradients don't depend on the chunks.

    Args:
        labels: `(rows,)`; those that the drafter can't write are negative.
        with_log_probs: whether to score them. What is scored must be learned from: a part of the graph that no gradient flows
            through would keep, after the chunks were computed again, the logits of all.
        continuations: `(rows,)`, other labels to score (the target's own), negative where there is none.
        target_logits: gives the target's logits, `(chosen, columns)`, of a slice of the rows.
        temperature: of the divergence.
        rows_per_chunk: how many rows go through the head at a time.
    """

    def __init__(
        self,
        labels: torch.LongTensor,
        with_log_probs: bool = True,
        continuations: torch.LongTensor | None = None,
        target_logits: Callable[[slice], torch.Tensor] | None = None,
        temperature: float = 1.0,
        rows_per_chunk: int = 512,
    ) -> None:
        self.labels = labels
        self.with_log_probs = with_log_probs
        self.continuations = continuations
        self.target_logits = target_logits
        self.temperature = temperature
        self.rows_per_chunk = rows_per_chunk

    def __call__(self, head: nn.Module, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores of rows whose hidden states are `(rows, hidden)`.

        Returns:
            `(rows,)` each: `is_right`, whether the label is the likeliest token; and what was asked for: `log_probs` of the
            labels, those of the `continuations`, and `divergences` from the target's law.
        """
        # What fits into one chunk can stay for the backward pass.
        again = torch.is_grad_enabled() and len(states) > self.rows_per_chunk
        chunks = []
        # Of no rows there is one empty chunk, which keeps the result in the graph.
        for start in range(0, max(len(states), 1), self.rows_per_chunk):
            rows = slice(start, start + self.rows_per_chunk)
            if again:
                chunks.append(checkpoint(self._score, head, states[rows], rows, use_reentrant=False))
            else:
                chunks.append(self._score(head, states[rows], rows))
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _score(self, head: nn.Module, states: torch.Tensor, rows: slice) -> dict[str, torch.Tensor]:
        logits = head(states)
        labels = self.labels[rows].to(logits.device)
        scores = {"is_right": logits.argmax(dim=-1) == labels}
        if self.with_log_probs:
            scores["log_probs"] = label_log_probs(logits, labels, labels >= 0)
        if self.continuations is not None:
            labels = self.continuations[rows].to(logits.device)
            scores["continuations"] = label_log_probs(logits, labels, labels >= 0)
        if self.target_logits is not None:
            with torch.no_grad():
                target_logits = self.target_logits(rows).to(logits.device)
            scores["divergences"] = kl_divergences(logits, target_logits, self.temperature)
        return scores
