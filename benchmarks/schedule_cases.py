"""What schedule.py measures: drafters that should pay, and drafters and texts that make a loss easy."""

import copy
import inspect
from argparse import ArgumentParser
from argparse import Namespace as Arguments
from calendar import TextCalendar
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cache
from string import Template
from tarfile import TarInfo

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_pardraft import AutoDrafter
from hf_pardraft.demo.family import DRAFTER_NAMES, Family, load_family
from hf_pardraft.demo.prompts import BEGINNINGS
from hf_pardraft.models.base import ParallelDrafter

STORY_TOKENS = 16
CODE_TOKENS = 64
# Parts of Python's library that the shipped family's target never saw in the texts that its drafters learned from.
UNFAMILIAR: tuple[Callable | type, ...] = (ArgumentParser, TextCalendar, SequenceMatcher, Fraction, Template, TarInfo)
# Lines of an excerpt; the next one of the same source begins where it ends.
EXCERPT_LINES = 12
NUM_EXCERPTS = 12
# Tokens that a drafter which is never right may choose from: as many as the largest tree has nodes.
NUM_WRONG = 64
# Logits of what it says, the first choice's first; far above any other.
SURE = 60.0


@dataclass
class Case:
    """A target, a drafter, and what is to be continued.

    Attributes:
        name: of the case, "target/drafter".
        target: the model.
        drafter: as it was loaded.
        prompts: `(1, length)` each, of one length: plain `generate` with a static cache is compiled anew for each.
        pays: whether drafting is expected to be faster than plain `generate`: then the best fixed setting is looked for.
        is_wrong: whether the drafter is made to say what the target never does.
    """

    name: str
    target: PreTrainedModel
    drafter: ParallelDrafter
    prompts: list[torch.LongTensor]
    pays: bool
    is_wrong: bool = False

    def new_drafter(self, texts: list[list[int]]) -> ParallelDrafter:
        """A copy that no call has drafted with yet, and that nothing is known about.

        Args:
            texts: what the target writes, of which a drafter that is never right must not say anything.
        """
        drafter = copy.deepcopy(self.drafter)
        if self.is_wrong:
            mislead(drafter, unwritten(texts, self.target.config.vocab_size, NUM_WRONG))
        return drafter

    def prompts_for(self, batch_size: int, count: int) -> list[torch.LongTensor]:
        """The first `count` prompts, to come one by one; or those of whole batches of as many, or of one batch of more.

        In a batch of more than there are they come again.
        """
        if batch_size == 1:
            return self.prompts[:count]
        num_batches = max(count // batch_size, 1)
        return [self.prompts[index % len(self.prompts)] for index in range(num_batches * batch_size)]


def unwritten(texts: list[list[int]], vocab_size: int, count: int) -> torch.LongTensor:
    """The first tokens that occur in no text, at most `count`.

    Raises:
        ValueError: if there is none.
    """
    written = {token for text in texts for token in text}
    others = [token for token in range(vocab_size) if token not in written][:count]
    if not others:
        raise ValueError("the texts have every token of the vocabulary, so no drafter can be wrong always: write less")
    return torch.tensor(others)


def mislead(drafter: ParallelDrafter, tokens: torch.LongTensor) -> None:
    """Let a drafter do its work, and then be sure of `tokens`, whatever its work was, in rounds that are compiled or not."""
    draft, draft_static = drafter.draft, drafter.draft_static
    logits_of_wrong = SURE - torch.arange(len(tokens), dtype=torch.float32)

    def wrong(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_copy(-1, tokens, logits_of_wrong.expand(*logits.shape[:-1], -1))

    vars(drafter)["draft"] = lambda *inputs: wrong(draft(*inputs))
    vars(drafter)["draft_static"] = lambda *inputs: wrong(draft_static(*inputs))


def excerpts(sources: tuple[Callable | type, ...], tokenizer: PreTrainedTokenizerBase) -> list[torch.LongTensor]:
    """Beginnings of some library code, and of what comes later in it, `(1, CODE_TOKENS)` each."""
    prompts = []
    for first in range(0, NUM_EXCERPTS * EXCERPT_LINES, EXCERPT_LINES):
        for source in sources:
            lines = inspect.getsource(source).split("\n")[first : first + EXCERPT_LINES]
            ids = tokenizer("\n".join(lines))["input_ids"]
            # The last tokens: what is to be continued is at the end.
            if len(ids) >= CODE_TOKENS:
                prompts.append(torch.tensor([ids[-CODE_TOKENS:]]))
    return prompts


class Cases:
    """All cases that can be measured with what is there; models are loaded when they are asked for.

    Args:
        arguments: `stories`, `drafters`, `prompt_text` and `family`, as schedule.py takes them.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.makers = dict(self._demo_makers())
        if arguments.stories:
            self.makers = {**dict(self._stories_makers()), **self.makers}

    @property
    def names(self) -> list[str]:
        return list(self.makers)

    def __getitem__(self, name: str) -> Case:
        """The case of this name; its random weights, if it has any, are always the same."""
        torch.manual_seed(0)
        return self.makers[name](name)

    def _stories_makers(self) -> Iterator[tuple[str, Callable[[str], Case]]]:
        """stories260K: with trained drafters on stories and on code, an untrained one that is never right, and random ones."""
        folders = self.arguments.drafters
        trained = [name for name in DRAFTER_NAMES.values() if folders and (folders / name / "config.json").exists()]
        for kind in trained:
            yield f"stories260K/{kind}", lambda name, kind=kind: self._story_case(name, self._trained(kind))
        for kind in trained:
            yield f"stories260K on code/{kind}", lambda name, kind=kind: self._code_case(name, self._trained(kind))
        yield "stories260K/never right", lambda name: self._story_case(name, self._random("DFlash"), False, True)
        for kind in ("PARD", "DFlash"):
            yield (
                f"stories260K/random {kind}",
                lambda name, kind=kind: self._story_case(name, self._random(kind), False),
            )

    def _demo_makers(self) -> Iterator[tuple[str, Callable[[str], Case]]]:
        """The shipped family, on what its drafters learned and on other code."""
        kinds = [kind for folder, kind in DRAFTER_NAMES.items() if (self.arguments.family / folder).is_dir()]
        for kind in kinds:
            yield f"family/{kind}", lambda name, kind=kind: self._family_case(name, kind, BEGINNINGS, True)
        for kind in kinds:
            yield (
                f"family on other code/{kind}",
                lambda name, kind=kind: self._family_case(name, kind, UNFAMILIAR, False),
            )

    def _story_case(self, name: str, drafter: ParallelDrafter, pays: bool = True, is_wrong: bool = False) -> Case:
        target, _, prompts = self.stories
        return Case(name, target, drafter, prompts, pays, is_wrong)

    def _code_case(self, name: str, drafter: ParallelDrafter) -> Case:
        target, tokenizer, _ = self.stories
        return Case(name, target, drafter, excerpts(UNFAMILIAR, tokenizer), False)

    def _family_case(self, name: str, kind: str, sources: tuple[Callable | type, ...], pays: bool) -> Case:
        family = self.family
        return Case(name, family.target, family.drafters[kind].eval(), excerpts(sources, family.tokenizer), pays)

    def _trained(self, kind: str) -> ParallelDrafter:
        return AutoDrafter.from_pretrained(self.arguments.drafters / kind).eval()

    def _random(self, kind: str) -> ParallelDrafter:
        # It needs datasets, which nothing else here does.
        from stories260k import fresh_drafter

        target, tokenizer, _ = self.stories
        return fresh_drafter(kind, target, tokenizer).eval()

    @property
    def stories(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[torch.LongTensor]]:
        """The stories target, its tokenizer, and beginnings of stories."""
        return load_stories(self.arguments.stories, self.arguments.prompt_text)

    @property
    def family(self) -> Family:
        # Tensors this small only wait for a second thread.
        torch.set_num_threads(1)
        return load_once(self.arguments.family)


@cache
def load_stories(path, prompt_text) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[torch.LongTensor]]:
    """See [`Cases.stories`]; loaded once."""
    from stories260k import story_beginnings

    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return target, tokenizer, list(story_beginnings(prompt_text, tokenizer, 64, STORY_TOKENS).split(1))


load_once = cache(load_family)
