"""Let every entry decode the same prompts in turns, by the clock, and once more watched round by round."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.settings import read_settings, wants_compiled
from ..user_input.models import end_of_text_ids
from .entries import Entry
from .utilisation import Proposal

WARM_UP_TOKENS = 8
Texts = tuple[tuple[int, ...], ...]
Batch = dict[str, torch.LongTensor]
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
class Run:
    """One timed `generate` call.

    Attributes:
        texts: the new tokens of each batch item.
        seconds: wall-clock time, the prompt's own forward included.
        tokens_per_round: tokens that a round committed to an item, for each item that took part; empty if a loop does not tell.
    """

    texts: Texts
    seconds: float
    tokens_per_round: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Watched:
    """One `generate` call, round by round.

    Attributes:
        texts: the new tokens of each batch item.
        rounds: forwards of the target.
        tokens_per_round: as for [`Run`].
        proposals: what was proposed; empty if a loop does not tell.
        seconds: spent in draft, tree, verify and commit; empty if a loop does not tell.
    """

    texts: Texts
    rounds: int
    tokens_per_round: tuple[int, ...]
    proposals: tuple[Proposal, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What an entry did with all batches of a condition.

    Attributes:
        entry: how it decodes.
        runs: timed, `runs[batch][repeat]`.
        watched: once for each batch; empty if nothing was watched.
        at_full_depth: once for each batch, of an entry whose rounds draft what pays: each round drafts all it can.
    """

    entry: Entry
    runs: list[list[Run]]
    watched: list[Watched]
    at_full_depth: list[Watched] = field(default_factory=list)


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
    """[`race`] all entries, and watch each of them before, which costs time and is not timed."""
    batches = in_batches(target, prompts, condition.batch_size)
    measured = [Measured(entry, [[] for _ in batches], []) for entry in entries]
    with kept_random_state(target.device):
        for each in measured:
            with around(each.entry):
                warm_up_to_watch(target, each.entry, batches, condition)
                for index, batch in enumerate(batches):
                    each.watched.append(watch(target, each.entry, batch, condition.on_batch(index)))
                    if is_automatic(each.entry, condition):
                        fixed = with_fixed_schedule(each.entry)
                        each.at_full_depth.append(watch(target, fixed, batch, condition.on_batch(index)))
        take_turns(target, measured, batches, condition, around)
    return measured


def race(
    target: PreTrainedModel, entries: list[Entry], prompts: list[torch.LongTensor], condition: Condition
) -> list[Measured]:
    """Decode every prompt with every entry by the clock.

    Each entry is warmed up first. The entries then take turns on each batch, so that a machine that slows down slows all of them
    down. The random state of the caller is left as it was.

    Args:
        target: the model whose text it is.
        entries: plain `generate` first.
        prompts: token ids, each `(1, length)`.
        condition: batch size, temperature and so on.

    Returns:
        What was timed, of each entry; nothing was watched.
    """
    batches = in_batches(target, prompts, condition.batch_size)
    measured = [Measured(entry, [[] for _ in batches], []) for entry in entries]
    with kept_random_state(target.device):
        for each in measured:
            warm_up(target, each.entry, batches, condition)
        take_turns(target, measured, batches, condition)
    return measured


def take_turns(
    target: PreTrainedModel,
    measured: list[Measured],
    batches: list[Batch],
    condition: Condition,
    around: Around = lambda entry: nullcontext(),
) -> None:
    """Time every entry on every batch; `around` is a context for each call, say of a simulation."""
    for _ in range(condition.repeats):
        for index, batch in enumerate(batches):
            for each in measured:
                with around(each.entry):
                    each.runs[index].append(run(target, each.entry, batch, condition.on_batch(index)))


def warm_up(target: PreTrainedModel, entry: Entry, batches: list[Batch], condition: Condition) -> None:
    """Do what is slow the first time: what is compiled is compiled for each batch size."""
    if not is_compiled(entry, condition):
        run(target, entry, batches[0], condition, min(WARM_UP_TOKENS, condition.max_new_tokens))
        return
    for batch in one_of_each_size(batches):
        run(target, entry, batch, condition)


def warm_up_to_watch(target: PreTrainedModel, entry: Entry, batches: list[Batch], condition: Condition) -> None:
    """[`warm_up`], and compile what is compiled in other parts when rounds are timed part by part."""
    warm_up(target, entry, batches, condition)
    if is_compiled(entry, condition):
        for batch in one_of_each_size(batches):
            watch(target, entry, batch, condition)


def one_of_each_size(batches: list[Batch]) -> Iterable[Batch]:
    return {len(batch["input_ids"]): batch for batch in reversed(batches)}.values()


def in_batches(target: PreTrainedModel, prompts: list[torch.LongTensor], size: int) -> list[Batch]:
    """Prompts of `(1, length)`, `size` at a time, on the target's device."""
    starts = range(0, len(prompts), size)
    return [on_device(padded_batch(prompts[start : start + size]), target) for start in starts]


def padded_batch(prompts: list[torch.LongTensor]) -> Batch:
    """Prompts of `(1, length)` as `input_ids` and `attention_mask` of `(batch, longest)`, padded on the left."""
    longest = max(prompt.shape[1] for prompt in prompts)

    def stacked(items: list[torch.LongTensor]) -> torch.LongTensor:
        return torch.cat([torch.nn.functional.pad(item, (longest - item.shape[1], 0)) for item in items])

    return {"input_ids": stacked(prompts), "attention_mask": stacked([torch.ones_like(prompt) for prompt in prompts])}


def on_device(batch: Batch, target: PreTrainedModel) -> Batch:
    return {name: tensor.to(target.device) for name, tensor in batch.items()}


def kept_random_state(device: torch.device) -> AbstractContextManager:
    """A context whose end brings back the random state of the CPU and of `device`."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def run(
    target: PreTrainedModel,
    entry: Entry,
    batch: Batch,
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
    texts = new_texts(target, batch, output_ids)
    # Without a drafter every forward commits one token.
    counts = (1,) * sum(map(len, texts)) if entry.is_plain else ()
    return Run(texts, seconds, tuple(entry.assistant.last_stats.tokens_per_round) if entry.is_parallel else counts)


def watch(target: PreTrainedModel, entry: Entry, batch: Batch, condition: Condition) -> Watched:
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


def is_automatic(entry: Entry, condition: Condition) -> bool:
    """Whether the clock has a part in how much a round drafts, in rounds that need no compilation."""
    if not entry.is_parallel or is_compiled(entry, condition):
        return False
    return read_settings(entry.assistant, generation_config(entry, condition)).is_automatic


def with_fixed_schedule(entry: Entry) -> Entry:
    """The same, but each round drafts as much as the others."""
    return replace(entry, setting={**entry.setting, "draft_schedule": "fixed"})


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


def new_texts(target: PreTrainedModel, batch: Batch, output_ids: torch.LongTensor) -> Texts:
    """What was added to each prompt, without padding."""
    ends = end_of_text_ids(target)
    items = output_ids[:, batch["input_ids"].shape[1] :].tolist()
    return tuple(tuple(without_padding(item, ends)) for item in items)


def without_padding(tokens: list[int], ends: set[int]) -> list[int]:
    """New tokens up to their end of text."""
    length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


def wait_for_device(device: torch.device) -> None:
    """Accelerators run after the host: without waiting, the clock would measure how fast work is handed out."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
