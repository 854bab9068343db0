"""Batches whose items advance together, token by token as in plain `generate`, for whatever looks at the whole batch."""

from dataclasses import replace

import torch
from transformers import StoppingCriteriaList

from .choosing.choice import children_of
from .decoder import SpeculativeDecoding
from .stopping import pads_finished_items
from .tree.token_tree import TokenTree, draft_chain
from .tree.verify import NO_CHOICE


class AlignedDecoding(SpeculativeDecoding):
    """[`SpeculativeDecoding`] whose batch items commit equally many tokens in each round, as many as all of them accept.

    So there is, for each token, a moment at which all texts are as long as in plain `generate`: then each processor and each
    stopping criterion is called, once, with the whole batch. An item that is over stays in the batch and gets padding, as in
    plain `generate`, until all are over.
    """

    def __init__(self, *args, stopping_criteria: StoppingCriteriaList, batch: int, **kwargs) -> None:
        super().__init__(*args, stopping_criteria=stopping_criteria, batch=batch, **kwargs)
        self.criteria = stopping_criteria
        self.pads = pads_finished_items(stopping_criteria)
        # Which items are over, now and before this round; and how many tokens this round commits to each.
        self.over, self.was_over = [False] * batch, [False] * batch
        self.num_steps = 0
        # One `(batch, vocab)` entry per token, as criteria get to see them.
        self.step_scores: list[torch.Tensor] = []

    def cut(self, new_tokens: list[list[int]]) -> list[int]:
        """Append what all items have got in common; returns how many tokens that is, for each."""
        self.sequences.append([tokens[: self.num_steps] for tokens in new_tokens])
        for index, item in enumerate(self.items):
            self.recorder.keep_first(item, self.sequences.lengths[index] - self.prompt_length)
        return [self.num_steps] * len(new_tokens)

    def _choices(self, logits: torch.Tensor, tree: TokenTree | None) -> tuple[torch.LongTensor, torch.Tensor]:
        """Walk down all trees together, one level at a time, while no item is without a child to go on to."""
        batch, device = len(logits), logits.device
        choices = torch.full(logits.shape[:2], NO_CHOICE, dtype=torch.long, device=device)
        scores = torch.zeros_like(logits)
        items, slots = torch.arange(batch, device=device), [0] * batch
        children = [children_of(tree, item) for item in range(batch)]
        # As plain `generate` has it, in memory of its own: a processor may look at it by `view`.
        text = self.sequences.last(self.sequences.lengths[0]).contiguous()
        self.num_steps, self.was_over = 0, self.over
        while None not in slots and not all(self.over):
            here = (items, torch.tensor(slots, device=device))
            of_step = logits[here]
            processed = self.processors(text, of_step)
            # A processor may write over what it is given.
            logits[here] = of_step
            choice = self.choice.at(processed, slice(None), self.num_steps)
            if self.pads:
                choice = choice.masked_fill(torch.tensor(self.over, device=device), self.finished.padding)
            # A processor may return another dtype.
            scores = scores.to(processed.dtype)
            choices[here], scores[here] = choice, processed
            text, self.num_steps = torch.cat([text, choice[:, None]], dim=1), self.num_steps + 1
            is_over = self.criteria(text, self._scores_so_far(processed)).tolist()
            self.choice.others_have_drawn(self.num_steps - 1)
            self.over = [was or now for was, now in zip(self.over, is_over, strict=True)]
            slots = [children[item].get((slots[item], token)) for item, token in enumerate(choice.tolist())]
        return choices, scores

    def _scores_so_far(self, processed: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The scores of all tokens, the last ones' `(batch, vocab)` included, if the caller wants scores returned."""
        if self.recorder.scores is None:
            return None
        self.step_scores.append(processed)
        return tuple(self.step_scores)

    def _chooses_in_plain_order(self) -> bool:
        return True

    def _proposal(self, draft_logits: torch.Tensor | None) -> TokenTree | None:
        """As ever while no item is over; then chains, in which padding comes for those that are."""
        tree = super()._proposal(draft_logits)
        if tree is None or not self._pads_now:
            return tree
        over = torch.tensor(self.over, device=tree.tokens.device)[:, None]
        return replace(tree, tokens=tree.tokens.masked_fill(over, self.finished.padding))

    def _search(self, draft_logits: torch.Tensor) -> TokenTree | None:
        return draft_chain(draft_logits, self.token_ids) if self._pads_now else super()._search(draft_logits)

    @property
    def _pads_now(self) -> bool:
        return self.pads and any(self.over)

    def _outcome(self, num_chosen: int, count: int) -> tuple[int, int]:
        """Items that could have gone on wait for the others."""
        return super()._outcome(count, count)

    def _noted_items(self) -> list[int]:
        return [item for item, was_over in enumerate(self.was_over) if not was_over]

    def _rest_is_like_plain(self) -> bool:
        return super()._rest_is_like_plain() and not any(self.over)

    def _are_over(self) -> list[bool]:
        """All items leave together; before that, those that are over stay in the batch."""
        if all(self.over):
            self.stop.end_of_item = list(self.sequences.lengths)
        return [all(self.over)] * len(self.over)
