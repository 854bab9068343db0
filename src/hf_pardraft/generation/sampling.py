"""The target's choice of a token at every slot of a tree, after the caller's logits processors."""

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
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from ..models.stock_assistant import with_a_law
from .sequences import TokenBuffer
from .tree.token_tree import TokenTree
from .tree.verify import NO_CHOICE, NO_LAW, check_has_law

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


def is_prefix_free(processors: LogitsProcessorList) -> bool:
    """Whether no processor reads the text before the position that it processes."""
    return all(type(processor) in PREFIX_FREE for processor in processors)


def draw(weights: torch.Tensor) -> torch.LongTensor:
    """Draw one token per row, with probabilities proportional to `weights (rows, vocab)`. Shape `(rows,)`.

    It takes one random number per row. `torch.multinomial` takes one per entry, and waits for the device to look for NaN. Here
    a row of NaN draws `NO_LAW`, which the host finds if it is on the path, as it would be in plain `generate`.
    """
    # In double precision, where a device has it, so that no token is too improbable to be drawn.
    dtype = torch.float32 if weights.device.type == "mps" else torch.float64
    cumulative = weights.cumsum(dim=-1, dtype=dtype)
    # In (0, 1], so that the first entry to reach it is one that weighs something.
    share = 1 - torch.rand(len(weights), 1, dtype=dtype, device=weights.device)
    total = cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, share * total)
    return torch.where(total > 0, drawn, NO_LAW).squeeze(1)


def pick(scores: torch.Tensor, do_sample: bool) -> torch.LongTensor:
    """One token per row of `scores (rows, vocab)`: drawn as plain `generate` draws it, or the argmax. Shape `(rows,)`."""
    if do_sample:
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


@dataclass(frozen=True)
class DrawnChain:
    """A chain whose tokens were drawn from the drafter's law, to be kept with the odds of the target's.

    Attributes:
        tokens: `(batch, depth)`.
        law: `(batch, depth, vocab)`, what they were drawn from.
    """

    tokens: torch.LongTensor
    law: torch.Tensor


def draw_chain(draft_logits: torch.Tensor, processors: LogitsProcessorList, text: torch.LongTensor) -> DrawnChain:
    """Draw a token at each position from the drafter's marginals, warped as the target's law is.

    Any law will do for [`keep_or_redraw`]: processors that read the text are left out, and logits that have no law (NaN, or
    none above -inf, be it that a processor leaves none of the tokens that a drafter knows) are given one. Shapes as in
    [`choose_everywhere`].
    """
    batch, depth, vocab = draft_logits.shape
    scores = with_a_law(draft_logits.float().reshape(batch * depth, vocab))
    for processor in processors:
        if type(processor) in PREFIX_FREE:
            scores = processor(text, scores)
    law = with_a_law(scores).softmax(dim=-1)
    return DrawnChain(draw(law).view(batch, depth), law.view(batch, depth, vocab))


def keep_or_redraw(scores: torch.Tensor, drawn: DrawnChain) -> torch.LongTensor:
    """The target's choice by speculative sampling: the drawn token with probability min(1, p / q), else one of the residual.

    With p the target's law and q the drafter's, the residual is max(p - q, 0), normalised (arXiv 2606.11552, eq. 1-2), so
    that the choice has the law p, and equals the drawn token as often as it can.

    Args:
        scores: `(batch, depth, vocab)`, the target's processed scores at the slots before the drawn tokens.
        drawn: the drawn chain.

    Returns:
        `(batch, depth)`; `NO_LAW` where the target has none.
    """
    law = scores.softmax(dim=-1)
    odds = law.gather(2, drawn.tokens[..., None]) / drawn.law.gather(2, drawn.tokens[..., None])
    is_kept = torch.rand_like(odds) < odds
    residual = (law - drawn.law).clamp(min=0)
    # Where the laws are equal, rounding may leave no residual, and nothing is ever redrawn.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, law)
    redrawn = draw(residual.flatten(0, 1)).view(drawn.tokens.shape)
    return torch.where(is_kept.squeeze(-1), drawn.tokens, redrawn)


