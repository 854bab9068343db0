"""What a caller asked `generate` to return besides the text: scores, logits, hidden states, attentions, the cache."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput


class OutputRecorder:
    """Collects one entry per generated token, in the shapes of plain `generate`.

    Plain `generate` reads one token per forward, and its first forward reads the prompt. A round here reads several rows,
    so they are handed out one token at a time; the rows before the root's belong to the first token.
    """

    def __init__(self, generation_config: GenerationConfig) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.enabled = wanted
        self.scores = () if wanted and generation_config.output_scores else None
        self.logits = () if wanted and generation_config.output_logits else None
        self.hidden_states = () if wanted and generation_config.output_hidden_states else None
        self.attentions = () if wanted and generation_config.output_attentions else None

    def add_scores(self, path: list[int], scores: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Take the processed `scores` and raw `logits`, `(1, slots, vocab)`, of the slots on the accepted path."""
        if self.scores is not None:
            self.scores += tuple(scores[:, slot] for slot in path)
        if self.logits is not None:
            self.logits += tuple(logits[:, slot] for slot in path)

    def add_states(self, outputs: Any, num_unread: int, num_before: int, num_tokens: int) -> None:
        """Take hidden states and attentions of a chain's forward.

        Args:
            outputs: of the target's forward.
            num_unread: rows up to and including the root's.
            num_before: cache entries before this forward.
            num_tokens: tokens that the round committed.
        """
        first = 0
        for index in range(num_tokens):
            end = num_unread + index
            if self.hidden_states is not None:
                self.hidden_states += (tuple(state[:, first:end] for state in outputs.hidden_states),)
            if self.attentions is not None:
                self.attentions += (tuple(a[:, :, first:end, : num_before + end] for a in outputs.attentions),)
            first = end

    def drop_last(self, count: int) -> None:
        """Forget the scores and logits of tokens that were cut off by a stopping criterion."""
        if count:
            self.scores = self.scores[:-count] if self.scores is not None else None
            self.logits = self.logits[:-count] if self.logits is not None else None

    def result(self, text: torch.LongTensor, past_key_values: Any) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """The return value of `generate`."""
        if not self.enabled:
            return text
        return GenerateDecoderOnlyOutput(
            sequences=text,
            scores=self.scores,
            logits=self.logits,
            hidden_states=self.hidden_states,
            attentions=self.attentions,
            past_key_values=past_key_values,
        )
