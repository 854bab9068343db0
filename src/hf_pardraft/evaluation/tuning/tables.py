"""What tuning found, for people: what forwards cost, and how fast each choice was predicted to be and is."""

from rich.console import Console
from rich.table import Table

from ..entries import PLAIN
from ..report import NOTHING, new_table
from .cost_model import Draft, RoundCosts, round_seconds
from .probing import describe
from .search import DEFAULT, TUNED, BatchChoice, Tuning

TUNING_LEGEND = (
    "draft, tree: by tokens or nodes; verify: the target's forward and the choice of tokens, by tokens read for each text; rest: "
    "of a round, whatever it drafts; round: all of it, predicted. "
    "The cost model chooses the draft called tuned; of plain, default and tuned, the fastest one as measured (*) is written."
)


def show_tuning(tuning: Tuning, screen: Console) -> None:
    """Print what was found."""
    for table in cost_tables(tuning):
        screen.print(table)
    screen.print(acceptance_line(tuning), highlight=False)
    if tuning.choices:
        screen.print(speed_table(tuning))
    screen.print(TUNING_LEGEND, highlight=False, style="dim")
    for line in verdict_lines(tuning):
        screen.print(line, highlight=False)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def cost_tables(tuning: Tuning) -> list[Table]:
    """What was measured, by batch size: with chains, and with trees if there were any."""
    costs = tuning.measurements.costs
    any_costs = next(iter(costs.values()))
    chains, trees = sorted(any_costs.verify_chain), sorted(any_costs.verify_tree)
    deepest = max(any_costs.draft)
    verify = table_of_times("Chains, measured (ms)")
    for heading in ("plain step", f"draft {deepest}", *(f"verify {slots}" for slots in chains), "rest"):
        verify.add_column(heading, justify="right")
    of_trees = table_of_times("Trees, measured (ms)")
    for slots in trees:
        of_trees.add_column(f"tree {slots - 1}", justify="right")
        of_trees.add_column(f"verify {slots}", justify="right")
    for size, known in costs.items():
        times = [known.plain_step, known.draft[deepest], *(known.verify_chain[slots] for slots in chains), known.fixed]
        verify.add_row(f"batch {size}", *map(milliseconds, times))
        # Of a budget that was tried with several depths, the deepest tree.
        built = {budget: by_depth[max(by_depth)] for budget, by_depth in known.tree.items()}
        times = [time for slots in trees for time in (built[slots - 1], known.verify_tree[slots])]
        of_trees.add_row(f"batch {size}", *map(milliseconds, times))
    return [verify, of_trees] if trees else [verify]


def table_of_times(title: str) -> Table:
    """A table whose headings may be broken into lines, but not its figures."""
    return new_table([], title=title, title_justify="left", title_style="bold")


def acceptance_line(tuning: Tuning) -> str:
    """What share of rounds accepted each position, all texts together."""
    chains = tuning.measurements.chains
    rounds = sum(text.num_rounds for text in chains)
    shares = [sum(reached) / rounds for reached in zip(*(text.reached for text in chains), strict=True)]
    return f"Accepted by depth, in chains: {' '.join(f'{100 * share:.0f}%' for share in shares)}"


def speed_table(tuning: Tuning) -> Table:
    """Predicted and measured, by batch size."""
    table = new_table(
        ["round ms", "tau", "predicted tok/s", "measured tok/s", "speedup", ""],
        title="Plain generate, the drafter as it is, and the tuned draft",
        title_justify="left",
        title_style="bold",
    )
    for index, choice in enumerate(tuning.choices):
        if index:
            table.add_section()
        costs = tuning.measurements.costs[choice.batch_size]
        for name in (PLAIN, DEFAULT, TUNED):
            table.add_row(*speed_line(choice, name, costs))
    return table


def speed_line(choice: BatchChoice, name: str, costs: RoundCosts) -> list[str]:
    draft: Draft | None = {PLAIN: None, DEFAULT: choice.default, TUNED: choice.best}[name]
    measured = choice.measured[name]
    return [
        f"batch {choice.batch_size}, {name}" + (f": {describe(draft)}" if draft else ""),
        NOTHING if draft is None else milliseconds(round_seconds(costs, draft)),
        f"{choice.tau[name]:.2f}",
        f"{choice.predicted[name]:.1f}",
        f"{measured:.1f}",
        f"{measured / choice.measured[PLAIN]:.2f}x",
        "*" if choice.written == name else "",
    ]


def verdict_lines(tuning: Tuning) -> list[str]:
    """For each batch size, what generate will do."""
    lines = []
    for choice in tuning.choices:
        what = {
            PLAIN: "no drafting: plain generate was the fastest",
            DEFAULT: f"{describe(choice.default)}, as before",
            TUNED: describe(choice.best),
        }[choice.written]
        missed = ""
        if choice.written != TUNED and choice.predicted[TUNED] > choice.predicted[choice.written]:
            missed = f" (the cost model had preferred {describe(choice.best)})"
        lines.append(f"Batch {choice.batch_size}: {what}{missed}.")
    return lines
