"""Let every entry decode the same prompts in turns, by the clock, and once more watched round by round."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from ..generation.settings import read_settings
from .calls import (
    Batch,
    Condition,
    TimedRun,
    Watched,
    generation_config,
    is_compiled,
    run,
    watch,
)
from .entries import Entry

WARM_UP_TOKENS = 8
Around = Callable[[Entry], AbstractContextManager[None]]


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
    runs: list[list[TimedRun]]
    watched: list[Watched]
    at_full_depth: list[Watched] = field(default_factory=list)


def measure(
    target: PreTrainedModel,
    entries: list[Entry],
    prompts: list[torch.LongTensor],
    condition: Condition,
    around: Around = lambda entry: nullcontext(),
) -> list[Measured]:
    """[`race`] all entries, and then watch each of them, which costs time and is not timed.

    They are watched last: by then a schedule knows what drafts are worth, as it does in the runs that are timed.
    """
    measured = race(target, entries, prompts, condition, around)
    batches = in_batches(target, prompts, condition.batch_size)
    with kept_random_state(target.device):
        for each in measured:
            with around(each.entry):
                watch_all(target, each, batches, condition)
    return measured


def watch_all(target: PreTrainedModel, measured: Measured, batches: list[Batch], condition: Condition) -> None:
    """Watch an entry on every batch, and once more at full depth if its rounds draft what pays."""
    entry = measured.entry
    if is_compiled(entry, condition):
        # In other parts than it is for the clock, since rounds are timed part by part.
        for batch in one_of_each_size(batches):
            watch(target, entry, batch, condition)
    for index, batch in enumerate(batches):
        measured.watched.append(watch(target, entry, batch, condition.on_batch(index)))
        if is_automatic(entry, condition):
            at_full_depth = watch(target, with_fixed_schedule(entry), batch, condition.on_batch(index))
            measured.at_full_depth.append(at_full_depth)


def race(
    target: PreTrainedModel,
    entries: list[Entry],
    prompts: list[torch.LongTensor],
    condition: Condition,
    around: Around = lambda entry: nullcontext(),
) -> list[Measured]:
    """Decode every prompt with every entry by the clock.

    Each entry is warmed up first. The entries then take turns on each batch, so that a machine that slows down slows all of them
    down. The random state of the caller is left as it was.

    Args:
        target: the model whose text it is.
        entries: plain `generate` first.
        prompts: token ids, each `(1, length)`.
        condition: batch size, temperature and so on.
        around: a context for what an entry decodes, say of a simulation.

    Returns:
        What was timed, of each entry; nothing was watched.
    """
    batches = in_batches(target, prompts, condition.batch_size)
    measured = [Measured(entry, [[] for _ in batches], []) for entry in entries]
    with kept_random_state(target.device):
        for each in measured:
            with around(each.entry):
                warm_up(target, each.entry, batches, condition)
        take_turns(target, measured, batches, condition, around)
    return measured


def take_turns(
    target: PreTrainedModel,
    measured: list[Measured],
    batches: list[Batch],
    condition: Condition,
    around: Around = lambda entry: nullcontext(),
) -> None:
    """Time every entry on every batch; see [`race`]."""
    for _ in range(condition.repeats):
        for index, batch in enumerate(batches):
            for each in measured:
                with around(each.entry):
                    each.runs[index].append(run(target, each.entry, batch, condition.on_batch(index)))


def warm_up(target: PreTrainedModel, entry: Entry, batches: list[Batch], condition: Condition) -> None:
    """Do what is slow the first time: what is compiled is compiled for each batch size, a schedule learns from a text."""
    if is_compiled(entry, condition):
        for batch in one_of_each_size(batches):
            run(target, entry, batch, condition)
    elif is_automatic(entry, condition):
        run(target, entry, batches[0], condition)
    else:
        run(target, entry, batches[0], condition, min(WARM_UP_TOKENS, condition.max_new_tokens))


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


def is_automatic(entry: Entry, condition: Condition) -> bool:
    """Whether the clock has a part in how much a round drafts, in rounds that need no compilation."""
    if not entry.is_parallel or is_compiled(entry, condition):
        return False
    return read_settings(entry.assistant, generation_config(entry, condition)).is_automatic


def with_fixed_schedule(entry: Entry) -> Entry:
    """The same, but each round drafts as much as the others."""
    return replace(entry, setting={**entry.setting, "draft_schedule": "fixed"})
