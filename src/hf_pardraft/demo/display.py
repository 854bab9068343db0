"""What the demo puts on the screen besides text: the table of results."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..evaluation.rows import Comparison

SAME_TEXT = {True: "yes", False: "NO", None: "sampled"}


def results_table(rows: list[Comparison]) -> Table:
    """The comparison, for people."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("tokens/s", "speedup", "tau", "same text"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}x",
            f"{row.tau:.2f}",
            SAME_TEXT[row.identical],
        )
    return table
