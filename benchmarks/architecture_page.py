"""What the sweep of architectures came to: a table on the console, and a page of what is served and what is refused."""

import re
from collections import Counter, defaultdict
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_pardraft.evaluation.report import NOTHING, markdown_table

Row = dict[str, Any]
YES = "yes"
# What a target may be asked for: a heading, and what the labels of such cases have in common.
KINDS = (
    ("chains", lambda label: label.startswith("chain, batch 1")),
    ("trees", lambda label: label.startswith("tree, batch 1")),
    ("batches", lambda label: ", batch 3" in label),
    (
        "hidden states",
        lambda label: label.startswith("for_target") or ("chain, batch 1" in label and "dflash" in label),
    ),
)
INTRODUCTION = """# Targets that drafters work with

With a drafter, `generate` writes the same text as without. That holds as long as what a target's forward says of a position
depends on that position, the tokens before it and the cache, and on nothing else that the forward happens to read. Targets of
which this is known not to hold are refused, by a `ValueError` before any work starts; `generate` without `assistant_model` serves
them as ever.

This page is made from [architectures.json](../benchmarks/results/architectures.json), by `{command}`
(transformers {transformers}, torch {torch}, {date}): tiny random targets of the {num_types} model types that transformers
registers for causal language modelling, but for [some](#not-tried), in {num_variants} variants; greedy text in float32, token
for token, with a drafter that is right three times in four.

Columns: **chains** and **trees** (`tree_budget`) for one sequence, **batches** of ragged prompts, and drafters that read the
target's **hidden states** (DFlash, DFlare, DART; PARD reads token ids). Targets with recurrent layers draft chains where
trees are asked for.
"""
# What to do instead, at the end of a message.
ADVICE = re.compile(r"(: (call generate|draft chains|leave out|load the target)|\. (Call|Use) |; got a batch).*$")


def is_like(row: Row, label_is: Any) -> str | None:
    """Whether all cases of a kind wrote the same text; `None` if none of them was tried."""
    refused = [label for labels in row["refused"].values() for label in labels if label_is(label)]
    wrong = [fact["case"] for fact in row["differs"] if label_is(fact["case"])]
    wrong += [label for labels in row["crashed"].values() for label in labels if label_is(label)]
    same = [label for label in row["same"] if label_is(label)]
    if wrong:
        return "WRONG"
    return (YES if not refused else "partly" if same else "no") if same or refused else NOTHING


def columns_of(row: Row) -> list[str]:
    """What each of [`KINDS`] came to."""
    return [is_like(row, label_is) for _, label_is in KINDS]


def was_tried(row: Row) -> bool:
    return "not_built" not in row and "plain_fails" not in row


def is_wrong(row: Row) -> bool:
    return was_tried(row) and bool(row["differs"] or row["crashed"])


def is_whole(row: Row) -> bool:
    """Whether everything was served."""
    return was_tried(row) and not (row["differs"] or row["crashed"] or row["refused"])


def reasons_of(row: Row) -> str:
    """Why what was refused was; the advice at the end of a message left out."""
    shown = []
    for message in row["refused"]:
        reason = ADVICE.sub("", message)
        for name in (f"this {row['class']}", f"a {row['class']}", row["class"], f"a {row['architecture']} target"):
            reason = reason.replace(name, "the target")
        shown.append(re.sub("a (DFlare|Dart)Drafter", "a DFlashDrafter", reason))
    return "; ".join(dict.fromkeys(shown))


def why_not_tried(row: Row) -> str:
    return row.get("not_built") or f"plain generate: {next(iter(row['plain_fails']))}"


def summary(rows: list[Row]) -> Counter:
    """How many variants came to what."""
    counts: Counter = Counter()
    for row in rows:
        if not was_tried(row):
            counts["not tried"] += 1
        else:
            counts["wrong" if is_wrong(row) else "served" if is_whole(row) else "refused in part"] += 1
    return counts


