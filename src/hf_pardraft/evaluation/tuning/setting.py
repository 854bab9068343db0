"""Draft depth and tree budget by batch size, as they were measured: the part of a generation config that says so."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...models.base import ParallelDrafter

COMPILED = "compiled"
FIELDS = {"by_batch_size", "instead_of", "measured_on"}
ENTRY_FIELDS = {"num_assistant_tokens", "tree_budget"}
ADVICE = "run `pardraft eval --tune` again, or remove tuned_drafting from the drafter's generation config"


@dataclass(frozen=True)
class TunedDraft:
    """What is fastest at a batch size: `depth` tokens a round (0: no drafting at all), as a tree of `tree_budget` nodes or a
    chain (0)."""

    depth: int
    tree_budget: int = 0


def tables_in(tuned: Any) -> dict[bool, Any]:
    """The tables of a `tuned_drafting` setting, whatever they are: that of compiled rounds (`True`), and that of others."""
    if not isinstance(tuned, dict) or COMPILED not in tuned:
        return {False: tuned}
    others = {name: value for name, value in tuned.items() if name != COMPILED}
    return {True: tuned[COMPILED], **({False: others} if others else {})}


def is_readable(tuned: Any, max_depth: int | None) -> bool:
    """Whether `generate` takes a `tuned_drafting` setting, for a drafter with the most tokens of [`read_table`]."""
    try:
        for table in tables_in(tuned).values():
            read_table(table, max_depth)
    except ValueError:
        return False
    return True


def with_table(tuned: Any, table: dict[str, Any], is_compiled: bool) -> dict[str, Any]:
    """A `tuned_drafting` setting (or `None`) with a new table for one kind of rounds; that of the other kind stays."""
    tables = {**({} if tuned is None else tables_in(tuned)), is_compiled: table}
    return {**tables.get(False, {}), **({COMPILED: tables[True]} if True in tables else {})}


def read_table(tuned: Any, max_depth: int | None) -> dict[int, TunedDraft]:
    """The choices by batch size in a table of a `tuned_drafting` setting.

    Args:
        tuned: `{"by_batch_size": {"8": {"num_assistant_tokens": 4, "tree_budget": 16}, ...}}`, with or without
            `"instead_of"` (the drafter's own two values that it was measured against) and `"measured_on"` (facts). A file has
            texts as keys, and a program may have numbers.
        max_depth: the most tokens that the drafter can draft; `None` without a limit.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(tuned, dict) or not isinstance(tuned.get("by_batch_size"), dict) or not tuned["by_batch_size"]:
        raise ValueError(
            'tuned_drafting must be a dict like {"by_batch_size": {"1": {"num_assistant_tokens": 8, "tree_budget": 16}}}, got '
            f"{tuned!r}: {ADVICE}"
        )
    unknown = tuned.keys() - FIELDS
    if unknown:
        known = ", ".join([*sorted(FIELDS), COMPILED])
        raise ValueError(f"tuned_drafting knows {known}, got {sorted(map(str, unknown))}: {ADVICE}")
    for name in ("instead_of", "measured_on"):
        if not isinstance(tuned.get(name, {}), dict):
            raise ValueError(f"tuned_drafting's {name} must be a dict, got {tuned[name]!r}: {ADVICE}")
    table = {
        read_batch_size(size): read_entry(size, entry, max_depth) for size, entry in tuned["by_batch_size"].items()
    }
    if len(table) < len(tuned["by_batch_size"]):
        raise ValueError(f"tuned_drafting names a batch size twice, got {list(tuned['by_batch_size'])}: {ADVICE}")
    return table


def read_batch_size(size: Any) -> int:
    number = int(size) if isinstance(size, str) and size.isascii() and size.isdigit() else size
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"a batch size of tuned_drafting must be a whole number of at least 1, got {size!r}: {ADVICE}")
    return number


def read_entry(size: Any, entry: Any, max_depth: int | None) -> TunedDraft:
    if not isinstance(entry, dict) or "num_assistant_tokens" not in entry or entry.keys() - ENTRY_FIELDS:
        raise ValueError(
            f"tuned_drafting's entry for batch size {size} must have num_assistant_tokens and may have tree_budget, got "
            f"{entry!r}: {ADVICE}"
        )
    depth, budget = entry["num_assistant_tokens"], entry.get("tree_budget", 0)
    for name, value in (("num_assistant_tokens", depth), ("tree_budget", budget)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{name} of tuned_drafting's entry for batch size {size} must be a whole number of at least 0, got {value!r}: "
                f"{ADVICE}"
            )
    if max_depth is not None and depth > max_depth:
        raise ValueError(
            f"tuned_drafting drafts {depth} tokens at batch size {size}, and this drafter can draft {max_depth}: {ADVICE}"
        )
    if depth == 0 and budget:
        raise ValueError(
            f"tuned_drafting has a tree of {budget} nodes and no depth at batch size {size}: set both, or neither. {ADVICE}"
        )
    return TunedDraft(depth, budget)


def nearest_size(sizes: Iterable[int], batch: int) -> int:
    """The size whose ratio to `batch` is nearest to 1; of two that are equally near, the smaller."""
    return min(sizes, key=lambda size: (max(size, batch) / min(size, batch), size))


def still_stands(tuned: dict[str, Any], own: dict[str, Any], device_type: str) -> bool:
    """Whether a table is meant for a call that asks for nothing itself.

    It is not where the drafter's own values are no longer those that it was measured against, since somebody set them later;
    nor on another kind of device than the one it was measured on.

    Args:
        tuned: its table.
        own: the drafter's own `num_assistant_tokens` and `tree_budget`; `None` where they are not set.
        device_type: of the target, as in `torch.device.type`.
    """
    measured_on = tuned.get("measured_on", {}).get("device_type", device_type)
    return measured_on == device_type and tuned.get("instead_of", own) == own


def own_draft(drafter: ParallelDrafter) -> dict[str, int | None]:
    """A drafter's own depth and tree budget, as its generation config has them; `None` where it leaves them open."""
    attributes = vars(drafter.generation_config)
    return {name: attributes.get(name) for name in ("num_assistant_tokens", "tree_budget")}
