"""What smollm2.py measured, as tables: one for each paper's headline, and the tables of docs/smollm2.md."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from hf_pardraft.demo.family import DRAFTER_NAMES
from hf_pardraft.evaluation.report import NOTHING, markdown_table
from smollm2_cases import BENCHMARKS, SHAPES

PAGE = Path(__file__).parent.parent / "docs" / "smollm2.md"
BEGIN, END = "<!-- tables: python benchmarks/smollm2.py --page -->", "<!-- end of the tables -->"
SOURCE = "[All figures](../benchmarks/results/smollm2.json), which `python benchmarks/smollm2.py --page` makes these tables of."
TITLES = {name: title for name, (title, _) in BENCHMARKS.items()}
# Of PARD's headline (2504.18583, table 1), and of DFlare's (2606.02091, table 1).
PARD_BENCHMARKS = ("humaneval", "gsm8k", "spec_bench")
DFLARE_BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
CONDITION = ("dtype", "temperature", "batch_size", "tree_budget")

Row = dict[str, Any]
Cell = dict[str, Any]


def cells_of(result: dict[str, Any], measured: str, **condition: Any) -> dict[str, Cell]:
    """The cells of a condition, by benchmark, in the order of the tables."""
    found = {
        cell["benchmark"]: cell
        for cell in result["cells"]
        if cell["measured"] == measured and all(cell[key] == value for key, value in condition.items())
    }
    return {name: found[name] for name in BENCHMARKS if name in found}


def conditions_of(result: dict[str, Any], measured: str) -> list[dict[str, Any]]:
    """Each dtype, temperature and batch size that has cells."""
    found = [{key: cell[key] for key in CONDITION} for cell in result["cells"] if cell["measured"] == measured]
    return [condition for index, condition in enumerate(found) if condition not in found[:index]]


def title_of(condition: dict[str, Any]) -> str:
    return (
        f"{condition['dtype']}, temperature {condition['temperature']:g}, batch {condition['batch_size']}, "
        f"trees of {condition['tree_budget']}"
    )


def rows_named(cells: dict[str, Cell]) -> dict[str, dict[str, Row]]:
    """The rows of each way, by benchmark; ways in the order of the drafters, uncompiled ones first."""
    rows = {row["name"]: row for cell in cells.values() for row in cell["rows"]}
    kinds = [*DRAFTER_NAMES.values()]

    def place(row: Row) -> tuple:
        drafter = row["drafter"]
        known = kinds.index(drafter) if drafter in kinds else len(kinds)
        return row["way"] != "plain", drafter is not None, known, drafter, row["compiled"]

    return {
        row["name"]: {
            benchmark: next((own for own in cell["rows"] if own["name"] == row["name"]), None)
            for benchmark, cell in cells.items()
        }
        for row in sorted(rows.values(), key=place)
    }


def best_plain(cell: Cell) -> Row:
    """The faster one of plain `generate` uncompiled and compiled."""
    return max((row for row in cell["rows"] if row["way"] == "plain"), key=lambda row: row["over_eager_plain"])


def speedup(cell: Cell, row: Row) -> float:
    """Over plain `generate` in its faster form, on the same texts."""
    return row["over_eager_plain"] / best_plain(cell)["over_eager_plain"]


def speedups(cells: dict[str, Cell], rows: dict[str, Row | None]) -> list[float | None]:
    return [row and speedup(cells[name], row) for name, row in rows.items()]


def figures(rows: dict[str, Row | None], name: str) -> list[float | None]:
    return [row and row[name] for row in rows.values()]


def average(values: Iterable[float | None]) -> float | None:
    """The mean over benchmarks; of a way that was not measured on all of them there is none."""
    values = list(values)
    return None if None in values or not values else mean(values)


def number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def with_average(values: list[float | None], shown: Callable[[float | None], str] = number) -> list[str]:
    return [shown(value) for value in (*values, average(values))]


def same_texts(rows: dict[str, Row | None]) -> str:
    """How many texts are plain's, and how many of the others part from it at a near tie."""
    known = [row for row in rows.values() if row]
    texts, different = (sum(row[name] for row in known) for name in ("texts", "different"))
    ties = sum(row["near_ties"] or 0 for row in known)
    same = f"{texts - different} of {texts}"
    return f"{same}, {ties} near ties" if ties else same


def tau_table(cells: dict[str, Cell]) -> str:
    """tau by benchmark, as left-to-right losses are shown (2606.11552, table 2), chains and trees."""
    lines = [[name, *with_average(figures(rows, "tau")), same_texts(rows)] for name, rows in rows_named(cells).items()]
    return markdown_table(["tau", *(TITLES[name] for name in cells), "mean", "text is plain's"], lines)


