"""What the caller's logits processors make of the target's logits at every slot, and of a drafter's marginals."""

from dataclasses import dataclass

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from ...models.stock_assistant import with_a_law
from ..stopping import other_criteria

# They look at the logits of one position and at nothing else, so all slots can be processed as one batch. Exact
# types: a subclass may read the prefix.
PREFIX_FREE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}

# They read the text, treat every item of a batch alike, and remember nothing.
TEXT_ONLY = {
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    WatermarkLogitsProcessor,
}
# The same, but they hold something for each item of the batch, and so must see it at its place.
BY_ITEM = {
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
}

# They look at one sequence at a time, and remember nothing.
ITEM_WISE_CRITERIA = {StopStringCriteria, MaxTimeCriteria}

# What processors are given that don't read the text.
NO_TEXT = torch.empty(1, 0, dtype=torch.long)


def is_prefix_free(processors: LogitsProcessorList) -> bool:
    """Whether no processor reads the text before the position that it processes."""
    return all(type(processor) in PREFIX_FREE for processor in processors)


def see_the_batch(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> list[str]:
    """Names of the processors and criteria that may look across a batch, or remember what they were called with.

    Of a caller's own nobody knows better.
    """
    known = PREFIX_FREE, TEXT_ONLY, BY_ITEM
    others = [processor for processor in processors if not any(type(processor) in kinds for kinds in known)]
    others += [criterion for criterion in other_criteria(criteria) if type(criterion) not in ITEM_WISE_CRITERIA]
    return sorted({type(other).__name__ for other in others})


def process_everywhere(logits: torch.Tensor, processors: LogitsProcessorList) -> torch.Tensor:
    """Scores of all slots or positions at once, `(items, slots, vocab)`, by prefix-free processors.

    Args:
        logits: in float32, of that shape; processors may overwrite them.
        processors: prefix-free ones.
    """
    scores = logits.flatten(0, 1)
    for processor in processors:
        scores = processor(NO_TEXT, scores)
    return scores.view(logits.shape)


def warped(draft_logits: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    """A drafter's logits `(items, depth, columns)` in float32, warped as the target's are.

    Args:
        draft_logits: `(items, depth, columns)`.
        warpers: see [`DraftColumns.warpers`]; other processors would have to read drafted texts.
    """
    return process_everywhere(draft_logits.float(), warpers)


def warped_law(draft_logits: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    """The law of [`warped`] logits, same shapes.

    Logits that have no law (NaN, or none above -inf, be it that a warper leaves none of the tokens that a drafter knows) are
    given one.
    """
    return with_a_law(warped(with_a_law(draft_logits.float()), warpers)).softmax(dim=-1)


@dataclass(frozen=True)
class DraftColumns:
    """What the columns of a drafter's logits are.

    Attributes:
        token_ids: `(columns,)`, their tokens, ascending; `None` if columns are tokens.
        vocab_size: of the target; asked for with `token_ids` only.
    """

    token_ids: torch.LongTensor | None = None
    vocab_size: int | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Of values `(..., vocab_size)` those of the columns, `(..., columns)`."""
        return values if self.token_ids is None else values.index_select(-1, self.token_ids)

    def warpers(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Those of the caller's processors that look at the logits of one position and at nothing else, for the drafter's."""
        found = LogitsProcessorList(processor for processor in processors if type(processor) in PREFIX_FREE)
        return found if self.token_ids is None else LogitsProcessorList(map(self._for_columns, found))

    def _for_columns(self, processor: LogitsProcessor) -> LogitsProcessor:
        # Of all that are prefix-free, it alone knows one token from another.
        if not isinstance(processor, SuppressTokensLogitsProcessor):
            return processor
        suppressed = torch.isin(self.token_ids, processor.suppress_tokens.to(self.token_ids.device))
        return SuppressTokensLogitsProcessor(suppressed.nonzero().flatten().tolist(), device=str(self.token_ids.device))


ALL_TOKENS = DraftColumns()


class ItemProcessors:
    """The caller's processors, for one item of a batch at a time.

    Plain `generate` calls them with the whole batch, whose texts have one length; here they don't. Those that hold something
    for each item get copies of one, and what they say about its own place is taken.

    Args:
        processors: as `generate` prepared them, all of them in `PREFIX_FREE`, `TEXT_ONLY` or `BY_ITEM`, or for a batch of 1.
        batch: items of the caller's batch.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        self.processors, self.batch = processors, batch

    def __call__(self, item: int, text: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores `(1, vocab)` after the text `(1, length)` of an item of the caller's batch."""
        for processor in self.processors:
            if self.batch > 1 and type(processor) in BY_ITEM:
                copies = logits.expand(self.batch, -1).clone()
                logits = processor(text.expand(self.batch, -1), copies)[item : item + 1]
            else:
                logits = processor(text, logits)
        return logits
