"""What a terminal shows of a training run: a line for each log, a small table for each evaluation. Reporters get everything."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

# What a line of training says, and how.
LINE = (
    ("loss", "loss {:.4f}"),
    ("expected_tau", "expected tau {:.2f}"),
    ("learning_rate", "learning rate {:.3g}"),
    ("train_loss", "mean loss {:.4f}"),
    ("train_runtime", "{:.0f} s"),
)
# What the first line of an evaluation says; of the first three also the change since the last one.
HEADING = (
    ("loss", "loss {:.4f}"),
    ("tau", "tau {:.3f}"),
    ("expected_tau", "expected tau {:.3f}"),
    ("decoded_tokens_per_second", "{:.1f} tokens/s with the drafter"),
)
COMPARED = ("loss", "tau", "expected_tau")
ROWS = (("accuracy", "right, %"), ("acceptance", "accepted, %"))
# Columns of a table are as wide as "100", and lines no wider than a narrow terminal.
PER_LINE = 16


def show_tables(trainer: Trainer) -> None:
    """Let a trainer's terminal show what this module says, rather than all that is logged; notebooks have tables of their own."""
    has_bar = trainer.pop_callback(ProgressCallback) is not None
    if has_bar:
        trainer.add_callback(Bar())
    if has_bar or trainer.pop_callback(PrinterCallback) is not None:
        trainer.add_callback(Tables())


class Bar(ProgressCallback):
    """The bars alone."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Told by [`Tables`]."""


class Tables(TrainerCallback):
    """Writes lines and tables, beside a bar or without one."""

    def __init__(self) -> None:
        # By the prefix of their names: there may be several evaluation sets.
        self.last: dict[str, dict[str, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        line = training_line(logs or {})
        if state.is_world_process_zero and line:
            write(f"step {state.global_step}/{state.max_steps}: {line}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        prefix = prefix_of(metrics)
        values = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if state.is_world_process_zero and values:
            write(
                f"{prefix.rstrip('_')} at step {state.global_step}: {evaluation_table(values, self.last.get(prefix))}"
            )
        self.last[prefix] = values


def write(text: str) -> None:
    tqdm.write(text, file=sys.stdout)


def training_line(logs: dict[str, float]) -> str:
    """What to say of a training log; nothing of other logs."""
    return ", ".join(form.format(logs[name]) for name, form in LINE if name in logs)


def prefix_of(metrics: dict[str, float]) -> str:
    """What all names of an evaluation begin with, `eval_` where there is one set; nothing if they have nothing in common."""
    return next((name.removesuffix("runtime") for name in metrics if name.endswith("_runtime")), "")


def evaluation_table(values: dict[str, float], before: dict[str, float] | None = None) -> str:
    """An evaluation for people.

    Args:
        values: its metrics, names without a prefix.
        before: those of the evaluation before.
    """
    facts = []
    for name, form in HEADING:
        if name in values:
            change = f" ({values[name] - before[name]:+.3f})" if name in COMPARED and name in (before or {}) else ""
            facts.append(form.format(values[name]) + change)
    return "\n".join([", ".join(facts), *position_lines(values)])


def position_lines(values: dict[str, float]) -> list[str]:
    """Percentages by draft position, some positions below each other where there are many."""
    shares = {label: shares_of(values, name) for name, label in ROWS}
    deepest = max(map(len, shares.values()))
    lines = []
    for start in range(0, deepest, PER_LINE):
        positions = range(start, min(start + PER_LINE, deepest))
        lines.append(row("position", [str(position + 1) for position in positions]))
        lines += [
            row(label, [f"{100 * of_label[position]:.0f}" for position in positions if position < len(of_label)])
            for label, of_label in shares.items()
            if len(of_label) > start
        ]
    return lines


def shares_of(values: dict[str, float], name: str) -> list[float]:
    """`name_1`, `name_2` and so on, as far as they go."""
    shares: list[float] = []
    while (share := values.get(f"{name}_{len(shares) + 1}")) is not None:
        shares.append(share)
    return shares


def row(label: str, cells: list[str]) -> str:
    return f"  {label:<12}" + "".join(f"{cell:>4}" for cell in cells)
