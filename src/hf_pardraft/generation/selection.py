"""The target's choice of a token at every slot of a tree, after the caller's logits processors."""

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .text import Texts
from .tree import TokenTree
from .verify import NO_CHOICE

# They look at the logits of one position and at nothing else, so all slots can be processed as rows of one batch. Exact
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

# They read the text, and treat every row of a batch alike.
ROW_FREE = {
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
}
# They remember what they were called with.
STATEFUL = {SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor}


def is_prefix_free(processors: LogitsProcessorList) -> bool:
    """Whether no processor reads the text before the position that it processes."""
    return all(type(processor) in PREFIX_FREE for processor in processors)


def pick(scores: torch.Tensor, do_sample: bool) -> torch.LongTensor:
    """One token per row of `scores (rows, vocab)`: drawn from their softmax, or their argmax. Shape `(rows,)`."""
    if do_sample:
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


def choose_everywhere(
    logits: torch.Tensor, processors: LogitsProcessorList, do_sample: bool, text: torch.LongTensor
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Choose at all slots at once, for prefix-free processors.

    Args:
        logits: `(batch, slots, vocab)` in float32; processors may overwrite them.
        processors: prefix-free ones.
        do_sample: draw, or take the argmax.
        text: `(batch, length)`, passed on to the processors, which don't read it.

    Returns:
        choices `(batch, slots)` and processed scores `(batch, slots, vocab)`.
    """
    batch, slots, vocab = logits.shape
    scores = logits.reshape(batch * slots, vocab)
    for processor in processors:
        scores = processor(text, scores)
    return pick(scores, do_sample).view(batch, slots), scores.view(batch, slots, vocab)


class RowProcessors:
    """The caller's processors, for one row of a batch at a time.

    Plain `generate` calls them with the whole batch, whose rows have one length; here they don't. Those that treat every row
    alike get the row by itself. Any other gets the row at its place in a batch of copies, and what it says about that
    place is taken.

    Args:
        processors: as `generate` prepared them.
        batch: rows of the batch.

    Raises:
        ValueError: if one of them remembers earlier calls, which differ from plain `generate`'s if there are several rows.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        self.processors = processors
        self.batch = batch
        self.sees_copies = batch > 1 and any(type(processor) not in PREFIX_FREE | ROW_FREE for processor in processors)
        stateful = sorted(type(processor).__name__ for processor in processors if type(processor) in STATEFUL)
        if stateful and batch > 1:
            raise ValueError(
                f"{', '.join(stateful)} keeps a state for the whole batch, whose rows advance together in plain generate and "
                f"here don't; got a batch of {batch}: call generate for each row, or without assistant_model"
            )

    def __call__(self, row: int, text: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores `(1, vocab)` behind the text `(1, length)` of a row of the caller's batch."""
        if not self.sees_copies:
            return self.processors(text, logits)
        copies = logits.expand(self.batch, -1).clone()
        return self.processors(text.expand(self.batch, -1), copies)[row : row + 1]


def choose_along_the_path(
    logits: torch.Tensor,
    process: RowProcessors,
    do_sample: bool,
    rows: list[int],
    texts: Texts,
    tree: TokenTree | None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Walk down from the root: process a slot with its true prefix, choose, go on to the child that carries the choice.

    Processors are called once per committed token, in order, as plain `generate` calls them, so those that keep a state of
    their own (guidance, watermarks, a caller's) stay right. It costs a host round trip per committed token.

    Args:
        logits: `(batch, slots, vocab)` in float32.
        process: the processors.
        do_sample: draw, or take the argmax.
        rows: for each row of `logits`, which row of the caller's batch it is.
        texts: what is committed.
        tree: what was proposed.

    Returns:
        As [`choose_everywhere`]; slots off the path are left at `NO_CHOICE` and zeros.
    """
    choices = torch.full(logits.shape[:2], NO_CHOICE, dtype=torch.long, device=logits.device)
    scores = torch.zeros_like(logits)
    for index, row in enumerate(rows):
        text, slot, children = texts.row(index), 0, children_of(tree, index)
        while slot is not None:
            processed = process(row, text, logits[index : index + 1, slot])
            scores[index, slot] = processed[0]
            choice = pick(processed, do_sample)
            choices[index, slot] = choice[0]
            text = torch.cat([text, choice[:, None]], dim=1)
            slot = children.get((slot, choice.item()))
    return choices, scores


def children_of(tree: TokenTree | None, row: int) -> dict[tuple[int, int], int]:
    """The slot of each child of a row's tree, by its parent's slot and its token."""
    if tree is None:
        return {}
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    return {(parent, token): node + 1 for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
