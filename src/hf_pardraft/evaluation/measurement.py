"""Let every entry decode the same prompts in turns, by the clock, and once more watched round by round."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.settings import wants_compiled
from .benchmark import WARM_UP_TOKENS, end_of_text_ids, padded_batch, wait_for_device, without_padding
from .entries import Entry
from .utilisation import Proposal

TokenBuffer = tuple[tuple[int, ...], ...]
Around = Callable[[Entry], AbstractContextManager[None]]


@dataclass(frozen=True)
class Condition:
    """Under what all entries are compared.

    Attributes:
        batch_size: prompts that are decoded at once.
        temperature: 0 is greedy.
        max_new_tokens: per prompt; fewer if the target ends its text.
        top_k, top_p: with a temperature; 0 and 1 leave the target's law as it is.
        repeats: how often each entry is timed on each batch.
        seed: of what is drawn; each repeat draws the same, so that it writes the same.
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

    def sampling(self) -> dict[str, Any]:
        """The attributes of a `GenerationConfig` that say how tokens are chosen."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class Run:
    """One timed `generate` call: the new tokens of each row, and wall-clock seconds, the prompt's own forward included."""

    texts: TokenBuffer
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Watched:
    """One `generate` call, round by round.

    Attributes:
        texts: the new tokens of each row.
        rounds: forwards of the target.
        tokens_per_round: tokens that a round committed to a row, for each row that took part.
        proposals: what was proposed; empty if a loop does not tell.
        seconds: spent in draft, tree, verify and commit; empty if a loop does not tell.
    """

    texts: TokenBuffer
    rounds: int
    tokens_per_round: tuple[int, ...]
    proposals: tuple[Proposal, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What an entry did with all batches of a condition: `runs[batch][repeat]` and `watched[batch]`."""

    entry: Entry
    runs: list[list[Run]]
    watched: list[Watched]


class RoundCounter(BaseStreamer):
    """Counts the tokens of each round of transformers' assisted loop, which hands them over a round at a time."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.LongTensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        """The prompt came first, and was no round."""
        del self.counts[0]


def measure(
    target: PreTrainedModel,
    entries: list[Entry],
    prompts: list[torch.LongTensor],
    condition: Condition,
    around: Around = lambda entry: nullcontext(),
) -> list[Measured]:
    """Decode every prompt with every entry.

    Each entry is warmed up and then watched, which costs time and is not timed. After that the entries take turns on each
    batch, so that a machine that slows down slows all of them down.

    Args:
        target: the model whose text it is.
        entries: plain `generate` first.
        prompts: token ids, each `(1, length)`.
        condition: batch size, temperature and so on.
        around: a context for each call, say of a simulation.
    """
    size = condition.batch_size
    batches = [on_device(padded_batch(prompts[i : i + size]), target) for i in range(0, len(prompts), size)]
    measured = [Measured(entry, [[] for _ in batches], []) for entry in entries]
    for each in measured:
        with around(each.entry):
            warm_up(target, each.entry, batches, condition)
            each.watched.extend(watch(target, each.entry, batch, condition) for batch in batches)
    for _ in range(condition.repeats):
        for index, batch in enumerate(batches):
            for each in measured:
                with around(each.entry):
                    each.runs[index].append(run(target, each.entry, batch, condition))
    return measured


def warm_up(
    target: PreTrainedModel, entry: Entry, batches: list[dict[str, torch.LongTensor]], condition: Condition
) -> None:
    """Do what is slow the first time.

    What is compiled is compiled for each batch size, and when it is watched, in the parts that are timed.
    """
    if not is_compiled(entry, condition):
        run(target, entry, batches[0], condition, min(WARM_UP_TOKENS, condition.max_new_tokens))
        return
    for batch in {len(batch["input_ids"]): batch for batch in reversed(batches)}.values():
        run(target, entry, batch, condition)
        watch(target, entry, batch, condition)


def on_device(batch: dict[str, torch.LongTensor], target: PreTrainedModel) -> dict[str, torch.LongTensor]:
    return {name: tensor.to(target.device) for name, tensor in batch.items()}


def run(
    target: PreTrainedModel,
    entry: Entry,
    batch: dict[str, torch.LongTensor],
    condition: Condition,
    max_new_tokens: int | None = None,
) -> Run:
    """One `generate` call on a batch, by the clock."""
    config = generation_config(entry, condition, max_new_tokens)
    torch.manual_seed(condition.seed)
    wait_for_device(target.device)
    started = time.perf_counter()
    output_ids = call(target, entry, batch, config)
    wait_for_device(target.device)
    seconds = time.perf_counter() - started
    return Run(new_texts(target, batch, output_ids), seconds)


def watch(target: PreTrainedModel, entry: Entry, batch: dict[str, torch.LongTensor], condition: Condition) -> Watched:
    """One `generate` call on a batch, round by round."""
    torch.manual_seed(condition.seed)
    if entry.is_parallel:
        config = generation_config(entry, condition, time_rounds=True, record_drafts=True)
        texts = new_texts(target, batch, call(target, entry, batch, config))
        stats = entry.assistant.last_stats
        return Watched(texts, stats.rounds, tuple(stats.tokens_per_round), tuple(stats.proposals), dict(stats.seconds))
    config = generation_config(entry, condition)
    if entry.is_plain:
        texts = new_texts(target, batch, call(target, entry, batch, config))
        return Watched(texts, max(map(len, texts)), (1,) * sum(map(len, texts)))
    counter = RoundCounter()
    texts = new_texts(target, batch, call(target, entry, batch, config, streamer=counter))
    return Watched(texts, len(counter.counts), tuple(counter.counts))


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
    batch: dict[str, torch.LongTensor],
    config: GenerationConfig,
    **arguments: Any,
) -> torch.LongTensor:
    return target.generate(
        **batch, assistant_model=entry.assistant, generation_config=config, **entry.arguments, **arguments
    )


def new_texts(target: PreTrainedModel, batch: dict[str, torch.LongTensor], output_ids: torch.LongTensor) -> TokenBuffer:
    """What was added to each row, without padding."""
    ends = end_of_text_ids(target)
    rows = output_ids[:, batch["input_ids"].shape[1] :].tolist()
    return tuple(tuple(without_padding(row, ends)) for row in rows)
