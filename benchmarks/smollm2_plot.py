"""The plot of what smollm2.py measured: speedup over plain `generate` by benchmark, each drafter in its best dtype and way."""

from pathlib import Path
from statistics import mean
from typing import Any

from hf_pardraft.evaluation.plots import COLOURS, check_matplotlib, legend_below
from smollm2_page import TITLES, best_ways, cells_of, conditions_of, figures, rows_named, speedups

BAR = 0.8


def bars_of(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Speedups by benchmark of each drafter, greedy and one text at a time; a label says dtype, way and mean tau."""
    best: dict[str, tuple[float, str, dict[str, float]]] = {}
    conditions = [
        each for each in conditions_of(result, "speed") if (each["temperature"], each["batch_size"]) == (0, 1)
    ]
    measured = [(condition, cells_of(result, "speed", **condition)) for condition in conditions]
    most = max((len(cells) for _, cells in measured), default=0)
    for condition, cells in measured:
        # The mean over fewer benchmarks is no measure beside that over all of them.
        if len(cells) < most:
            continue
        named = rows_named(cells)
        for drafter, way in best_ways(cells).items():
            values, tau = speedups(cells, named[way]), mean(figures(named[way], "tau"))
            label = f"{way}, {condition['dtype']} (mean {mean(values):.2f}x, tau {tau:.2f})"
            found = mean(values), label, dict(zip(cells, values, strict=True))
            best[drafter] = max(best.get(drafter, found), found, key=lambda each: each[0])
    return {label: values for _, label, values in best.values()}


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Draw it, in the format that the file's name ends in.

    Raises:
        ValueError: if no drafter was timed at temperature 0, one text at a time.
    """
    check_matplotlib()
    # Without pyplot, which would look for a screen.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = bars_of(result)
    if not bars:
        raise ValueError("nothing to draw: measure --speed at temperature 0 in batches of 1 first")
    names = [name for name in TITLES if any(name in values for values in bars.values())]
    # The same figures make the same file.
    with rc_context({"svg.hashsalt": "smollm2", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(1.0, color="grey", linewidth=1, linestyle="--", zorder=0)
        width = BAR / len(bars)
        for index, (label, values) in enumerate(bars.items()):
            left = index * width - BAR / 2 + width / 2
            places = [place + left for place, name in enumerate(names) if name in values]
            heights = [values[name] for name in names if name in values]
            drawn = axes.bar(places, heights, 0.92 * width, label=label, color=COLOURS[index % len(COLOURS)])
            axes.bar_label(drawn, fmt="{:.2f}", fontsize="xx-small", padding=1)
        axes.set_xticks(range(len(names)), [TITLES[name] for name in names])
        axes.set_ylabel("times plain generate in its faster form")
        axes.set_title(title_of(result), loc="left", fontsize="medium", fontweight="bold")
        legend_below(figure, 2)
        dated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=dated)


def title_of(result: dict[str, Any]) -> str:
    machines = dict.fromkeys(cell["machine"] for cell in result["cells"] if cell["measured"] == "speed")
    return f"{result['target']}: speedup over plain generate, greedy, {', '.join(machines)}"
