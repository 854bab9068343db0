"""Answers that the target writes here, in batches of prompts of about one length."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from ..training.data.chat import Conversation
from ..training.data.formats import template_inputs
from .rewriting import Answer, Rewrite, check_sampling

# How many batches' rows are sorted by length together.
BATCHES_PER_WINDOW = 16
# With fewer a step takes about as long as with one.
FEW_ITEMS = 4
# Most laws of a next token have all but a few percent in so many tokens.
MANY_TOKENS = 1024


class ItemNoise(LogitsProcessor):
    """Makes the largest score a sample: Gumbel noise, from a generator per batch item, so that it is written alike in any batch.

    argmax (s + g), with g from the standard Gumbel law, is a sample of softmax (s).

    Args:
        seeds: one per batch item.
        device: of the scores.
    """

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise = torch.empty_like(scores)
        for item, generator in zip(noise, self.generators, strict=True):
            item.exponential_(generator=generator)
        return scores - noise.log()

    def of(self, items: list[int]) -> "ItemNoise":
        """The noise of some batch items, which goes on where it is."""
        some = ItemNoise([], torch.device("cpu"))
        some.generators = [self.generators[item] for item in items]
        return some


class Nucleus(LogitsProcessor):
    """Top-p as `TopPLogitsWarper` has it, without sorting a vocabulary whose most likely tokens are enough: on a CPU a sort costs
    as much as a small target's forward.

    Args:
        top_p: share of the law that is kept.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p, self.whole = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        likely, tokens = scores.topk(min(MANY_TOKENS, scores.shape[-1]))
        shares = (likely - scores.logsumexp(dim=-1, keepdim=True)).exp()
        share = shares.cumsum(dim=-1)
        if bool((share[:, -1] < self.top_p).any()):
            return self.whole(input_ids, scores)
        # The token that reaches top_p is still kept.
        kept = likely.masked_fill(share - shares >= self.top_p, -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, kept)


class HalfDone(StoppingCriteria):
    """Stops a batch once half of its items are at their ends.

    Args:
        end_ids: tokens that end a text.
        device: of the batch.
    """

    def __init__(self, end_ids: set[int], device: torch.device) -> None:
        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        self._done: torch.BoolTensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        ended = torch.isin(input_ids[:, -1], self.end_ids)
        self._done = ended if self._done is None else self._done | ended
        return (self._done.sum() * 2 >= len(ended)).expand(len(ended))


