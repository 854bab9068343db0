"""How a token is chosen at a slot: the likeliest, the one that plain `generate` would draw, or one by rejection sampling.

A choice also says what a drafter's marginals become before a chain or a tree is searched in them.
"""

import math
from collections.abc import Callable

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from ...likeliest import likeliest
from ..sequences import TokenBuffer
from ..tree.columns import tokens_of
from ..tree.token_tree import TokenTree, chain_tree
from ..tree.verify import NO_CHOICE, NO_LAW, check_has_law
from .noise import StepNoise
from .processors import ALL_TOKENS, DraftColumns, ItemProcessors, warped
from .rejection import DrawnChain, draw, draw_chain, keep_or_redraw

Search = Callable[[torch.Tensor], TokenTree | None]
# How much the noise counts in a draft: all of it, as for the target, or what fitted later positions of small drafters best.
NOISE_WEIGHTS = (1.0, 0.6)


class TokenChoice:
    """How tokens are chosen in a call, for its drafts and for its text.

    Attributes:
        couples: whether drafts are made with the noise of the draws that they guess.
    """

    couples = False

    def propose(self, draft_logits: torch.Tensor, search: Search) -> TokenTree | None:
        """A chain or tree from the drafter's marginal logits `(items, depth, columns)`, searched by `search`; `None` for none."""
        raise NotImplementedError

    def everywhere(self, scores: torch.Tensor, tree: TokenTree | None) -> torch.LongTensor:
        """One token at each slot.

        Args:
            scores: `(items, slots, vocab)`, the target's processed scores.
            tree: what was proposed; `None` for the anchor alone.

        Returns:
            `(items, slots)`; `NO_LAW` where there is nothing to draw from.
        """
        raise NotImplementedError

    def at(self, scores: torch.Tensor, items: slice, depth: int) -> torch.LongTensor:
        """One token for each of some items of this round, at one depth of what was proposed.

        Args:
            scores: `(items, vocab)`, the target's processed scores there.
            items: which items of the round they are.
            depth: of the slot; that of the anchor is 0.

        Returns:
            `(items,)`.

        Raises:
            RuntimeError: where there is no law to draw from.
        """
        raise NotImplementedError

    def others_have_drawn(self, depth: int) -> None:
        """Random numbers may have been taken by others since the tokens at this depth were chosen."""

    def advance(self, new_tokens: list[list[int]]) -> None:
        """What each item of this round got."""

    def select_items(self, kept: list[int]) -> None:
        """Go on with only some items."""

    def finish(self, num_steps: int) -> None:
        """Rounds are over, after which plain `generate` would have made so many steps."""

    def close(self) -> None:
        """Nothing is chosen any more: rounds are over, or the call has failed."""


class LikeliestToken(TokenChoice):
    """Greedy decoding."""

    def propose(self, draft_logits: torch.Tensor, search: Search) -> TokenTree | None:
        return search(draft_logits)

    def everywhere(self, scores: torch.Tensor, tree: TokenTree | None) -> torch.LongTensor:
        return likeliest(scores)

    def at(self, scores: torch.Tensor, items: slice, depth: int) -> torch.LongTensor:
        return likeliest(scores)


