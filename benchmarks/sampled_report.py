"""What sampled_text.py measured, as rows, tables, and a plot of speed by temperature."""

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from hf_pardraft.evaluation.entries import PLAIN
from hf_pardraft.evaluation.plots import check_matplotlib, legend_below, look
from hf_pardraft.evaluation.report import markdown_table

Row = dict[str, Any]


def rows_of(source: str, temperature: float, repeats: list[list[dict[str, Any]]]) -> list[Row]:
    """A row for each way of a drafter: medians over the repeats, each beside plain `generate` in the same repeat."""
    turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for repeat in repeats:
        for turn in repeat:
            turns[turn["name"]].append(turn)
            speeds[turn["name"]].append(turn["tokens"] / turn["seconds"])
    rows = []
    del turns[PLAIN]
    for name, own in turns.items():
        ratios = [speed / base for speed, base in zip(speeds[name], speeds[PLAIN], strict=True)]
        tokens = sum(turn["tokens"] for turn in own)
        rows.append(
            {
                "source": source,
                "temperature": temperature,
                "name": name,
                "tau": round(tokens / sum(turn["rounds"] for turn in own), 3),
                "tokens_per_second": round(median(speeds[name]), 1),
                "plain_tokens_per_second": round(median(speeds[PLAIN]), 1),
                "speedup": round(median(ratios), 3),
                "speedup_least": round(min(ratios), 3),
                "speedup_most": round(max(ratios), 3),
                "repeats": len(own),
                "tokens": tokens,
                "same_texts": sum(turn["same_texts"] for turn in own),
            }
        )
    return rows


def speed_table(rows: list[Row]) -> str:
    """A line for each way, with tau and speedup at each temperature, before and now beside each other."""
    columns = list(dict.fromkeys((row["temperature"], row["source"]) for row in rows))
    columns.sort(key=lambda column: column[0])
    figures = {(row["name"], row["temperature"], row["source"]): row for row in rows}
    headings = [""]
    for temperature, source in columns:
        headings += [f"T={temperature:g} {source}: tau", "x plain"]
    lines = []
    for name in sorted({row["name"] for row in rows}):
        line = [name]
        for temperature, source in columns:
            row = figures.get((name, temperature, source))
            line += ["-", "-"] if row is None else [f"{row['tau']:.2f}", f"{row['speedup']:.2f}"]
        lines.append(line)
    return markdown_table(headings, lines)


def difference_summary(run: dict[str, Any]) -> Row:
    """How many tokens were the same, and how many texts parted from plain `generate`'s."""
    seeds = run["seeds"]
    tokens = sum(seed["tokens"] for seed in seeds)
    differences = sum(len(seed["first_differences"]) for seed in seeds)
    return {
        **{key: run[key] for key in ("dtype", "temperature", "batch_size")},
        "seeds": len(seeds),
        "texts": len(seeds) * run["batch_size"],
        "tokens": tokens,
        "texts_that_differ": differences,
        "tokens_per_difference": round(tokens / differences) if differences else None,
        "seeds_whose_generator_stands_elsewhere": sum(not seed["same_state"] for seed in seeds),
    }


def difference_table(summaries: list[Row]) -> str:
    headings = ["dtype", "T", "batch", "texts", "tokens", "texts that differ", "tokens per difference"]
    lines = [
        [
            summary["dtype"],
            f"{summary['temperature']:g}",
            str(summary["batch_size"]),
            str(summary["texts"]),
            str(summary["tokens"]),
            str(summary["texts_that_differ"]),
            str(summary["tokens_per_difference"] or "-"),
        ]
        for summary in summaries
    ]
    return markdown_table(headings, lines)


def save_plot(rows: list[Row], path: Path) -> None:
    """Speedup over plain `generate` by temperature: a picture for each way of proposing, a line for each drafter and source."""
    check_matplotlib()
    # Without pyplot, which would look for a screen.
    from matplotlib.figure import Figure

    names = sorted({row["name"] for row in rows})
    kinds = sorted({name.split(", ")[0] for name in names})
    ways = [way for way in ("chain", "tree", "rejection") if any(name.endswith(way) for name in names)]
    figure = Figure(figsize=(4.0 * len(ways), 4.4), layout="constrained")
    sources = sorted({row["source"] for row in rows})
    for axes, way in zip(figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(1.0, color="grey", linewidth=1)
        for index, kind in enumerate(kinds):
            for source in sources:
                line = [row for row in rows if row["name"] == f"{kind}, {way}" and row["source"] == source]
                line.sort(key=lambda row: row["temperature"])
                style = {"linestyle": ":", "alpha": 0.7} if source == "before" else {}
                label = f"{kind}, {source}" if way == ways[0] else None
                points = [row["temperature"] for row in line], [row["speedup"] for row in line]
                axes.plot(*points, label=label, **look(index), **style)
        axes.set(xlabel="temperature", title=way, ylim=(0, None))
    figure.axes[0].set_ylabel("speedup over plain generate")
    legend_below(figure, len(kinds))
    figure.savefig(path, dpi=150)
