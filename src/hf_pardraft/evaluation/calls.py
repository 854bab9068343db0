"""One `generate` call of an entry: how it is configured, by the clock, or watched round by round."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.settings import wants_compiled
from ..user_input.models import end_of_text_ids, up_to_end
from .entries import Entry
from .utilisation import Proposal

Texts = tuple[tuple[int, ...], ...]
Batch = dict[str, torch.LongTensor]


@dataclass(frozen=True)
class Condition:
    """Under what all entries are compared.

    Attributes:
        batch_size: prompts that are decoded at once.
        temperature: 0 is greedy.
        max_new_tokens: per prompt; fewer if the target ends its text.
        top_k, top_p: with a temperature; 0 and 1 leave the target's law as it is.
        repeats: how often each entry is timed on each batch.
        seed: of what is drawn on the first batch; the n-th after it has `seed + n`. Each repeat draws the same, so that it
            writes the same.
        generate_arguments: attributes of every call's `GenerationConfig`, such as `cache_implementation`.
    """

    batch_size: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 256
    top_k: int = 0
    top_p: float = 1.0
    repeats: int = 2
    seed: int = 0
    generate_arguments: dict[str, Any] = field(default_factory=dict)

    def on_batch(self, index: int) -> "Condition":
        """The same, with the seed of the n-th batch."""
        return replace(self, seed=self.seed + index)

    def sampling(self) -> dict[str, Any]:
        """The attributes of a `GenerationConfig` that say how tokens are chosen."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class TimedRun:
    """One timed `generate` call.

    Attributes:
        texts: the new tokens of each batch item.
        seconds: wall-clock time, the prompt's own forward included.
        tokens_per_round: tokens that a round committed to an item, for each item that took part; empty if a loop does not tell.
        rounds: forwards of the target; 0 if a loop does not tell.
    """

    texts: Texts
    seconds: float
    tokens_per_round: tuple[int, ...] = ()
    rounds: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Watched:
    """One `generate` call, round by round.

    Attributes:
        texts: the new tokens of each batch item.
        rounds: forwards of the target.
        tokens_per_round: as for [`TimedRun`].
        proposals: what was proposed; empty if a loop does not tell.
        seconds: spent in draft, tree, verify and commit; empty if a loop does not tell.
    """

    texts: Texts
    rounds: int
    tokens_per_round: tuple[int, ...]
    proposals: tuple[Proposal, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class RoundCounter(BaseStreamer):
    """Counts the tokens of each round of transformers' assisted loop, which hands them over a round at a time."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.LongTensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        """The prompt came first, and was no round."""
        del self.counts[0]


def run(
    target: PreTrainedModel,
    entry: Entry,
    batch: Batch,
    condition: Condition,
    max_new_tokens: int | None = None,
) -> TimedRun:
    """One `generate` call on a batch, by the clock."""
    config = generation_config(entry, condition, max_new_tokens)
    torch.manual_seed(condition.seed)
    wait_for_device(target.device)
    started = time.perf_counter()
    output_ids = call(target, entry, batch, config)
    wait_for_device(target.device)
    seconds = time.perf_counter() - started
    texts = new_texts(target, batch, output_ids, config)
    if entry.is_parallel:
        stats = entry.assistant.last_stats
        return TimedRun(texts, seconds, tuple(stats.tokens_per_round), stats.rounds)
    if entry.is_plain:
        return TimedRun(texts, seconds, *plain_rounds(texts))
    return TimedRun(texts, seconds)


def watch(target: PreTrainedModel, entry: Entry, batch: Batch, condition: Condition) -> Watched:
    """One `generate` call on a batch, round by round."""
    torch.manual_seed(condition.seed)
    watching = {"time_rounds": True, "record_drafts": True} if entry.is_parallel else {}
    config = generation_config(entry, condition, **watching)
    counter = None if entry.is_parallel or entry.is_plain else RoundCounter()
    texts = new_texts(target, batch, call(target, entry, batch, config, streamer=counter), config)
    if entry.is_parallel:
        stats = entry.assistant.last_stats
        return Watched(texts, stats.rounds, tuple(stats.tokens_per_round), tuple(stats.proposals), dict(stats.seconds))
    if counter is not None:
        return Watched(texts, len(counter.counts), tuple(counter.counts))
    counts, rounds = plain_rounds(texts)
    return Watched(texts, rounds, counts)


def plain_rounds(texts: Texts) -> tuple[tuple[int, ...], int]:
    """Tokens of each round and item, and how many rounds, without a drafter: every forward commits one token to a text."""
    return (1,) * sum(map(len, texts)), max(map(len, texts))


def generation_config(
    entry: Entry, condition: Condition, max_new_tokens: int | None = None, **attributes: Any
) -> GenerationConfig:
    """The configuration of one call."""
    length = condition.max_new_tokens if max_new_tokens is None else max_new_tokens
    setting = {**condition.generate_arguments, **entry.setting, **attributes}
    config = GenerationConfig(max_new_tokens=length, **condition.sampling(), **setting)
    if wants_compiled(config) and "compile_config" not in setting:
        config.compile_config = compile_anywhere()
    return config


def is_compiled(entry: Entry, condition: Condition) -> bool:
    """Whether an entry asks for compiled rounds."""
    return wants_compiled(generation_config(entry, condition))


def compile_anywhere() -> CompileConfig:
    """transformers' own choice of options, also for plain `generate` on a CPU, which it compiles only when told so."""
    config = CompileConfig()
    config._compile_all_devices = True
    return config


def call(
    target: PreTrainedModel,
    entry: Entry,
    batch: Batch,
    config: GenerationConfig,
    **arguments: Any,
) -> torch.LongTensor:
    return target.generate(
        **batch, assistant_model=entry.assistant, generation_config=config, **entry.arguments, **arguments
    )


def new_texts(target: PreTrainedModel, batch: Batch, output_ids: torch.LongTensor, config: GenerationConfig) -> Texts:
    """What a call of this `config` added to each prompt, without padding, of what it returned, `output_ids (batch, length)`."""
    ends = end_of_text_ids(target, config)
    items = output_ids[:, batch["input_ids"].shape[1] :].tolist()
    return tuple(tuple(up_to_end(item, ends)) for item in items)


def wait_for_device(device: torch.device) -> None:
    """Accelerators run after the host: without waiting, the clock would measure how fast work is handed out."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
