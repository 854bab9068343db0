"""Run plain `generate` and several drafters side by side on the same prompts, and time them fairly."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.base import ParallelDrafter
from .metrics import ComparisonRow, TimedRun, summarise

PLAIN = "plain"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Contender:
    """A drafter, and how it is to draft.

    Attributes:
        drafter: `None` for plain `generate`.
        settings: generation settings that differ from the drafter's own, such as `tree_budget`.
    """

    drafter: ParallelDrafter | None
    settings: dict[str, Any] = field(default_factory=dict)


def compare(
    target: PreTrainedModel,
    contenders: dict[str, Contender],
    prompts: list[torch.LongTensor],
    max_new_tokens: int,
    repeats: int = 3,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[ComparisonRow]:
    """Decode every prompt with plain `generate` and with each contender, greedily or sampled.

    Every contender is warmed up first. The contenders then take turns on each batch of prompts, so that a machine that
    slows down slows all of them down, and each batch counts with its fastest repeat.

    Sampled, each `generate` call on the n-th batch (from 0) starts from the random seed `seed + n`, whatever the contender and
    the repeat. So a contender writes the same text in every repeat, and another one writes another text of the same law:
    texts are not compared, and tau is that of one sample per prompt. The random state of the caller is left as it was.

    Args:
        target: the model whose text it is.
        contenders: by the name that their row shall bear.
        prompts: token ids, each `(1, length)`, on the target's device.
        max_new_tokens: tokens to write per prompt; fewer if the target ends its text.
        repeats: how often each contender does each prompt.
        batch_size: prompts to decode at once.
        temperature: 0 is greedy; above, tokens are sampled from the whole vocabulary.
        seed: of the first batch.

    Returns:
        One row per contender, plain `generate` first; `identical` is `None` where texts are sampled.

    Raises:
        ValueError: if there is no prompt, no repeat or no room in a batch, a contender bears the name of plain `generate`, or
            the temperature is negative.
    """
    if not prompts or repeats < 1 or batch_size < 1:
        raise ValueError(
            "a comparison needs at least one prompt, one repeat and a batch size of one, got "
            f"{len(prompts)}, {repeats} and {batch_size}"
        )
    if PLAIN in contenders:
        raise ValueError(f"the name {PLAIN!r} is that of generate without a drafter: give the drafter another one")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"a temperature is 0 (greedy) or above, got {temperature}")
    contenders = {PLAIN: Contender(None), **contenders}
    batches = [padded_batch(prompts[first : first + batch_size]) for first in range(0, len(prompts), batch_size)]
    runs: dict[str, list[list[TimedRun]]] = {name: [[] for _ in batches] for name in contenders}
    with kept_random_state(target.device):
        for contender in contenders.values():
            timed_run(target, contender, batches[0], min(WARM_UP_TOKENS, max_new_tokens), temperature)
        for _ in range(repeats):
            for index, batch in enumerate(batches):
                for name, contender in contenders.items():
                    torch.manual_seed(seed + index)
                    runs[name][index].append(timed_run(target, contender, batch, max_new_tokens, temperature))
    return [summarise(name, runs[name], runs[PLAIN], is_sampled=temperature > 0) for name in contenders]


def kept_random_state(device: torch.device) -> AbstractContextManager:
    """A context whose end brings back the random state of the CPU and of `device`."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def padded_batch(prompts: list[torch.LongTensor]) -> dict[str, torch.LongTensor]:
    """Prompts of `(1, length)` as `input_ids` and `attention_mask` of `(batch, longest)`, padded on the left."""
    longest = max(prompt.shape[1] for prompt in prompts)

    def stacked(rows: list[torch.LongTensor]) -> torch.LongTensor:
        return torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])

    return {"input_ids": stacked(prompts), "attention_mask": stacked([torch.ones_like(prompt) for prompt in prompts])}


def timed_run(
    target: PreTrainedModel,
    contender: Contender,
    batch: dict[str, torch.LongTensor],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> TimedRun:
    """One `generate` call on a batch, see [`padded_batch`], by the clock; greedy at temperature 0."""
    # All that may cut the law short is switched off, also where the target's own settings have it.
    sampling = {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    law = sampling if temperature else {"do_sample": False}
    config = GenerationConfig(**law, max_new_tokens=max_new_tokens, **contender.settings)
    wait_for_device(target.device)
    started = time.perf_counter()
    output_ids = target.generate(**batch, assistant_model=contender.drafter, generation_config=config)
    wait_for_device(target.device)
    seconds = time.perf_counter() - started
    ends = end_of_text_ids(target)
    new_ids = tuple(
        token for row in output_ids[:, batch["input_ids"].shape[1] :].tolist() for token in without_padding(row, ends)
    )
    # Without a drafter every forward commits one token.
    drafter = contender.drafter
    tokens_per_round = [1] * len(new_ids) if drafter is None else drafter.last_stats.tokens_per_round
    return TimedRun(new_ids, tuple(tokens_per_round), seconds)


def end_of_text_ids(target: PreTrainedModel) -> set[int]:
    """The token ids that end a text of `target`."""
    ids = target.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def without_padding(row: list[int], ends: set[int]) -> list[int]:
    """A row of new tokens up to its end of text."""
    length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
    return row[:length]


def wait_for_device(device: torch.device) -> None:
    """Accelerators run behind the host: without waiting, the clock would measure how fast work is handed out."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