class PlainDraw(TokenChoice):
    """The token that plain `generate` draws from the same law, by the same random numbers: see [`StepNoise`].

    These numbers don't depend on what was drafted, so the text doesn't either. And since they are known before the draft is made,
    drafts are made with them: with p the drafter's law of a position and q its noise, the drafted token is the argmax of p / q,
    which is what the target would choose if it thought as the drafter does (Gumbel coupling, arXiv 2408.07978). It is what the
    target chooses with probability (1 - TV) / (1 + TV) at least, TV being the total variation distance of the two laws.

    A parallel drafter's later positions are averages over the tokens between, which the target will know: then part of what
    looks like chance is none, and p / q^w with w < 1 guesses better. Which of `NOISE_WEIGHTS` does is counted, by position.

    Args:
        warpers: those of the caller's processors that the drafter's law goes through as well.
        noise: of the call.
        follows: whether all items are at one step all the time and their tokens are chosen one by one: then the generator itself
            stands where it would in plain `generate` whenever a processor is called, and is drawn from in its way.
        columns: of the drafter's logits.
    """

    couples = True

    def __init__(
        self, warpers: LogitsProcessorList, noise: StepNoise, follows: bool, columns: DraftColumns = ALL_TOKENS
    ) -> None:
        self.warpers, self.columns, self.noise, self.follows = warpers, columns, noise, follows
        self.temperature = temperature_of(warpers)
        # This round's, `(items, depths, vocab)`; and what either weight guesses, `(weights, items, depth)`.
        self.ahead: torch.Tensor | None = None
        self.guesses: torch.LongTensor | None = None
        self.right_guesses = torch.zeros(len(NOISE_WEIGHTS), noise.most, device=noise.device)

    def propose(self, draft_logits: torch.Tensor, search: Search) -> TokenTree | None:
        return search(self.coupled(draft_logits))

    def coupled(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """What each token is worth at each position, `(items, depth, columns)`: log p - w log q, with p the drafter's law there.

        It is multiplied by the temperature: a tree asks how sure the drafter is, and a low temperature makes it no surer of being
        right. The order of the tokens, and so a chain, stays the same.
        """
        depth, width = draft_logits.shape[1:]
        self._look_ahead(depth + 1, width if self.columns.token_ids is None else self.columns.vocab_size)
        noise = self.columns.of(self.ahead[:, :depth])
        whole, part = coupled_logits(warped(draft_logits, self.warpers), noise)
        self.guesses = tokens_of(torch.stack([likeliest(whole), likeliest(part)]), self.columns.token_ids)
        of_whole, of_part = self.right_guesses[:, :depth]
        return torch.where((of_part > of_whole)[:, None], part, whole) * self.temperature

    def everywhere(self, scores: torch.Tensor, tree: TokenTree | None) -> torch.LongTensor:
        # Not all of a draft is the drafter's, for which that was looked at already.
        deepest = min(scores.shape[1], self.noise.most)
        if self.ahead is None or self.ahead.shape[1] < deepest:
            self._look_ahead(deepest, scores.shape[2])
        noise = self.ahead[:, : scores.shape[1]]
        if tree is not None and not tree.is_chain:
            items = torch.arange(len(scores), device=scores.device)[:, None]
            noise = self.ahead[items, tree.slot_depths]
        return draw_with(scores.softmax(dim=-1), noise)

    def at(self, scores: torch.Tensor, items: slice, depth: int) -> torch.LongTensor:
        if self.follows:
            return self.noise.draw(scores.softmax(dim=-1), self.noise.steps[0] + depth)
        if self.ahead is None or self.ahead.shape[1] <= depth:
            self._look_ahead(depth + 1, scores.shape[1])
        choice = draw_with(scores.softmax(dim=-1), self.ahead[items, depth])
        check_has_law(choice.tolist())
        return choice

    def others_have_drawn(self, depth: int) -> None:
        self.noise.found_before(self.noise.steps[0] + depth + 1)

    def advance(self, new_tokens: list[list[int]]) -> None:
        self.noise.advance(list(map(len, new_tokens)))
        if self.guesses is not None:
            self._count_right_guesses(new_tokens)
        self.ahead = self.guesses = None

    def _count_right_guesses(self, new_tokens: list[list[int]]) -> None:
        """The first new token that was not drafted tells, too, what would have been right there."""
        depth = self.guesses.shape[2]
        known = [tokens[:depth] + [-1] * (depth - len(tokens)) for tokens in new_tokens]
        is_right = self.guesses == torch.tensor(known, device=self.guesses.device)
        self.right_guesses[:, :depth] += is_right.sum(dim=1)

    def select_items(self, kept: list[int]) -> None:
        self.noise.select_items(kept)

    def finish(self, num_steps: int) -> None:
        self.noise.go_to(num_steps)

    def close(self) -> None:
        self.noise.close()

    def _look_ahead(self, count: int, vocab: int) -> None:
        if self.follows:
            self.noise.found_before(self.noise.steps[0])
        self.ahead = self.noise.ahead(count, vocab)
        if self.follows:
            self.noise.go_to(self.noise.steps[0])


def temperature_of(warpers: LogitsProcessorList) -> float:
    """What the warpers divide logits by."""
    return math.prod(warper.temperature for warper in warpers if isinstance(warper, TemperatureLogitsWarper))


def coupled_logits(scores: torch.Tensor, noise: torch.Tensor) -> list[torch.Tensor]:
    """log p - w log q for each w of `NOISE_WEIGHTS`, up to a constant at each position.

    The argmax of the first is the token that q draws from p, see [`draw_with`].

    Args:
        scores: `(..., vocab)`, whose softmax is p.
        noise: q, of the same shape.
    """
    log_noise = noise.log()
    return [torch.sub(scores, log_noise, alpha=weight) for weight in NOISE_WEIGHTS]


def draw_with(law: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """What `torch.multinomial` draws from `law (..., vocab)` where `noise`, of the same shape, is what its generator gives.

    `NO_LAW` where the law is NaN: softmax leaves a whole row of NaN where there is one, or an infinity, or nothing above -inf.
    """
    return likeliest(law / noise).masked_fill(law[..., 0].isnan(), NO_LAW)


class RejectionSampling(TokenChoice):
    """Speculative sampling: drafts are drawn from the drafter's law, and kept with the odds of the target's.

    See [`keep_or_redraw`]. The text follows the target's law, but is another one than plain `generate` writes, and depends on
    what was drafted.

    Args:
        warpers: those of the caller's processors that the drafter's law goes through as well.
        columns: of the drafter's logits.
    """

    def __init__(self, warpers: LogitsProcessorList, columns: DraftColumns = ALL_TOKENS) -> None:
        self.warpers, self.columns = warpers, columns
        self.drawn: DrawnChain | None = None

    def propose(self, draft_logits: torch.Tensor, search: Search) -> TokenTree | None:
        self.drawn = draw_chain(draft_logits, self.warpers, self.columns.token_ids)
        return chain_tree(self.drawn.tokens)

    def everywhere(self, scores: torch.Tensor, tree: TokenTree | None) -> torch.LongTensor:
        choices = draw(scores.softmax(dim=-1).flatten(0, 1)).view(scores.shape[:2])
        if self.drawn is None:
            return choices
        return torch.cat([keep_or_redraw(scores[:, :-1], self.drawn), choices[:, -1:]], dim=1)

    def at(self, scores: torch.Tensor, items: slice, depth: int) -> torch.LongTensor:
        if self.drawn is None or depth == self.drawn.tokens.shape[1]:
            return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        choice = keep_or_redraw(scores[:, None], self.drawn.at(items, depth))[:, 0]
        check_has_law(choice.tolist())
        return choice

    def advance(self, new_tokens: list[list[int]]) -> None:
        self.drawn = None


def choose_along_the_path(
    logits: torch.Tensor,
    process: ItemProcessors,
    choice: TokenChoice,
    items: list[int],
    texts: TokenBuffer,
    tree: TokenTree | None,
    is_end: Callable[[int, int], bool],
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Walk down from the anchor: process a slot with its true prefix, choose, go on to the child that carries the choice.

    Processors are called once per committed token, in order, as plain `generate` calls them, so those that keep a state of
    their own (guidance, watermarks, a caller's) stay right. It costs a host round trip per committed token. Stopping criteria of
    a caller's own are asked when the round is over: after the token at which one stops, processors may be called for a few more.

    Args:
        logits: `(batch, slots, vocab)` in float32.
        process: the processors.
        choice: how to choose.
        items: for each item of `logits`, which item of the caller's batch it is.
        texts: what is committed.
        tree: what was proposed.
        is_end: whether a text ends with this token, at this length.

    Returns:
        choices `(batch, slots)` and processed scores `(batch, slots, vocab)`; off the path slots are left at `NO_CHOICE` and 0.
    """
    choices = torch.full(logits.shape[:2], NO_CHOICE, dtype=torch.long, device=logits.device)
    scores = torch.zeros_like(logits)
    for index, item in enumerate(items):
        text, slot, depth, children = texts.item(index), 0, 0, children_of(tree, index)
        own = slice(index, index + 1)
        while slot is not None:
            processed = process(item, text, logits[own, slot])
            # A processor may return another dtype.
            scores = scores.to(processed.dtype)
            scores[index, slot] = processed[0]
            token = choice.at(processed, own, depth)
            choices[index, slot] = token[0]
            text = torch.cat([text, token[:, None]], dim=1)
            chosen = token.item()
            slot, depth = None if is_end(chosen, text.shape[1]) else children.get((slot, chosen)), depth + 1
    return choices, scores


def children_of(tree: TokenTree | None, item: int) -> dict[tuple[int, int], int]:
    """The slot of each child of an item's tree, by its parent's slot and its token."""
    if tree is None:
        return {}
    tokens, parents = tree.tokens[item].tolist(), tree.parents[item].tolist()
    return {(parent, token): node + 1 for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
