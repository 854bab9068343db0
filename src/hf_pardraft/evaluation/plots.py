"""An evaluation as pictures: acceptance by position, speedup by batch size, time per round. Needs matplotlib."""

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

from .entries import PLAIN
from .report import Report, named
from .rows import PARTS, EvaluationRow

# Told apart by people who see colours differently, too (Okabe and Ito), and by their markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Fewer than colours, so that no pair of the two comes twice for long.
MARKERS = "osD^v"
WIDTH = 7.0
# Characters of a name in a line, beneath the axes and beside a bar: repositories have long ones.
LEGEND_LINE, BAR_LINE = 80, 40


def check_matplotlib() -> None:
    """Raise an `ImportError` that helps if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('plots need matplotlib: pip install "hf-pardraft[plots]", or leave out --plots')


def save_plots(report: Report, folder: Path) -> list[Path]:
    """Draw what there is to draw, as PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "acceptance_by_position.png": acceptance_figure(report),
        "speedup_by_batch_size.png": speedup_figure(report),
        "time_per_round.png": time_figure(report),
    }
    paths = []
    for name, figure in drawings.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=150)
            paths.append(folder / name)
    return paths


def height_for(names: list[str]) -> float:
    """Inches for the axes and a legend of these names, in lines."""
    return 4.0 + 0.2 * num_lines(names)


def in_lines(name: str, width: int) -> str:
    """A name in lines of so many characters; nothing of it is a formula."""
    return textwrap.fill(name, width).replace("$", r"\$")


def num_lines(names: list[str]) -> int:
    return sum(name.count("\n") + 1 for name in names)


def new_figure(report: Report, height: float) -> tuple[Any, Any]:
    """A figure and its axes. A simulation says so above them."""
    # Without pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    if report.facts["simulated"]:
        axes.set_title("SIMULATED ACCEPTANCE", loc="left", color="#B00000", fontweight="bold")
    return figure, axes


def legend_below(figure: Any, columns: int = 1) -> None:
    """The legend where it hides nothing; names of repositories are too long to stand beside each other."""
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False)


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the line of that number."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}


def acceptance_figure(report: Report) -> Any | None:
    """How far drafts get, in the smallest batches: a line per row; dotted, what was right, accepted or not."""
    smallest = min((row.batch_size for row in report.rows), default=1)
    rows = [row for row in report.rows if row.acceptance_by_position and row.batch_size == smallest]
    if not rows:
        return None
    names = [in_lines(named(row, rows), LEGEND_LINE) for row in rows]
    figure, axes = new_figure(report, height_for(names))
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        positions = range(1, len(row.acceptance_by_position) + 1)
        axes.plot(positions, row.acceptance_by_position, label=name, **look(index))
        known = row.correct_by_position or []
        axes.plot(range(1, len(known) + 1), known, linestyle=":", linewidth=1, color=COLOURS[index % len(COLOURS)])
    axes.set(xlabel="draft position", ylabel="share of rounds: accepted, correct (dotted)", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_below(figure)
    return figure


def speedup_figure(report: Report) -> Any | None:
    """How much sooner the text is there: a line per entry and temperature over the batch sizes."""
    rows = [row for row in report.rows if row.name != PLAIN]
    if not rows:
        return None
    temperatures = sorted({row.temperature for row in rows})
    lines: dict[str, list[EvaluationRow]] = {}
    for row in rows:
        suffix = f", temperature {row.temperature:g}" if len(temperatures) > 1 else ""
        lines.setdefault(in_lines(row.name + suffix, LEGEND_LINE), []).append(row)
    figure, axes = new_figure(report, height_for([*lines]))
    for index, (name, line) in enumerate(lines.items()):
        line = sorted(line, key=lambda row: row.batch_size)
        axes.plot([row.batch_size for row in line], [row.speedup for row in line], label=name, **look(index))
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    sizes = sorted({row.batch_size for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[str(size) for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel="speedup over plain generate")
    axes.set_ylim(bottom=0)
    legend_below(figure)
    return figure


def time_figure(report: Report) -> Any | None:
    """What a round's time goes to: a bar per row."""
    rows = [row for row in report.rows if row.milliseconds_by_part]
    if not rows:
        return None
    names = [in_lines(named(row, report.rows), BAR_LINE) for row in rows]
    figure, axes = new_figure(report, 1.6 + 0.25 * len(rows) + 0.15 * num_lines(names))
    left = [0.0] * len(rows)
    for index, part in enumerate(PARTS):
        values = [row.milliseconds_by_part[part] for row in rows]
        axes.barh(range(len(rows)), values, left=left, label=part, color=COLOURS[index])
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), labels=names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round")
    legend_below(figure, len(PARTS))
    return figure
