"""What the command `pardraft convert` does; cli/app.py only reads its arguments."""

from pathlib import Path
from typing import Any

from ..checkpoints.convert import convert
from ..checkpoints.layouts import LAYOUTS, NATIVE
from ..user_input.models import naming

LAYOUT_NAMES = (NATIVE, *LAYOUTS)


def convert_drafter(source: str, destination: Path, layout: str, overwrite: bool, **options: Any) -> dict[str, Any]:
    """Convert a drafter and say what was done; `options` are those of [`convert`], `None` where not given.

    Raises:
        OSError, ValueError: see [`convert`].
    """
    given = {name: value for name, value in options.items() if value is not None}
    with naming(source):
        done = convert(source, destination, layout, overwrite, **given)
    facts = {"drafter": done.kind, "layout": done.layout, "weights": done.num_weights, "used by": done.served_by}
    left = {f"not read, {name}": why for name, why in done.unread.items()}
    return {**facts, **left, "written to": destination}
