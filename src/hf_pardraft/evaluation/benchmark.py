"""Run plain `generate` and several drafters side by side on the same prompts, and time them fairly."""

import time

import torch
from transformers import PreTrainedModel

from ..models.drafting import ParallelDrafter
from .metrics import ComparisonRow, TimedRun, summarise

PLAIN = "plain"
WARM_UP_TOKENS = 8


def compare(
    target: PreTrainedModel,
    drafters: dict[str, ParallelDrafter],
    prompts: list[torch.LongTensor],
    max_new_tokens: int,
    repeats: int = 3,
) -> list[ComparisonRow]:
    """Decode every prompt greedily with plain `generate` and with each drafter.

    Every contender is warmed up first. The contenders then take turns on each prompt, so that a machine that slows down
    slows all of them down, and each prompt counts with its fastest repeat.

    Args:
        target: the model whose text it is.
        drafters: contenders, by the name that their row shall bear.
        prompts: token ids, each `(1, length)`, on the target's device.
        max_new_tokens: tokens to write per prompt; fewer if the target ends its text.
        repeats: how often each contender does each prompt.

    Returns:
        One row per contender, plain `generate` first.

    Raises:
        ValueError: if there is no prompt, or no repeat, or a drafter bears the name of plain `generate`.
    """
    if not prompts or repeats < 1:
        raise ValueError(f"a comparison needs at least one prompt and one repeat, got {len(prompts)} and {repeats}")
    if PLAIN in drafters:
        raise ValueError(f"the name {PLAIN!r} is that of generate without a drafter: give the drafter another one")
    contenders: dict[str, ParallelDrafter | None] = {PLAIN: None, **drafters}
    for drafter in contenders.values():
        timed_run(target, drafter, prompts[0], min(WARM_UP_TOKENS, max_new_tokens))
    runs: dict[str, list[list[TimedRun]]] = {name: [[] for _ in prompts] for name in contenders}
    for _ in range(repeats):
        for index, prompt in enumerate(prompts):
            for name, drafter in contenders.items():
                runs[name][index].append(timed_run(target, drafter, prompt, max_new_tokens))
    return [summarise(name, runs[name], runs[PLAIN]) for name in contenders]


def timed_run(
    target: PreTrainedModel, drafter: ParallelDrafter | None, prompt: torch.LongTensor, max_new_tokens: int
) -> TimedRun:
    """One greedy `generate` call on a prompt of `(1, length)`, by the clock."""
    wait_for_device(target.device)
    started = time.perf_counter()
    output_ids = target.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    wait_for_device(target.device)
    seconds = time.perf_counter() - started
    new_ids = tuple(output_ids[0, prompt.shape[1] :].tolist())
    # Without a drafter every forward commits one token.
    tokens_per_round = [1] * len(new_ids) if drafter is None else drafter.last_stats.tokens_per_round
    return TimedRun(new_ids, tuple(tokens_per_round), seconds)


def wait_for_device(device: torch.device) -> None:
    """Accelerators run behind the host: without waiting, the clock would measure how fast work is handed out."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
