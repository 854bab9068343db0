"""An evaluation for people and programs: a table on the screen, Markdown, JSON."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .rows import EvaluationRow

NOTHING = "-"
# Characters of words, which can be broken, in a line of a table's column at least; and more than any table has in a line.
LEAST_WORDS = 9
WIDEST = 1000
LEGEND = (
    "tau: mean tokens that a forward of the target commits to a text; full tau: the same if every round drafts all it can, be it "
    "worth its time or not. accept, correct: share of drafted and bonus tokens that became text, or were the text's; waste: "
    "share of the correct ones that were thrown away, as something before them was wrong. draft, verify: shares of a round's "
    "time."
)


@dataclass
class Report:
    """Everything that an evaluation found out.

    Attributes:
        facts: what was evaluated, where, when and how: the JSON's top level.
        rows: in the order of the conditions, plain `generate` first in each.
        skipped: what could not be measured: `name`, `batch_size`, `temperature` and a `reason` each.
    """

    facts: dict[str, Any]
    rows: list[EvaluationRow] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """One line; of a simulation it says so first."""
        prompts = self.facts["prompts"]
        left_out = f", {prompts['left_out']} left out" if prompts["left_out"] else ""
        text = f"{self.facts['target']} on {prompts['name']} ({prompts['count']} prompts{left_out}), {self.facts['machine']}"
        if not self.facts["simulated"]:
            return text
        return f"SIMULATED ACCEPTANCE ({self.facts['simulation']['acceptance']}), no measured quality: {text}"


CONDITION_COLUMNS = ("batch", "temperature")
DRAFT_COLUMNS = ("accept", "correct", "waste", "draft", "verify")
Column = Callable[[EvaluationRow], str]


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}%"


def same_text(row: EvaluationRow) -> str:
    """Whether the text is plain's; if not, in how many prompts, and whether the target could not tell the tokens apart."""
    if row.identical is None:
        return NOTHING
    if row.identical:
        return "yes"
    all_ties = all(difference.near_tie for difference in row.differences)
    return f"{'near ties' if all_ties else 'NO'} ({row.num_different})"


def share(part: str) -> Column:
    return lambda row: percent(row.shares[part] if row.shares else None)


COLUMNS: dict[str, Column] = {
    "batch": lambda row: str(row.batch_size),
    "temperature": lambda row: f"{row.temperature:g}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "speedup": lambda row: f"{row.speedup:.2f}x",
    "tau": lambda row: f"{row.tau:.2f}",
    "full tau": lambda row: NOTHING if row.full_depth_tau is None else f"{row.full_depth_tau:.2f}",
    "accept": lambda row: percent(row.accept),
    "correct": lambda row: percent(row.correct),
    "waste": lambda row: percent(row.waste),
    "draft": share("draft"),
    "verify": share("verify"),
    "ms/round": lambda row: f"{row.milliseconds_per_round:.2f}",
    "same text": same_text,
}


def shown_columns(rows: list[EvaluationRow]) -> dict[str, Column]:
    """Those columns that have something to say: no batch size and temperature that never change, nor what nobody knows."""
    hidden = {name for name, column in COLUMNS.items() if all(column(row) == NOTHING for row in rows)}
    hidden |= {name for name in CONDITION_COLUMNS if len({COLUMNS[name](row) for row in rows}) < 2}
    return {name: column for name, column in COLUMNS.items() if name not in hidden}


def position_table(rows: list[EvaluationRow]) -> tuple[list[str], list[list[str]]]:
    """Acceptance by position: headings, and a line per row that knows it."""
    known = [row for row in rows if row.acceptance_by_position]
    deepest = max((len(row.acceptance_by_position) for row in known), default=0)
    lines = [
        [
            named(row, rows),
            *map(percent, row.acceptance_by_position),
            *[""] * (deepest - len(row.acceptance_by_position)),
        ]
        for row in known
    ]
    return ["", *map(str, range(1, deepest + 1))], lines


def named(row: EvaluationRow, rows: list[EvaluationRow]) -> str:
    """A row's name, with its batch size and temperature where those differ."""
    condition = condition_name(row, rows)
    return f"{row.name}, {condition}" if condition else row.name


def condition_name(row: EvaluationRow, rows: list[EvaluationRow]) -> str:
    """A row's batch size and temperature, as far as they differ from row to row; may be empty."""
    columns = shown_columns(rows)
    return ", ".join(f"{name} {columns[name](row)}" for name in CONDITION_COLUMNS if name in columns)