def print_rows(rows: list[Row]) -> None:
    """A line for each variant that is not served whole, and how many are."""
    table = Table("architecture", "variant", *(heading for heading, _ in KINDS), "why")
    for row in rows:
        if is_whole(row):
            continue
        tried = was_tried(row)
        why = reasons_of(row) if tried else why_not_tried(row)
        if is_wrong(row):
            why = "; ".join([*(str(fact) for fact in row["differs"]), *row["crashed"], why])
        table.add_row(row["architecture"], row["variant"], *(columns_of(row) if tried else [NOTHING] * len(KINDS)), why)
    console = Console() if Console().is_terminal else Console(width=180)
    console.print(table)
    console.print(", ".join(f"{name}: {count}" for name, count in sorted(summary(rows).items())))


def page_of(result: dict[str, Any]) -> str:
    """The page, in Markdown, of what docs/ says."""
    rows = result["rows"]
    first = {row["architecture"]: row for row in rows if row["variant"] == "default"}
    others = [row for row in rows if row["variant"] != "default" and not row["variant"].startswith("rope ")]
    facts = {**result["versions"], "command": result["command"], "date": result["date"][:10]}
    parts = [INTRODUCTION.format(**facts, num_types=len(first), num_variants=len(rows))]
    whole = [name for name, row in first.items() if is_whole(row)]
    names = fill(", ".join(f"`{name}`" for name in sorted(whole)), width=120, break_on_hyphens=False)
    parts.append(f"## Served in all of it: {len(whole)} model types\n\n{names}\n")
    partly = [row for row in first.values() if was_tried(row) and not is_whole(row)]
    served = [row for row in partly if row["same"]]
    parts.append(section("Served in part", served, with_columns=True))
    parts.append(section("Refused", [row for row in partly if not row["same"]]))
    parts.append(section("Other than their default", [row for row in others if differs_from(row, first)], True))
    parts.append(rope_section([row for row in rows if row["variant"].startswith("rope ")], first))
    parts.append(section("Not tried", [row for row in first.values() if not was_tried(row)]))
    return "\n".join(part for part in parts if part)


def differs_from(row: Row, first: dict[str, Row]) -> bool:
    """Whether a variant is served otherwise than its model type's default."""
    default = first.get(row["architecture"])
    if not was_tried(row):
        return False
    return default is None or not was_tried(default) or columns_of(row) != columns_of(default)


def section(title: str, rows: list[Row], with_columns: bool = False) -> str:
    """Rows that have the same said of them share a line."""
    if not rows:
        return ""
    lines = defaultdict(list)
    for row in rows:
        is_default = row["variant"] == "default"
        name = f"`{row['architecture']}`" + ("" if is_default else f" ({row['variant']})")
        why = reasons_of(row) if was_tried(row) else why_not_tried(row)
        cells = columns_of(row) if with_columns else []
        lines[(*cells, why or NOTHING)].append(name)
    headings = ["model types", *((heading for heading, _ in KINDS) if with_columns else ()), "why"]
    cells = [[", ".join(names), *cells] for cells, names in sorted(lines.items())]
    table = markdown_table(headings, cells, num_words=len(headings))
    return f"## {title}\n\n{table}\n"


def rope_section(rows: list[Row], first: dict[str, Row]) -> str:
    """How each type of RoPE is served, beside what else its target is served."""
    if not rows:
        return ""
    lines = []
    for rope_type in dict.fromkeys(row["variant"] for row in rows):
        tried = [row for row in rows if row["variant"] == rope_type and was_tried(row)]
        alike = [row for row in tried if not differs_from(row, first)]
        unlike = [row for row in tried if differs_from(row, first)]
        cells = Counter((*columns_of(row), reasons_of(row)) for row in unlike)
        lines.append(
            [
                rope_type.removeprefix("rope "),
                str(len(tried)),
                str(len(alike)),
                "; ".join(f"{count} x {cell[-1]}" for cell, count in cells.items()) or NOTHING,
            ]
        )
    headings = ["type", "model types that take it", "served as with their default", "others"]
    return f"## Types of RoPE, on both sides of their boundary\n\n{markdown_table(headings, lines, num_words=len(headings))}\n"
