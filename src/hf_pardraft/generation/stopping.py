"""Where a text is over, inside a run of new tokens."""

import math
from collections.abc import Callable

import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria


def pads_finished_items(criteria: StoppingCriteriaList) -> bool:
    """Whether plain `generate` pads the items that are over: it asks for an attribute that any criterion may have."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def whole_length(max_length: float) -> float:
    """At how many tokens a text has reached `max_length`, which a caller's factor may make a fraction, or an infinity."""
    return math.ceil(max_length) if max_length < math.inf else max_length


def length_limit(criteria: StoppingCriteriaList) -> float | None:
    """At how many tokens a text is over by its length; `None` where no criterion says so."""
    lengths = (whole_length(each.max_length) for each in criteria if type(each) is MaxLengthCriteria)
    return min(lengths, default=None)


def other_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria besides length and end of text."""
    return StoppingCriteriaList(each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria))


class StopChecks:
    """Finds where, inside a run of new tokens, generation is over.

    End of text and length are looked up on the host, where the new tokens are known already. Any other criterion is asked
    once per token, with the text up to that token, exactly as plain `generate` asks it.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int = 1) -> None:
        ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
        self.others, self.max_length = other_criteria(criteria), length_limit(criteria)
        self.length_criteria = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.pads = pads_finished_items(criteria)
        self.eos_token_ids = {token for criterion in ends for token in criterion.eos_token_id.flatten().tolist()}
        self.end_of_item: list[int | None] = [None] * batch

    def room(self, length: int, depth: int) -> int:
        """How many tokens are worth drafting after a text of `length` tokens: a round commits one more than it drafts."""
        return depth if self.max_length is None else max(0, min(depth, self.max_length - length - 1))

    def cut(
        self,
        item: int,
        length: int,
        new_tokens: list[int],
        text: Callable[[], torch.LongTensor],
        scores: Callable[[], tuple[torch.Tensor, ...] | None],
    ) -> int:
        """Where to cut a run of new tokens.

        Args:
            item: which item of the caller's batch it is.
            length: of its text, the new tokens not counted.
            new_tokens: they.
            text: returns the text with all new tokens at its end, `(1, length + new)`; called if a criterion looks at it.
            scores: returns one entry per generated token with the new ones at its end, or `None`: what criteria get as scores.

        Returns:
            How many of the new tokens to keep.
        """
        if self.end_of_item[item] is not None:
            return len(new_tokens)
        all_scores = scores() if self.others else None
        for kept, token in enumerate(new_tokens, start=1):
            length += 1
            self._remind_of_long_text(text, length)
            is_over = self.is_known_end(token, length)
            # Criteria may keep count of their calls, so each is asked at every token, the last one included.
            if self.others:
                seen_scores = all_scores[: len(all_scores) - len(new_tokens) + kept] if all_scores is not None else None
                is_over = bool(self.others(text()[:, :length], seen_scores).all()) or is_over
            if is_over:
                self.end_of_item[item] = length
                return kept
        return len(new_tokens)

    def is_known_end(self, token: int, length: int) -> bool:
        """Whether a text of this length, whose last token is this one, is over whatever other criteria say."""
        return token in self.eos_token_ids or (self.max_length is not None and length >= self.max_length)

    def over(self, items: list[int], lengths: list[int]) -> list[bool]:
        """Which items need no further tokens.

        Plain `generate` fills up a finished item with padding if [`pads_finished_items`], and otherwise goes on writing it until
        all items are finished, or the longest text is reached.
        """
        if self.pads:
            return [self.end_of_item[item] is not None for item in items]
        common = self.common_length()
        limit = self.max_length if common is None else common
        return [limit is not None and length >= limit for length in lengths]

    def common_length(self) -> int | None:
        """The length at which a batch without an end-of-text token ends; `None` until all items are finished."""
        return None if None in self.end_of_item else max(self.end_of_item)

    def _remind_of_long_text(self, text: Callable[[], torch.LongTensor], length: int) -> None:
        """Let the length criterion log its reminder once the text outgrows the model's positions."""
        for criterion in self.length_criteria:
            if criterion.max_position_embeddings is not None and length > criterion.max_position_embeddings:
                criterion(text()[:, :length], None)