def screen_table(report: Report) -> Table:
    """How fast it was, for a terminal of 80 columns."""
    left_out = (*CONDITION_COLUMNS, *DRAFT_COLUMNS)
    columns = {name: column for name, column in shown_columns(report.rows).items() if name not in left_out}
    style = "bold red" if report.facts["simulated"] else "bold"
    table = new_table(columns, title=report.title, title_style=style, title_justify="left")
    add_rows(table, report.rows, report.rows, list(columns.values()))
    return table


def drafts_table(report: Report) -> Table:
    """What became of the drafts and where a round's time went, likewise."""
    rows = [row for row in report.rows if row.acceptance_by_position]
    columns = {name: column for name, column in shown_columns(report.rows).items() if name in DRAFT_COLUMNS}
    table = new_table(columns)
    table.add_column("accepted by position, %")
    add_rows(table, rows, report.rows, [*columns.values(), positions_in_percent])
    return table


def positions_in_percent(row: EvaluationRow) -> str:
    return " ".join(f"{100 * share:.0f}" for share in row.acceptance_by_position)


def add_rows(table: Table, rows: list[EvaluationRow], all_rows: list[EvaluationRow], columns: list[Column]) -> None:
    """Add `rows` to a table, under a line for each condition where there are several among `all_rows`.

    A column for them would leave no room for names.
    """
    last = None
    for row in rows:
        condition = condition_name(row, all_rows)
        if condition and condition != last:
            if last is not None:
                table.add_section()
            table.add_row(condition, style="bold")
            last = condition
        table.add_row(row.name, *(column(row) for column in columns))


def new_table(headings: Iterable[str], **options: Any) -> Table:
    """A table of names and figures; if space is short, names are broken, not figures."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), **options)
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(table: Table, screen: Console) -> None:
    """Print a [`new_table`]; where a terminal is too narrow for its figures, with longer lines: rich would drop names first."""
    words = [column for column in table.columns if not column.no_wrap]
    for column in words:
        column.max_width = LEAST_WORDS
    least = Measurement.get(screen, screen.options.update(max_width=WIDEST), table).maximum
    for column in words:
        column.max_width = None
    if least > screen.width:
        table.width = least
    screen.print(table, crop=False)


def markdown(report: Report) -> str:
    """The rows, for a model card or a README."""
    columns = shown_columns(report.rows)
    lines = [[row.name, *(column(row) for column in columns.values())] for row in report.rows]
    title = f"**{escaped(report.title)}**" if report.facts["simulated"] else escaped(report.title)
    parts = [title, markdown_table(["", *columns], lines)]
    headings, positions = position_table(report.rows)
    if positions:
        parts += ["Share of rounds that accepted each drafted token:", markdown_table(headings, positions)]
    parts.append(LEGEND)
    parts += [f"{escaped(line)}." for line in difference_lines(report.rows)]
    parts += [f"Not measured: {skipped_line(entry)}." for entry in report.skipped]
    facts = report.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts.append(
        f"{facts['date']}, {facts['dtype']}, up to {facts['max_new_tokens']} new tokens, best of {facts['repeats']} runs in "
        f"turns. {versions}."
    )
    parts.append(f"```bash\n{facts['command']}\n```")
    return "\n\n".join(parts) + "\n"


def difference_lines(rows: list[EvaluationRow]) -> list[str]:
    """For each row whose text is not plain's, where it first parts from it."""
    return [f"{named(row, rows)}: {difference_line(row)}" for row in rows if row.differences]


def difference_line(row: EvaluationRow) -> str:
    first = row.differences[0]
    place = f"prompt {first.prompt + 1} at new token {first.position + 1}"
    tokens = " instead of ".join("the end" if t is None else f"token {t}" for t in (first.token, first.plain_token))
    verdict = ""
    if first.logit_gap is not None:
        verdict = (
            f"; the target's logits are {first.logit_gap:.3g} apart, {'a near tie' if first.near_tie else 'no tie'}"
        )
    return f"{row.num_different} other texts, the first in {place} ({tokens}{verdict})"


def skipped_line(entry: dict[str, Any]) -> str:
    return f"{entry['name']} with batch size {entry['batch_size']} at temperature {entry['temperature']:g} ({entry['reason']})"


def markdown_table(headings: list[str], lines: list[list[str]], num_words: int = 1) -> str:
    """A table whose first `num_words` columns are words, on the left, and the others figures, on the right."""
    rule = [*["---"] * num_words, *["---:"] * (len(headings) - num_words)]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in [headings, rule, *lines])


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def as_json(report: Report) -> str:
    """Everything, for programs."""
    rows = [asdict(row) for row in report.rows]
    return json.dumps({**report.facts, "rows": rows, "skipped": report.skipped}, indent=2, allow_nan=False) + "\n"
