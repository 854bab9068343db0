"""What schedule.py measured: one table, the bounds and what misses them, and one plot."""

from pathlib import Path
from statistics import median
from typing import Any

from hf_pardraft.evaluation.plots import COLOURS, check_matplotlib
from hf_pardraft.evaluation.report import NOTHING, markdown_table
from schedule_measure import AUTO, DEFAULT, FIRST

BOUND = 0.97
# Recorded ways.
ADAPTIVE, TUNED = "adaptive_depth", "tuned table"
HEADINGS = (
    *("", "T", "batch", "plain tokens/s", "own depth", "best fixed", "", "auto", "tau", "first call"),
    *("auto / best", "adaptive", "tuned", "same text"),
)
# What the plot shows, and with which marker.
MARKS = {DEFAULT: ("the drafter's own depth, fixed", "x"), "best": ("best fixed setting", "s")}
MARKS |= {ADAPTIVE: ("adaptive_depth (recorded)", "+"), TUNED: ("tuned table (recorded)", "1")}
MARKS |= {FIRST: ("auto, first call", "^"), AUTO: ("auto", "o")}

Condition = dict[str, Any]
Row = dict[str, Any]


def title_of(condition: Condition) -> str:
    return condition["case"] + (", compiled" if condition["compiled"] else "")


def row_named(condition: Condition, name: str) -> Row | None:
    return next((row for row in condition["rows"] if row["name"] == name), None)


def best_fixed(condition: Condition) -> Row:
    """The fastest of the fixed settings that took part to the end."""
    return max((row for row in condition["rows"] if row["is_fixed"]), key=lambda row: row["speedup"])


def share_of_best(condition: Condition) -> float:
    """The schedule's speed over that of the best fixed setting, the median of the turns' ratios.

    In each turn the best setting is the one that the other turns say. The fastest of several that are alike is mostly the one
    that was lucky, and its luck in a turn would count as speed if that turn had a say.
    """
    auto = row_named(condition, AUTO)["turn_speedups"]
    fixed = [row["turn_speedups"] for row in condition["rows"] if row["is_fixed"]]
    if len(auto) == 1:
        return auto[0] / max(speeds[0] for speeds in fixed)

    def of_turn(turn: int) -> float:
        best = max(fixed, key=lambda speeds: median(speeds[:turn] + speeds[turn + 1 :]))
        return auto[turn] / best[turn]

    return median(map(of_turn, range(len(auto))))


def speedup_of(condition: Condition, name: str) -> float | None:
    """Over plain `generate`; of a first call its first text alone."""
    row = best_fixed(condition) if name == "best" else row_named(condition, name)
    return row and row["first_speedup" if name == FIRST else "speedup"]


def recorded_speedup(condition: Condition, name: str) -> float | None:
    """Of what the package no longer has, over plain `generate` in the run that measured it."""
    recorded = condition["recorded"]
    return speedup_of(recorded, name) if recorded else None


def misses_of(condition: Condition) -> list[str]:
    """Which of the bounds a condition does not keep."""
    auto, share = speedup_of(condition, AUTO), share_of_best(condition)
    where = f"{title_of(condition)}, temperature {condition['temperature']:g}, batch {condition['batch_size']}"
    misses = []
    if auto < BOUND:
        misses.append(f"{where}: {auto:.3f} of plain generate")
    if condition["pays"] and share < BOUND:
        misses.append(f"{where}: {share:.3f} of the best fixed setting ({best_fixed(condition)['name']})")
    return misses


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def line_of(condition: Condition) -> list[str]:
    """A condition's figures."""
    best, auto = best_fixed(condition), row_named(condition, AUTO)
    tells = [row["same_text"] for row in condition["rows"]]
    return [
        title_of(condition),
        f"{condition['temperature']:g}",
        str(condition["batch_size"]),
        f"{condition['rows'][0]['tokens_per_second']:.0f}",
        number(speedup_of(condition, DEFAULT)),
        number(best["speedup"]),
        best["name"],
        number(auto["speedup"]),
        number(auto["tau"]),
        number(speedup_of(condition, FIRST)),
        number(share_of_best(condition)) if condition["pays"] else NOTHING,
        *(number(recorded_speedup(condition, name)) for name in (ADAPTIVE, TUNED)),
        "yes" if all(tells) else f"{sum(tells)} of {len(tells)}",
    ]


def table_by_batch(conditions: list[Condition]) -> str:
    """The table of docs/performance.md: a line for each case and temperature, and in it for each batch size three speedups."""
    sizes = sorted({condition["batch_size"] for condition in conditions})
    lines: dict[str, dict[int, str]] = {}
    for condition in conditions:
        name = f"{title_of(condition)}, T={condition['temperature']:g}"
        figures = (number(speedup_of(condition, way)) for way in ("best", AUTO, FIRST))
        lines.setdefault(name, {})[condition["batch_size"]] = " / ".join(figures)
    headings = ["best fixed / auto / first call", *(f"batch {size}" for size in sizes)]
    return markdown_table(
        headings, [[name, *(of_it.get(size, NOTHING) for size in sizes)] for name, of_it in lines.items()]
    )


def print_conditions(conditions: list[Condition]) -> None:
    """The table, how many conditions keep the bounds, and which do not."""
    print("Speed over plain generate, eager over eager, compiled over compiled:")
    print(table_by_batch(conditions))
    print(markdown_table(HEADINGS, [line_of(condition) for condition in conditions]))
    misses = [miss for condition in conditions for miss in misses_of(condition)]
    num_paying = sum(condition["pays"] for condition in conditions)
    print(
        f"Bounds: auto >= {BOUND} of plain generate in {len(conditions)} conditions, and of the best fixed setting in "
        f"{num_paying}. Missed: {len(misses)}"
    )
    for miss in misses:
        print(f"  {miss}")


def save_plot(conditions: list[Condition], path: Path) -> Path:
    """Speed over plain `generate` of every condition, a line each; returns the file."""
    check_matplotlib()
    # Without pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.6 + 0.17 * len(conditions)), layout="constrained")
    axes = figure.subplots()
    places = range(len(conditions))
    for colour, (name, (label, marker)) in zip(COLOURS, MARKS.items(), strict=False):
        figure_of = recorded_speedup if name in (ADAPTIVE, TUNED) else speedup_of
        speeds = [figure_of(condition, name) for condition in conditions]
        known = [(speed, place) for speed, place in zip(speeds, places, strict=True) if speed is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color=colour, label=label, markersize=5)
    axes.axvline(BOUND, color="#B00000", linewidth=0.8, label=f"{BOUND} of plain generate")
    axes.set_xscale("log")
    ticks = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    labels = [f"{title_of(each)}, T={each['temperature']:g}, batch {each['batch_size']}" for each in conditions]
    axes.set_yticks(places, labels, fontsize="x-small")
    axes.set_ylim(len(conditions) - 0.5, -0.5)
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    machines = dict.fromkeys(condition["machine"] for condition in conditions)
    axes.set_xlabel(f"speed over plain generate ({'; '.join(machines)})", fontsize="small")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=150)
    return path
