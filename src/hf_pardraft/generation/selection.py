"""The target's choice of a token at every slot of a tree, after the caller's logits processors."""

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

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


def choose_along_the_path(
    logits: torch.Tensor,
    processors: LogitsProcessorList,
    do_sample: bool,
    text: torch.LongTensor,
    tree: TokenTree | None,
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Walk down from the root: process a slot with its true prefix, choose, go on to the child that carries the choice.

    Processors are called once per committed token, in order, as plain `generate` calls them, so those that keep a state of
    their own (guidance, watermarks, a caller's) stay right. It costs a host round trip per committed token. Batch 1.

    Args and returns as in [`choose_everywhere`]; slots off the path are left at `NO_CHOICE` and zeros.
    """
    choices = torch.full(logits.shape[:2], NO_CHOICE, dtype=torch.long, device=text.device)
    scores = torch.zeros_like(logits)
    tokens, parents = (tree.tokens[0].tolist(), tree.parents[0].tolist()) if tree is not None else ([], [])
    children = {(parent, token): node + 1 for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    slot = 0
    while slot is not None:
        scores[:, slot] = processors(text, logits[:, slot])
        choice = pick(scores[:, slot], do_sample)
        choices[:, slot] = choice
        text = torch.cat([text, choice[:, None]], dim=1)
        slot = children.get((slot, choice.item()))
    return choices, scores
