"""Answers that the target writes here, in batches that are filled up as texts come to their ends."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.utils import logging

from ..generation.packing.fast_attention import fast_attention
from ..generation.packing.packed_layers import packed_layers
from ..generation.packing.packing_trials import products_of
from ..user_input.models import context_length, end_of_text_ids, up_to_end, without_settings_of_its_own
from .compiled_steps import CompiledSteps
from .draws import ItemDraws, Nucleus
from .fast_steps import FastSteps
from .joined_cache import JoinedCache, has_entries_per_token, may_have_gaps
from .padding import reads_past_padding
from .refilled_batch import EnoughEnded, Item, RefilledBatch
from .rewriting import Answer, Rewrite, check_sampling

logger = logging.get_logger(__name__)

# How many batches' rows are read ahead; those with the longest prompts are written first.
BATCHES_AHEAD = 16


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for an answer in what the target can read."""


class LocalWriter:
    """Writes answers with a model and `generate`.

    With a temperature each row is sampled with random numbers of its own, which depend on the seed, the row's index and the
    turn, and not on the batch; what a batch still changes is the rounding of its forwards. With a drafter a batch shares one
    generator, so that only batches of the same rows are written alike. The target's `generation_config` says what ends a
    text; its sampling settings and penalties are not used.

    Args:
        target: the model.
        tokenizer: its tokenizer.
        drafter: to write sooner, if any.
        temperature: 0 is greedy.
        top_p: share of the law that is sampled from.
        max_tokens: most tokens of an answer. One that meets the end of the target's context is cut off there, too.
        batch_size: rows that are written at once.
        seed: of the samples.
        template_kwargs: what the chat template takes besides messages.
        pack_weights: whether a target on a CPU multiplies by packed copies of its weights, which take as much memory again.

    Attributes:
        num_tokens: how many it has written so far.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: PreTrainedModel | None = None,
        temperature: float = 0.6,
        top_p: float = 1.0,
        max_tokens: int = 2048,
        batch_size: int = 8,
        seed: int = 0,
        template_kwargs: dict[str, Any] | None = None,
        pack_weights: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_sampling(temperature, top_p, max_tokens)
        self.target, self.tokenizer, self.drafter = target.eval(), tokenizer, drafter
        self.temperature, self.top_p, self.max_tokens = temperature, top_p, max_tokens
        self.batch_size, self.seed, self.template_kwargs = batch_size, seed, template_kwargs or {}
        self.pack_weights = pack_weights
        self.num_tokens = 0
        self.end_ids = end_token_ids(target, tokenizer)
        pad = tokenizer.pad_token_id
        # It is masked, but has to have a row of the embedding, which was not made larger for all tokens that were added.
        num_rows = getattr(target.get_input_embeddings(), "num_embeddings", None)
        has_row = pad is not None and (num_rows is None or pad < num_rows)
        self.pad_id = pad if has_row else min(self.end_ids, default=0)
        self.context = context_length(target.config)
        self.steps = CompiledSteps(target, pack_weights)

    def write(self, rewrites: Iterable[Rewrite]) -> Iterator[Rewrite | tuple[Rewrite, Exception]]:
        """Rows as they get done, or with what kept them from it."""
        rewrites, batch, waiting = iter(rewrites), self.new_batch(), []
        # Turns that follow those that have just been written.
        following: list[Rewrite] = []
        while True:
            missing = self.batch_size * BATCHES_AHEAD - len(waiting) - len(following)
            for rewrite in [*following, *islice(rewrites, max(0, missing))]:
                try:
                    waiting.append(self.item(rewrite))
                except ValueError as error:
                    yield rewrite, error
            if not waiting and not batch.items:
                return
            following = []
            batch.refill(waiting)
            for rewrite, answer in self.written(batch):
                rewrite.add(answer)
                if rewrite.is_done:
                    yield rewrite
                else:
                    following.append(rewrite)

    @cached_property
    def most_items(self) -> int:
        """Of a batch: one, if the target would write another text beside padding."""
        if self.batch_size == 1 or has_entries_per_token(self.target) or reads_past_padding(self.target, self.pad_id):
            return self.batch_size
        logger.warning_once(f"Padding changes what {type(self.target).__name__} says: it writes one text at a time")
        return 1

    def new_batch(self) -> RefilledBatch:
        """An empty batch."""
        return RefilledBatch(
            self._generate,
            self.is_ended,
            self.most_items,
            joins_caches=has_entries_per_token(self.target),
            shares_beginnings=may_have_gaps(self.target),
            # Drafters are measured by rounds, and have a schedule of their own.
            refills=self.drafter is None,
        )

    def item(self, rewrite: Rewrite) -> Item:
        """The next answer of a row, to be written.

        Raises:
            ValueError: see [`prompt_ids`].
        """
        prompt = self.prompt_ids(rewrite)
        room = self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(prompt))
        return Item(rewrite, prompt, room, rewrite.seed(self.seed))

    def written(self, batch: RefilledBatch) -> Iterator[tuple[Rewrite, Answer]]:
        """Rows whose next answers a batch has come to the ends of, and these."""
        for item in batch.write_on():
            self.num_tokens += len(item.written)
            prompt = item.prompt if item.row.prompt_text is not None else []
            yield item.row, self.answer_of(item.written, prompt)

    def prompt_ids(self, rewrite: Rewrite) -> list[int]:
        """The tokens that the target reads.

        Raises:
            PromptTooLongError: if it is longer than what the target can read.
            ValueError: if the chat template refuses the conversation, or it is empty.
        """
        text = rewrite.prompt_text
        ids = self._chat_ids(rewrite) if text is None else self.tokenizer(text)["input_ids"]
        if self.context is not None and len(ids) >= self.context:
            raise PromptTooLongError(
                f"its prompt has {len(ids)} tokens, and the target reads fewer than {self.context}"
            )
        if not ids:
            raise ValueError("its prompt is empty")
        return ids

    def _chat_ids(self, rewrite: Rewrite) -> list[int]:
        text = rewrite.chat_text(self.tokenizer, self.template_kwargs)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _generate(
        self, items: list[Item], max_new_tokens: int, num_enough: int, cache: Cache | None, num_shared: int
    ) -> list[list[int]]:
        """What follows some texts, for each up to the token that ends it, and with it; see [`RefilledBatch`]."""
        device, texts = self.target.device, [item.ids for item in items]
        length = max(map(len, texts))
        missing = [length - len(ids) for ids in texts]
        padded = [
            ids[:num_shared] + [self.pad_id] * count + ids[num_shared:]
            for ids, count in zip(texts, missing, strict=True)
        ]
        real = [[1] * num_shared + [0] * count + [1] * (length - num_shared - count) for count in missing]
        options = self._sampling(items)
        if self.drafter is None:
            enough = EnoughEnded(self.end_ids, num_enough, self._item_criteria(), device)
            options["stopping_criteria"] = StoppingCriteriaList([enough])
        if cache is not None:
            options["past_key_values"] = cache
        with ExitStack() as ways:
            ways.enter_context(without_settings_of_its_own(self.target))
            ways.enter_context(products_of(len(items)))
            # Drafted rounds have ways of their own.
            if self.drafter is None and isinstance(cache, JoinedCache) and self.steps.are_compiled(len(items)):
                ways.enter_context(self.steps.compiled())
            elif self.drafter is None:
                ways.enter_context(self.steps.counted())
                ways.enter_context(packed_layers(self.target, wanted=self.pack_weights))
                ways.enter_context(fast_attention(self.target))
                ways.enter_context(FastSteps() if device.type == "cpu" else nullcontext())
            written = self.target.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(real, device=device),
                generation_config=self._generation_config(max_new_tokens),
                **options,
            )
        return [up_to_end(ids, self.end_ids) for ids in written[:, length:].tolist()]

    def is_ended(self, item: Item) -> bool:
        """Whether a text is at its end, or may not get longer."""
        return len(item.written) >= item.room or bool(item.written and item.written[-1] in self.end_ids)

    def answer_of(self, ids: list[int], prompt: list[int]) -> Answer:
        """The text up to the token that ends it, such that it can follow the text of the `prompt`."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        before, whole = self.decode(prompt), self.decode(prompt + ids[:end])
        # Some tokenizers leave out a blank that a text begins with, but not one within.
        text = whole[len(before) :] if whole.startswith(before) else self.decode(ids[:end])
        return Answer(text, is_whole=end is not None)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""

    def _generation_config(self, max_new_tokens: int) -> GenerationConfig:
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.end_ids) or None,
            pad_token_id=self.pad_id,
            do_sample=False,
            pack_weights=self.pack_weights,
        )
        if self.drafter is not None and self.temperature:
            # transformers has a top_k where nobody asks for one.
            config.update(do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=0)
        return config

    def _sampling(self, items: list[Item]) -> dict[str, Any]:
        if self.drafter is not None:
            torch.manual_seed(items[0].seed)
            return {"assistant_model": self.drafter}
        if not self.temperature:
            return {}
        processors = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p < 1:
            processors.append(Nucleus(self.top_p))
        processors.append(ItemDraws([item.generator for item in items]))
        return {"logits_processor": processors}

    def _item_criteria(self) -> StoppingCriteriaList:
        """What ends a text besides tokens."""
        return StoppingCriteriaList()


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end what the target writes."""
    return end_of_text_ids(target) | ({tokenizer.eos_token_id} - {None})
