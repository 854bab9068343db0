"""Which of the metrics that evaluations report may choose the best checkpoint."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..models.base import ParallelDrafter
from .losses.scoring import HIT

if TYPE_CHECKING:
    from .arguments import DraftTrainingArguments

PREFIX = "eval_"
# What every evaluation reports, and what it does besides if drafts are made. (What is reported by position is told below.)
LOSSES, TIMES = ("loss", "expected_tau"), ("runtime", "samples_per_second", "steps_per_second")
OF_DRAFTS = ("tau", "decoded_tokens_per_second")


def is_tau(metric: str | None) -> bool:
    """Whether a metric is a measured tau, `tau` or `eval_NAME_tau`, and not what accuracies let one expect."""
    return metric is not None and metric.split("_")[-1] == "tau" and not metric.endswith("expected_tau")


def check_best_metric(
    args: "DraftTrainingArguments",
    drafter: ParallelDrafter,
    objectives: Iterable[str],
    eval_sets: Any,
    drafts: bool,
) -> None:
    """Raise a `ValueError` for a `metric_for_best_model` that no evaluation reports: the first one would end the run.

    Args:
        args: of the run.
        drafter: that is trained.
        objectives: that it learns from.
        eval_sets: the evaluation set, or a dictionary of several.
        drafts: whether evaluations draft, too.
    """
    metric = args.metric_for_best_model
    if metric is None:
        return
    name, sets = metric.removeprefix(PREFIX), [*eval_sets] if isinstance(eval_sets, dict) else []
    if sets:
        own = next((each for each in sorted(sets, key=len, reverse=True) if name.startswith(f"{each}_")), None)
        if own is None:
            names = ", ".join(f"{PREFIX}{each}_{name}" for each in sets)
            raise ValueError(
                f"each of several evaluation sets has metrics of its own, got metric_for_best_model={metric!r}: choose one of "
                f"{names}"
            )
        name = name.removeprefix(f"{own}_")
    objectives, depth = [*objectives], drafter.taught_depth(args.draft_tokens)
    known = [*LOSSES, *(objectives if len(objectives) > 1 else []), *(OF_DRAFTS if drafts else []), *TIMES]
    by_position = ["accuracy", f"hit{HIT}", *(["acceptance"] if drafts else [])]
    position = re.fullmatch(rf"({'|'.join(by_position)})_(\d+)", name)
    if name in known or (position and 1 <= int(position[2]) <= depth):
        return
    ranges = [f"{each}_1 to {each}_{depth}" for each in by_position]
    raise ValueError(
        f"metric_for_best_model={metric!r} is nothing that evaluations of this run report: choose one of "
        f"{', '.join([*known, *ranges])}"
    )
