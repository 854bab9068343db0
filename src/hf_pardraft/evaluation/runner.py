"""All conditions one after the other, into a report that is whole after each of them."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from .differences import weigh
from .entries import Entry
from .measurement import Around, Condition, Measured, measure
from .report import Report
from .rows import EvaluationRow, summarise

# A drafter that writes another text everywhere needs no more proof than this.
MOST_WEIGHED = 20


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
        fitting = [entry for entry in entries if condition.batch_size == 1 or not entry.one_row_only]
        yield (
            f"Measuring {len(fitting)} entries on {len(prompts)} prompts, {condition.batch_size} at once, temperature "
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
            report.rows += [weighed(target, prompts, each, measured[0], condition) for each in measured]
    yield "Done."


def skipped(entry: Entry, condition: Condition, reason: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "batch_size": condition.batch_size,
        "temperature": condition.temperature,
        "reason": reason,
    }


def weighed(
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
        weigh(target, prompts[difference.prompt], texts[difference.prompt], difference)
        if count < MOST_WEIGHED
        else difference
        for count, difference in enumerate(row.differences)
    ]
    return replace(row, differences=differences)