def speed_table(cells: dict[str, Cell]) -> str:
    """Speedup by benchmark, and the means of speedup and tau, as DART's headline (2601.19278, table 1)."""
    lines = [
        [
            name,
            *with_average(speedups(cells, rows), times),
            number(average(figures(rows, "tau"))),
            same_texts(rows),
        ]
        for name, rows in rows_named(cells).items()
    ]
    headings = ["over the best plain way", *(TITLES[name] for name in cells), "mean", "mean tau", "text is plain's"]
    return markdown_table(headings, lines)


def best_ways(cells: dict[str, Cell]) -> dict[str, str]:
    """The fastest way of each drafter, over all benchmarks, by the drafter's name."""
    means: dict[str, dict[str, float]] = {}
    for name, rows in rows_named(cells).items():
        value, (first, *_) = average(speedups(cells, rows)), [row for row in rows.values() if row]
        if value is not None and first["drafter"] and first["way"] != "stock_dflash":
            means.setdefault(first["drafter"], {})[name] = value
    return {drafter: max(ways, key=ways.get) for drafter, ways in means.items()}


def pard_table(cells: dict[str, Cell]) -> str:
    """Tokens a second and speedup, as PARD's headline (2504.18583, table 1): each drafter in its fastest way."""
    chosen = {name: cells[name] for name in PARD_BENCHMARKS if name in cells}
    named = rows_named(chosen)
    lines = [pair_line("best plain way", chosen, {name: best_plain(cell) for name, cell in chosen.items()})]
    for name in ("prompt lookup", *best_ways(cells).values()):
        if name in named:
            lines.append(pair_line(name, chosen, named[name]))
    headings = [f"{TITLES[name]}: {what}" for name in chosen for what in ("tokens/s", "speedup")]
    return markdown_table(["", *headings, "average: tokens/s", "speedup"], lines)


def pair_line(name: str, cells: dict[str, Cell], rows: dict[str, Row | None]) -> list[str]:
    per_second, ratios = figures(rows, "tokens_per_second"), speedups(cells, rows)
    per_second, ratios = [*per_second, average(per_second)], [*ratios, average(ratios)]
    pairs = zip(per_second, ratios, strict=True)
    return [name, *(text for tokens, ratio in pairs for text in (number(tokens), number(ratio)))]


def dflare_table(result: dict[str, Any], dtype: str) -> str:
    """Speedup and tau by benchmark, greedy and sampled, as DFlare's headline (2606.02091, table 1)."""
    lines = []
    for temperature in (0.0, 1.0):
        of_it = cells_of(result, "speed", dtype=dtype, temperature=temperature, batch_size=1)
        cells = {name: of_it[name] for name in DFLARE_BENCHMARKS if name in of_it}
        named = rows_named(cells)
        for way in best_ways(cells).values():
            ratios, taus = speedups(cells, named[way]), figures(named[way], "tau")
            shown = dict(zip(cells, zip(ratios, taus, strict=True), strict=True))
            pairs = [*(shown.get(name, (None, None)) for name in DFLARE_BENCHMARKS), (average(ratios), average(taus))]
            lines.append([f"{temperature:g}", way, *(f"{times(ratio)} ({number(tau)})" for ratio, tau in pairs)])
    titles = [TITLES[name] for name in DFLARE_BENCHMARKS]
    return markdown_table(["T", "speedup (tau)", *titles, "average"], lines, num_words=2) if lines else ""


def utilisation_table(cells: dict[str, Cell]) -> str:
    """What becomes of the slots of chains, as in 2606.11552, table 1."""
    lines = []
    for rows in rows_named(cells).values():
        for benchmark, row in rows.items():
            if row and row["way"] == "chain":
                shares = (f"{100 * row[name]:.1f}" for name in ("accept", "correct", "waste"))
                lines.append([row["drafter"], TITLES[benchmark], *shares])
    return markdown_table(["", "", "accept %", "correct %", "waste %"], lines, num_words=2) if lines else ""


def tree_table(result: dict[str, Any], dtype: str) -> str:
    """Chains beside trees, tokens a second and tau, means over the benchmarks, as in 2606.11552, table 7."""
    cells = cells_of(result, "speed", dtype=dtype, temperature=0.0, batch_size=1)
    named = rows_named(cells)
    lines = []
    for compiled in (False, True):
        for drafter in dict.fromkeys(row["drafter"] for rows in named.values() for row in rows.values() if row):
            line = []
            for shape in SHAPES:
                rows = named.get(f"{drafter}, {shape}{', compiled' if compiled else ''}", {})
                line += [number(average(figures(rows, name))) for name in ("tokens_per_second", "tau")]
            if drafter and {*line} != {NOTHING}:
                lines.append([f"{drafter}{', compiled' if compiled else ''}", *line])
    return markdown_table(["", "chain: tokens/s", "tau", "tree: tokens/s", "tau"], lines) if lines else ""


