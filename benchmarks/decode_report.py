"""What decode.py measured, as tables and as plots of speedup by batch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_pardraft.evaluation.plots import check_matplotlib, speedup_figure
from hf_pardraft.evaluation.report import NOTHING, Report, markdown_table
from hf_pardraft.evaluation.rows import PARTS, EvaluationRow

Row = dict[str, Any]
# Heading, key, and how many digits after the point.
FIGURES = (
    ("tokens/s", "tokens_per_second", 1),
    ("x plain", "speedup", 2),
    ("x plain compiled", "speedup_over_compiled", 2),
    ("x eager", "speedup_over_eager", 2),
    ("tau", "tau", 2),
    ("round ms", "milliseconds_per_round", 2),
    ("draft forward", "draft_forward_ms", 2),
    ("verify forward", "verify_forward_ms", 2),
    ("efficiency", "efficiency", 3),
    ("weights ms", "bandwidth_ms", 2),
    ("of bandwidth", "bandwidth_efficiency", 3),
    ("compile s", "compile_seconds", 1),
)


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def line_of(row: Row, figures: Sequence[tuple[str, str, int]]) -> list[str]:
    """A row's figures; its name says whether they are simulated."""
    parts = row["milliseconds_by_part"]
    split = NOTHING if parts is None else " ".join(number(parts[part], 2) for part in PARTS)
    text = {True: "yes", False: "NO", None: NOTHING}[row["identical"]]
    name = f"SIMULATED {row['name']}" if row["acceptance"] else row["name"]
    return [name, *(number(row[key], digits) for _, key, digits in figures), split, text]


def table_of(run: dict[str, Any]) -> str:
    """Title, table, and where simulated figures come from, of one target and batch size."""
    title = f"{run['target']}, batch {run['batch_size']}, {run['dtype']}, {run['machine']}"
    if run["simulated"]:
        title = f"SIMULATED ACCEPTANCE, random weights, no measured quality: {title}"
    if run["not_measured"]:
        return f"{title}: not measured ({run['not_measured']})"
    shown = [figure for figure in FIGURES if any(row[figure[1]] is not None for row in run["rows"])]
    headings = ["", *(heading for heading, _, _ in shown), f"{' / '.join(PARTS)} ms, watched", "same text"]
    lines = [title, markdown_table(headings, [line_of(row, shown) for row in run["rows"]])]
    notes = dict.fromkeys(row["acceptance"] for row in run["rows"] if row["acceptance"])
    papers = dict.fromkeys(row["paper"] for row in run["rows"] if row["paper"])
    return "\n".join([*lines, *notes, *(f"The paper's own figure: {paper}" for paper in papers)])


def print_runs(runs: list[dict[str, Any]]) -> None:
    print("\n\n".join(map(table_of, runs)))


def save_plots(runs: list[dict[str, Any]], output: Path) -> list[Path]:
    """Speedup of the chains over plain `generate` by batch size, a picture for each target with several; returns the files."""
    check_matplotlib()
    paths = []
    for target in dict.fromkeys(run["target"] for run in runs):
        chosen = [run for run in runs if run["target"] == target and run["rows"]]
        if len({run["batch_size"] for run in chosen}) < 2:
            continue
        rows = [evaluation_row(row) for run in chosen for row in run["rows"] if ", tree" not in row["name"]]
        figure = speedup_figure(Report({"simulated": chosen[0]["simulated"]}, rows))
        figure.axes[0].set_title(f"{target}, {chosen[0]['machine']}", loc="right", fontsize="small")
        paths.append(output.with_name(f"{output.stem}_{target}.png"))
        figure.savefig(paths[-1], dpi=150)
    return paths


def evaluation_row(row: Row) -> EvaluationRow:
    """The part of a row that an evaluation has, too."""
    return EvaluationRow(**{name: row[name] for name in EvaluationRow.__dataclass_fields__})