def choose_everywhere(
    logits: torch.Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    text: torch.LongTensor,
    drawn: DrawnChain | None = None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Choose at all slots at once, for prefix-free processors.

    Args:
        logits: `(batch, slots, vocab)` in float32; processors may overwrite them.
        processors: prefix-free ones.
        do_sample: draw, or take the argmax.
        text: `(batch, length)`, passed on to the processors, which don't read it.
        drawn: the proposed chain, if its tokens were drawn from the drafter's law.

    Returns:
        choices `(batch, slots)` and processed scores `(batch, slots, vocab)`.
    """
    batch, slots, vocab = logits.shape
    scores = logits.reshape(batch * slots, vocab)
    for processor in processors:
        scores = processor(text, scores)
    choices = draw(scores.softmax(dim=-1)) if do_sample else scores.argmax(dim=-1)
    choices, scores = choices.view(batch, slots), scores.view(batch, slots, vocab)
    if drawn is not None:
        choices = torch.cat([keep_or_redraw(scores[:, :-1], drawn), choices[:, -1:]], dim=1)
    return choices, scores


def choose_at(scores: torch.Tensor, do_sample: bool, drawn: DrawnChain | None, place: int) -> torch.LongTensor:
    """One token per sequence, at one place of what was proposed.

    Args:
        scores: `(batch, vocab)`, the target's processed scores there.
        do_sample: draw, or take the argmax.
        drawn: the proposed chain, if its tokens were drawn from the drafter's law; of the same sequences.
        place: how many of its tokens stand before.

    Returns:
        `(batch,)`.

    Raises:
        RuntimeError: where there is no law to draw from.
    """
    if drawn is None or place == drawn.tokens.shape[1]:
        return pick(scores, do_sample)
    here = (slice(None), slice(place, place + 1))
    choice = keep_or_redraw(scores[:, None], DrawnChain(drawn.tokens[here], drawn.law[here]))[:, 0]
    check_has_law(choice.tolist())
    return choice


class ItemProcessors:
    """The caller's processors, for one item of a batch at a time.

    Plain `generate` calls them with the whole batch, whose texts have one length; here they don't. Those that hold something
    for each item get copies of one, and what they say about its own place is taken.

    Args:
        processors: as `generate` prepared them, all of them in `PREFIX_FREE`, `TEXT_ONLY` or `BY_ITEM`, or for a batch of 1.
        batch: items of the caller's batch.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        self.processors = processors
        self.batch = batch
        self.sees_copies = batch > 1 and any(type(processor) in BY_ITEM for processor in processors)

    def __call__(self, item: int, text: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores `(1, vocab)` after the text `(1, length)` of an item of the caller's batch."""
        if not self.sees_copies:
            return self.processors(text, logits)
        copies = logits.expand(self.batch, -1).clone()
        return self.processors(text.expand(self.batch, -1), copies)[item : item + 1]


def choose_along_the_path(
    logits: torch.Tensor,
    process: ItemProcessors,
    do_sample: bool,
    items: list[int],
    texts: TokenBuffer,
    tree: TokenTree | None,
    drawn: DrawnChain | None = None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Walk down from the anchor: process a slot with its true prefix, choose, go on to the child that carries the choice.

    Processors are called once per committed token, in order, as plain `generate` calls them, so those that keep a state of
    their own (guidance, watermarks, a caller's) stay right. It costs a host round trip per committed token.

    Args:
        logits: `(batch, slots, vocab)` in float32.
        process: the processors.
        do_sample: draw, or take the argmax.
        items: for each item of `logits`, which item of the caller's batch it is.
        texts: what is committed.
        tree: what was proposed.
        drawn: the same, if it is a chain whose tokens were drawn from the drafter's law.

    Returns:
        As [`choose_everywhere`]; slots off the path are left at `NO_CHOICE` and zeros.
    """
    choices = torch.full(logits.shape[:2], NO_CHOICE, dtype=torch.long, device=logits.device)
    scores = torch.zeros_like(logits)
    for index, item in enumerate(items):
        text, slot, children = texts.item(index), 0, children_of(tree, index)
        own = slice(index, index + 1)
        drawn_here = None if drawn is None else DrawnChain(drawn.tokens[own], drawn.law[own])
        while slot is not None:
            processed = process(item, text, logits[own, slot])
            scores[index, slot] = processed[0]
            # A drawn chain's slots are its places.
            choice = choose_at(processed, do_sample, drawn_here, slot)
            choices[index, slot] = choice[0]
            text = torch.cat([text, choice[:, None]], dim=1)
            slot = children.get((slot, choice.item()))
    return choices, scores


def children_of(tree: TokenTree | None, item: int) -> dict[tuple[int, int], int]:
    """The slot of each child of an item's tree, by its parent's slot and its token."""
    if tree is None:
        return {}
    tokens, parents = tree.tokens[item].tolist(), tree.parents[item].tolist()
    return {(parent, token): node + 1 for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