def position_table(cells: dict[str, Cell]) -> str:
    """Share of rounds that accepted each drafted token, the mean over the benchmarks."""
    found = {}
    for name, rows in rows_named(cells).items():
        known = [row["acceptance_by_position"] for row in rows.values() if row and row.get("acceptance_by_position")]
        if known:
            # Texts are short: a deep position may not have come up in one benchmark.
            deepest = min(map(len, known))
            found[name] = [mean(rates[place] for rates in known) for place in range(deepest)]
    deepest = max(map(len, found.values()), default=0)
    lines = [
        [name, *(f"{100 * rate:.0f}" for rate in rates), *[""] * (deepest - len(rates))]
        for name, rates in found.items()
    ]
    return markdown_table(["accepted, %", *map(str, range(1, deepest + 1))], lines) if lines else ""


def batch_table(result: dict[str, Any], dtype: str) -> str:
    """Speedup by batch size, each over plain `generate` in batches of that size, as in 2504.18583, table 5."""
    sizes = sorted(
        {c["batch_size"] for c in conditions_of(result, "speed") if c["dtype"] == dtype and c["temperature"] == 0}
    )
    if len(sizes) < 2:
        return ""
    by_size = {size: cells_of(result, "speed", dtype=dtype, temperature=0.0, batch_size=size) for size in sizes}
    # Only benchmarks that were measured in all batch sizes can be compared.
    shared = [name for name in BENCHMARKS if all(name in cells for cells in by_size.values())]
    by_size = {size: {name: cells[name] for name in shared} for size, cells in by_size.items()}
    named = {size: rows_named(cells) for size, cells in by_size.items()}
    lines = []
    for way in named[sizes[-1]]:
        values = [average(speedups(by_size[size], named[size].get(way, {}))) for size in sizes]
        if None not in values:
            lines.append([way, *map(times, values)])
    title = ", ".join(TITLES[name] for name in shared)
    return markdown_table([f"mean speedup: {title}", *(f"batch {size}" for size in sizes)], lines) if lines else ""


def how_measured(cells: dict[str, Cell]) -> str:
    """Settings, machine and commands of some cells, in a sentence or two."""
    facts = [*cells.values()]
    settings = facts[0]["settings"]
    prompts = sum(len(cell["prompt_tokens"]) for cell in facts)
    commands = "\n".join(dict.fromkeys(command for cell in facts for command in cell["commands"]))
    minutes = sum(cell["seconds"] for cell in facts) / 60
    versions = facts[0]["versions"]
    return (
        f"{prompts} prompts ({settings['limit']} of each benchmark), up to {settings['max_new_tokens']} new tokens; "
        f"{facts[0]['machine']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {facts[0]['date'][:10]}; measuring took {minutes:.0f} minutes:\n\n```text\n{commands}\n```"
    )


def tables_of(result: dict[str, Any]) -> str:
    """All tables that there are figures for, in Markdown."""
    parts = []
    for condition in conditions_of(result, "tau"):
        cells = cells_of(result, "tau", **condition)
        parts += [f"## tau: {title_of(condition)}", how_measured(cells), tau_table(cells), position_table(cells)]
        parts.append(utilisation_table(cells))
    for condition in conditions_of(result, "speed"):
        cells = cells_of(result, "speed", **condition)
        parts += [f"## Speed: {title_of(condition)}", how_measured(cells), plain_line(cells), speed_table(cells)]
        if condition["batch_size"] == 1 and any(name in cells for name in PARD_BENCHMARKS):
            parts.append(pard_table(cells))
    dtypes = dict.fromkeys(condition["dtype"] for condition in conditions_of(result, "speed"))
    for heading, table in (
        ("Greedy and sampled", dflare_table),
        ("Chains and trees", tree_table),
        ("Batches", batch_table),
    ):
        for dtype in dtypes:
            text = table(result, dtype)
            parts += [f"## {heading}: {dtype}", text] if text else []
    return "\n\n".join(part for part in parts if part)


def plain_line(cells: dict[str, Cell]) -> str:
    """How fast the best plain way is."""
    said = (
        f"{TITLES[name]} {best_plain(cell)['tokens_per_second']:.1f}{' (compiled)' if best_plain(cell)['compiled'] else ''}"
        for name, cell in cells.items()
    )
    return f"Tokens a second of plain `generate` in its faster form: {', '.join(said)}."


def renewed(page: str, result: dict[str, Any]) -> str:
    """A page with the tables between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [BEGIN, SOURCE, tables_of(result), END] if result["cells"] else [BEGIN, END]
    return before + "\n\n".join(parts) + after
