"""All conditions one after the other, into a report that is whole after each of them."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..user_input.wording import counted
from .calls import Condition
from .entries import Entry
from .measurement import Around, Measured, measure
from .report import Report
from .rows import Difference, EvaluationRow, summarise

# A drafter that writes another text everywhere needs no more proof than this.
MOST_JUDGED = 20
# Rounding errors of a logit, in units of its last place, that forwards of different shapes differ by.
TIE_ROUNDINGS = 4


def evaluate_conditions(
    target: PreTrainedModel,
    entries: list[Entry],
    prompts: list[torch.LongTensor],
    conditions: list[Condition],
    report: Report,
    around: Around = lambda entry: nullcontext(),
) -> Iterator[str]:
    """Measure every entry under every condition, and add to `report`.

    Args:
        target, entries, prompts, around: see [`measure`].
        conditions: of which each is measured for itself.
        report: gets the rows, and what had to be skipped.

    Yields:
        What is being measured, before it is, and a last line when all is done. The report is whole each time.
    """
    for condition in conditions:
        fitting = [entry for entry in entries if condition.batch_size == 1 or not entry.one_at_a_time]
        yield (
            f"Measuring {len(fitting)} entries on {counted(len(prompts), 'prompt')}, {condition.batch_size} at once, temperature "
            f"{condition.temperature:g} ..."
        )
        left_out = [entry for entry in entries if entry not in fitting]
        report.skipped += [
            skipped(entry, condition, "transformers' loop takes one text at a time") for entry in left_out
        ]
        if len(fitting) < 2:
            continue
        try:
            measured = measure(target, fitting, prompts, condition, around)
        except torch.OutOfMemoryError:
            report.skipped += [skipped(entry, condition, "out of memory") for entry in fitting]
            continue
        with around(fitting[0]):
            report.rows += [judged_row(target, prompts, each, measured[0], condition) for each in measured]
    yield "Done."


def skipped(entry: Entry, condition: Condition, reason: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "batch_size": condition.batch_size,
        "temperature": condition.temperature,
        "reason": reason,
    }


def judged_row(
    target: PreTrainedModel,
    prompts: list[torch.LongTensor],
    measured: Measured,
    plain: Measured,
    condition: Condition,
) -> EvaluationRow:
    """The row of an entry, its differences judged by the target."""
    row = summarise(measured, plain, condition)
    texts = [text for repeats in plain.runs for text in repeats[0].texts]
    differences = [
        judge_near_tie(target, prompts[difference.prompt], texts[difference.prompt], difference)
        if count < MOST_JUDGED
        else difference
        for count, difference in enumerate(row.differences)
    ]
    return replace(row, differences=differences)


@torch.no_grad()
def judge_near_tie(
    target: PreTrainedModel, prompt: torch.LongTensor, plain: Sequence[int], difference: Difference
) -> Difference:
    """Ask the target how far apart the two tokens are.

    Args:
        target: the model.
        prompt: `(1, length)`.
        plain: what plain `generate` added to it.
        difference: between that and another text.
    """
    if difference.plain_token is None or difference.token is None:
        return difference
    before = torch.tensor([plain[: difference.position]], dtype=prompt.dtype, device=prompt.device)
    text = torch.cat([prompt, before], dim=1).to(target.device)
    logits = target(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits[0, -1]
    expected, found = (float(logits[token]) for token in (difference.plain_token, difference.token))
    gap = expected - found
    return replace(difference, logit_gap=gap, near_tie=abs(gap) <= rounding(logits.dtype, max(expected, found)))


def rounding(dtype: torch.dtype, logit: float) -> float:
    """How far apart logits of this size may come out, just from being computed in another order."""
    return TIE_ROUNDINGS * torch.finfo(dtype).eps * max(1.0, abs(logit))