class LocalWriter:
    """Writes answers with a model and `generate`.

    With a temperature each row is sampled with noise of its own, which depends on the seed, the row's index and the turn, and
    not on the batch; what a batch still changes is the rounding of its padded forwards. With a drafter a batch shares one
    generator, so that only batches of the same rows are written alike. The target's `generation_config` says what ends a
    text; its sampling settings and penalties are not used.

    Args:
        target: the model.
        tokenizer: its tokenizer.
        drafter: to write sooner, if any.
        temperature: 0 is greedy.
        top_p: share of the law that is sampled from.
        max_tokens: most tokens of an answer. One that meets the end of the target's context, with the longest prompt of its
            batch, is cut off there, too.
        batch_size: rows that are written at once.
        seed: of the samples.
        template_kwargs: what the chat template takes besides messages.

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
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_sampling(temperature, top_p, max_tokens)
        self.target, self.tokenizer, self.drafter = target.eval(), tokenizer, drafter
        self.temperature, self.top_p, self.max_tokens = temperature, top_p, max_tokens
        self.batch_size, self.seed, self.template_kwargs = batch_size, seed, template_kwargs or {}
        self.num_tokens = 0
        self.end_ids = end_token_ids(target, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else min(self.end_ids, default=0)
        self.context = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")

    def write(self, rewrites: Iterable[Rewrite]) -> Iterator[Rewrite | tuple[Rewrite, Exception]]:
        """Rows as they get done, or with what kept them from it. A window of rows is read ahead and sorted by length."""
        rewrites = iter(rewrites)
        while window := list(islice(rewrites, self.batch_size * BATCHES_PER_WINDOW)):
            while window:
                prompts = {}
                for rewrite in window:
                    try:
                        prompts[rewrite.index] = self.prompt_ids(rewrite)
                    except ValueError as error:
                        yield rewrite, error
                readable = [rewrite for rewrite in window if rewrite.index in prompts]
                readable.sort(key=lambda rewrite: len(prompts[rewrite.index]), reverse=True)
                window = []
                for start in range(0, len(readable), self.batch_size):
                    batch = readable[start : start + self.batch_size]
                    answers = self.answer(batch, [prompts[rewrite.index] for rewrite in batch])
                    for rewrite, answer in zip(batch, answers, strict=True):
                        rewrite.add(answer)
                        if rewrite.is_done:
                            yield rewrite
                        else:
                            window.append(rewrite)

    def prompt_ids(self, rewrite: Rewrite) -> list[int]:
        """The tokens that the target reads.

        Raises:
            ValueError: if the chat template refuses the conversation, or it is longer than what the target can read.
        """
        text = rewrite.prompt_text
        ids = self._chat_ids(rewrite) if text is None else self.tokenizer(text)["input_ids"]
        if self.context is not None and len(ids) >= self.context:
            raise ValueError(f"its prompt has {len(ids)} tokens, and the target reads fewer than {self.context}")
        if not ids:
            raise ValueError("its prompt is empty")
        return ids

    def _chat_ids(self, rewrite: Rewrite) -> list[int]:
        tools, template_kwargs = template_inputs(rewrite.row, self.template_kwargs)
        chat = Conversation(self.tokenizer, rewrite.messages, tools, template_kwargs)
        text = chat.render(chat.messages, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer(self, batch: list[Rewrite], prompts: list[list[int]]) -> list[Answer]:
        """The next answers of some rows."""
        answers = self.write_tokens(prompts, [rewrite.seed(self.seed) for rewrite in batch])
        self.num_tokens += sum(map(len, answers))
        return [
            self.answer_of(ids, prompt if rewrite.prompt_text is not None else [])
            for ids, prompt, rewrite in zip(answers, prompts, batch, strict=True)
        ]

    def write_tokens(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """What follows each prompt, up to the token that ends it, and with it.

        A batch takes as long as its longest item. So once half of many are at their ends, the others go on by themselves:
        reading again what they have takes less than the steps that are saved.
        """
        length = max(map(len, prompts))
        room = self.max_tokens if self.context is None else min(self.max_tokens, self.context - length)
        noise, written, going_on = (
            ItemNoise(seeds, self.target.device),
            [[] for _ in prompts],
            list(range(len(prompts))),
        )
        num_steps = 0
        while going_on and num_steps < room:
            options, can_split = self._sampling(noise.of(going_on), seeds), len(going_on) > FEW_ITEMS
            # Drafters are measured by rounds, and have a schedule of their own.
            if can_split and self.drafter is None:
                options["stopping_criteria"] = StoppingCriteriaList([HalfDone(self.end_ids, self.target.device)])
            new = self._generate([prompts[item] + written[item] for item in going_on], room - num_steps, **options)
            num_steps += len(new[0])
            for item, ids in zip(going_on, new, strict=True):
                end = next((place for place, token in enumerate(ids, start=1) if token in self.end_ids), None)
                written[item] += ids[:end]
            going_on = [item for item in going_on if not self.is_at_end(written[item])]
        return written

    @torch.no_grad()
    def _generate(self, texts: list[list[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """What follows some texts, for each as many tokens, padded after its end."""
        device, length = self.target.device, max(map(len, texts))
        padded = [[self.pad_id] * (length - len(ids)) + ids for ids in texts]
        real = [[0] * (length - len(ids)) + [1] * len(ids) for ids in texts]
        written = self.target.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(real, device=device),
            generation_config=self._generation_config(max_new_tokens),
            **options,
        )
        return written[:, length:].tolist()

    def is_at_end(self, ids: list[int]) -> bool:
        """Whether the last of these tokens ends a text."""
        return bool(ids) and ids[-1] in self.end_ids

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
            num_beams=1,
            # What is unset here is taken from the target's own configuration.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        if self.drafter is not None and self.temperature:
            unused = {"top_k": 0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
            config.update(do_sample=True, temperature=self.temperature, top_p=self.top_p, **unused)
        return config

    def _sampling(self, noise: ItemNoise, seeds: list[int]) -> dict[str, Any]:
        if self.drafter is not None:
            torch.manual_seed(seeds[0])
            return {"assistant_model": self.drafter}
        if not self.temperature:
            return {}
        processors = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p < 1:
            processors.append(Nucleus(self.top_p))
        processors.append(noise)
        return {"logits_processor": processors}


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end what the target writes."""
    configured = target.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}
