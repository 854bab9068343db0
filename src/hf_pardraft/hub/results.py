"""Measured results as `pardraft eval` writes them: read, checked, and narrowed down to one drafter's rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.config_checks import is_number
from ..user_input.files import read_json
from ..user_input.wording import counted

# The same in evaluation/entries.py.
PLAIN = "plain"
ROW_KEYS = ("name", "speedup", "tau")
FACT_KEYS = ("machine", "command", "date")
# What tells rows of one name apart, where it differs from row to row.
CONDITIONS = {"batch_size": "batch size {}", "temperature": "temperature {:g}"}
# Figures of no trained pair.
SIMULATION_KEYS = ("simulated", "simulation", "random_weights")


@dataclass(frozen=True)
class MeasuredRow:
    """One contender's figures.

    Attributes:
        name: "plain" for `generate` without a drafter.
        tokens_per_second: new tokens over wall-clock seconds; `None` if not recorded.
        speedup: over plain `generate`, measured beside it.
        tau: mean tokens that a forward of the target commits.
        conditions: such as "batch size 8", where the file tells rows apart by them.
    """

    name: str
    tokens_per_second: float | None
    speedup: float
    tau: float
    conditions: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return ", ".join([self.name, *self.conditions])


@dataclass(frozen=True)
class Results:
    """Rows, and how they came about; `prompts` names the text that was continued."""

    rows: tuple[MeasuredRow, ...]
    machine: str
    command: str
    date: str
    prompts: str = "not named"


def read_results(path: str | Path) -> Results:
    """Read a results file: JSON with `rows`, `machine`, `command` and `date`, and maybe `prompts`; other keys are ignored.

    A row has `name`, `speedup`, `tau` and `tokens_per_second`, and maybe `batch_size` and `temperature`.

    Raises:
        ValueError: if it is no such file, a figure is missing or no number, or it holds a simulation.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ValueError(
            f"{path} holds no results: expected an object with rows, {', '.join(FACT_KEYS)}. Pass what pardraft eval wrote"
        )
    missing = [key for key in FACT_KEYS if not isinstance(content.get(key), str) or not content[key].strip()]
    if missing:
        raise ValueError(
            f"{path} does not say how its figures came about: {', '.join(missing)} missing. A figure without its machine, "
            "command and date can't be published: add them as strings at the top level"
        )
    simulated = [key for key in SIMULATION_KEYS for part in (content, *content["rows"]) if is_set(part, key)]
    if simulated:
        raise ValueError(
            f"{path} holds a simulation ({simulated[0]}), which says nothing about a drafter: a card takes measured results only"
        )
    varied = [
        key for key in CONDITIONS if len({repr(row.get(key)) for row in content["rows"] if isinstance(row, dict)}) > 1
    ]
    rows = tuple(read_row(row, path, varied) for row in content["rows"])
    facts = {key: content[key].strip() for key in FACT_KEYS}
    return Results(rows, **facts, prompts=prompts_text(content.get("prompts")))


def prompts_text(prompts: Any) -> str:
    """What the text was called that was continued: a name, or an object with `name` and `count`."""
    if isinstance(prompts, dict) and prompts.get("name"):
        count = prompts.get("count")
        return f"{prompts['name']} ({counted(count, 'prompt')})" if count else str(prompts["name"])
    return prompts if isinstance(prompts, str) and prompts else "not named"


def is_set(part: Any, key: str) -> bool:
    return isinstance(part, dict) and bool(part.get(key))


def read_row(row: Any, path: str | Path, varied: list[str]) -> MeasuredRow:
    """One row of a results file, checked; `varied` are the [`CONDITIONS`] that differ from row to row."""
    missing = [key for key in ROW_KEYS if not isinstance(row, dict) or row.get(key) is None]
    if missing:
        raise ValueError(f"a row of {path} lacks {', '.join(missing)}: {row!r}. Pass what pardraft eval wrote")
    figures = {key: row[key] for key in ("speedup", "tau")}
    if row.get("tokens_per_second") is not None:
        figures["tokens_per_second"] = row["tokens_per_second"]
    wrong = [key for key in varied if row.get(key) is not None and not is_number(row[key])]
    if wrong:
        raise ValueError(
            f"row {row['name']!r} of {path} has {wrong[0]} {row[wrong[0]]!r}: expected a number. Pass what pardraft eval wrote"
        )
    for key, value in figures.items():
        if not is_number(value) or value <= 0:
            raise ValueError(
                f"row {row['name']!r} of {path} has {key} {value!r}: expected a positive number, measure again"
            )
    conditions = [CONDITIONS[key].format(row[key]) for key in varied if row.get(key) is not None]
    if row.get("identical") is False:
        # In half precision a near tie may fall the other way. Who reads the figures has to know.
        conditions.append("text not identical to plain's")
    return MeasuredRow(
        str(row["name"]), figures.get("tokens_per_second"), row["speedup"], row["tau"], tuple(conditions)
    )


def rows_of(results: Results, names: Iterable[str]) -> list[MeasuredRow]:
    """Plain `generate`'s rows and those of one drafter: rows that bear one of its names, with a setting after a comma or not.

    Raises:
        ValueError: if no row does.
    """
    wanted = {name.lower() for name in names}
    drafted = [row for row in results.rows if {row.name.lower(), row.name.split(",")[0].strip().lower()} & wanted]
    if not drafted:
        raise ValueError(
            f"none of the rows {', '.join(repr(row.name) for row in results.rows)} bears the name of this drafter "
            f"({', '.join(sorted(wanted))}): say which are its rows with --row"
        )
    return [row for row in results.rows if row.name == PLAIN or row in drafted]
