"""What the demo puts on the screen besides text: the table of results."""

from rich.table import Table

from ..evaluation.report import new_table
from ..evaluation.rows import Comparison

SAME_TEXT = {True: "yes", False: "NO", None: "sampled"}


def results_table(rows: list[Comparison]) -> Table:
    """The comparison, for people."""
    table = new_table(("tokens/s", "speedup", "tau", "same text"))
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}x",
            f"{row.tau:.2f}",
            SAME_TEXT[row.identical],
        )
    return table
