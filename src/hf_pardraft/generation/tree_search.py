"""From a round's marginals to its tree, as a call's settings say: which n-gram model takes part, and how much it weighs."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.base import ParallelDrafter
from ..ngram.model import NgramModel
from .sequences import TokenBuffer
from .settings import DraftSettings
from .target_side.structure import text_config_of
from .tree.scoring import DART_SCORING, LOG_PROBABILITY, TreeScoring
from .tree.token_tree import TokenTree, build_tree

# DART's widths (arXiv 2601.19278, appendix D): every prefix of a level looks its tokens up, so a level is kept small.
NGRAM_BEAM_WIDTH = 20
NGRAM_TOP_K = 25

# The model that a drafter's settings named last, under that name and the device that it was loaded for.
_loaded: "weakref.WeakKeyDictionary[ParallelDrafter, tuple[str, torch.device, NgramModel]]" = (
    weakref.WeakKeyDictionary()
)
# Tokenizers that fit a model already: comparing them takes a look at every token.
_fitting: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, weakref.WeakSet]" = weakref.WeakKeyDictionary()


def ngram_of(settings: DraftSettings, drafter: ParallelDrafter) -> NgramModel | None:
    """The n-gram model that takes part in a call; `None` for chains, with a weight of 0, or without a model.

    One that the settings name takes precedence over `drafter.ngram`. It is loaded when it is first needed, to the drafter's
    device.

    Raises:
        OSError, ValueError: if the named model can't be loaded, or a weight is set for no model.
    """
    if not settings.tree_budget or settings.ngram_weight == 0:
        return None
    name = settings.ngram_model
    if name is None:
        if drafter.ngram is None and settings.ngram_weight is not None:
            raise ValueError(
                f"ngram_weight={settings.ngram_weight} weighs an n-gram model, and there is none: set "
                "drafter.generation_config.ngram_model to its folder or repository, or drafter.ngram to the model"
            )
        return drafter.ngram
    if _loaded.get(drafter, ())[:2] != (name, drafter.device):
        _loaded[drafter] = (name, drafter.device, NgramModel.from_pretrained(name).to(drafter.device))
    return _loaded[drafter][2]


def check_ngram_model(
    settings: DraftSettings,
    drafter: ParallelDrafter,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Raise an error unless the n-gram model of a call, if there is one, speaks of the target's tokens.

    Args:
        settings, drafter, target: of the call.
        tokenizer: the one passed to `generate`, which only some calls need.
    """
    ngram = ngram_of(settings, drafter)
    if ngram is None:
        return
    ngram.check_vocabulary(text_config_of(target).vocab_size)
    if tokenizer is not None and ngram not in (fitting := _fitting.setdefault(tokenizer, weakref.WeakSet())):
        ngram.check_tokenizer(tokenizer)
        fitting.add(ngram)


class TreeSearch:
    """Makes the trees of one generate call.

    Args:
        settings, drafter: of the call.
        end_tokens: `(ends,)`, the tokens that end a text, on the device of the text.
        do_sample: whether the call samples.
    """

    def __init__(
        self,
        settings: DraftSettings,
        drafter: ParallelDrafter,
        end_tokens: torch.LongTensor | None = None,
        do_sample: bool = False,
    ) -> None:
        self.ngram = ngram_of(settings, drafter)
        has_ngram = self.ngram is not None
        if has_ngram and settings.ngram_smoothing is not None:
            self.ngram = self.ngram.smoothed(settings.ngram_smoothing)
        self.beam_width = settings.tree_beam_width or (NGRAM_BEAM_WIDTH if has_ngram else None)
        self.top_k = settings.tree_top_k or (NGRAM_TOP_K if has_ngram else None)
        token_ids = drafter.draft_token_ids
        self.most_tokens = drafter.config.vocab_size if token_ids is None else len(token_ids)
        self.scoring = scoring_for(settings, has_ngram, do_sample)
        self.end_tokens = end_tokens
        self.end_rule = settings.tree_end_rule or ("stop" if has_ngram else "ignore")

    def tree(
        self,
        draft_logits: torch.Tensor,
        texts: TokenBuffer,
        budget: int,
        token_ids: torch.LongTensor | None = None,
        return_chain: bool = False,
    ) -> TokenTree | tuple[TokenTree, torch.LongTensor]:
        """The tree of `budget` nodes after `texts`, from marginal logits `(items, depth, columns)`; see [`build_tree`]."""
        context = None
        if self.ngram is not None:
            # Columns that only pad a shorter item are no text, but then nothing goes on from them either.
            context = texts.last(min(self.ngram.order - 1, *texts.lengths)).to(draft_logits.device)
        return build_tree(
            draft_logits.float(),
            ngram=self.ngram,
            ngram_context=context,
            end_token_id=self.end_tokens,
            token_ids=token_ids,
            return_chain=return_chain,
            **dict(self.arguments(budget)),
        )

    def fills_any_depth(self, budget: int) -> bool:
        """Whether a single level has enough tokens for a tree, so that trees of all depths have one shape."""
        return self._top_k(budget) >= budget

    def arguments(self, budget: int) -> tuple[tuple[str, Any], ...]:
        """Those of [`build_tree`] that are no tensors and no models, by name."""
        return (
            ("budget", budget),
            ("beam_width", self.beam_width),
            ("top_k", self._top_k(budget)),
            ("scoring", self.scoring),
            ("end_rule", self.end_rule),
        )

    def _top_k(self, budget: int) -> int:
        return min(self.top_k or budget, self.most_tokens)


def scoring_for(settings: DraftSettings, has_ngram: bool, do_sample: bool) -> TreeScoring:
    """The weights of a prefix's score that the settings ask for.

    By default DART's, which favour depth, for greedy calls and with an n-gram model; the drafter's probability for sampled
    calls without one. Their trees hold more that is accepted, for all kinds of drafters (benchmarks/tree_scoring.py).
    """
    is_dart = settings.tree_scoring == "dart" or (settings.tree_scoring is None and (has_ngram or not do_sample))
    scoring = DART_SCORING if is_dart else LOG_PROBABILITY
    if not has_ngram:
        return scoring
    weight = DART_SCORING.ngram_weight if settings.ngram_weight is None else settings.ngram_weight
    # What the model has never seen must cost something finite, whatever the rest of the score.
    return replace(
        scoring, ngram_weight=weight, first_ngram_level=settings.ngram_first_level, epsilon=DART_SCORING.epsilon
    )
