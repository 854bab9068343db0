"""`pardraft eval --tune` from its plan on: a drafter that can be tuned, what was found, and where it is written."""

import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from ...checkpoints.atomic_folders import writing_folder
from ...checkpoints.locks import PATIENCE
from ...checkpoints.staging import check_destination
from ...generation.cache import is_hybrid
from ...generation.settings import settings_in
from ...models.base import ParallelDrafter
from ..entries import plain_entry
from ..measurement import is_compiled
from ..plan import Plan
from ..report import Report
from ..workbench import Workbench, prepare, save_json, show
from .search import Tuning, plan_search, table_of, tune, tuning_facts
from .setting import own_draft, with_table
from .tables import show_tuning

GENERATION_CONFIG = "generation_config.json"


def tune_drafter(plan: Plan, screen: Console, notes: Console) -> Report:
    """Find the best draft at each batch size, print tables, and write the drafter's generation config.

    Nothing is written into the drafter if something could not be measured, or a text was not the target's own.

    Args:
        plan: what to do.
        screen: for the tables.
        notes: for what goes on meanwhile.

    Raises:
        ImportError, OSError, ValueError: if the plan can't be met, before anything is measured; a `ValueError` also if what
            was measured should not be relied on, and then results that were asked for as files are there all the same.
    """
    name = check_tuning(plan)
    bench = prepare(plan, notes)
    drafter, report = bench.drafters[name], bench.report
    check_drafter(drafter)
    takes_trees = not is_hybrid(bench.target.config.get_text_config(decoder=True))
    search = plan_search(drafter, plan.contenders.depths, plan.contenders.tree_budgets, takes_trees)
    compiled = is_compiled(plain_entry(), plan.conditions[0])
    tuning = tune(
        bench.target,
        drafter,
        bench.prompts,
        plan.conditions,
        search,
        report,
        lambda line: notes.print(line, highlight=False),
        lambda: save_json(bench),
        # Compiled rounds keep their shape, and so the items that are finished.
        items_leave=not compiled,
    )
    report.facts["tuning"] = tuning_facts(tuning)
    save_json(bench)
    show(bench, screen, notes)
    show_tuning(tuning, screen)
    if tuning.problems:
        raise ValueError(f"{'; '.join(tuning.problems)}: nothing was written into the drafter")
    earlier = vars(drafter.generation_config).get("tuned_drafting")
    tuned = with_table(earlier, measured_table(bench, drafter, tuning), compiled)
    written = write_tuning(drafter, tuned, Path(plan.contenders.drafters[name].source), plan.outputs.tuned)
    screen.print(f"Written: {written}", highlight=False, soft_wrap=True)
    return report


def check_tuning(plan: Plan) -> str:
    """The name of the drafter to tune, if tuning makes sense.

    Raises:
        ValueError: if not.
        OSError: if the result could not be written.
    """
    contenders = plan.contenders
    if len(contenders.drafters) != 1 or contenders.baselines:
        raise ValueError(
            f"--tune is for one drafter beside plain generate, got {len(contenders.drafters)} drafters and "
            f"{len(contenders.baselines)} baselines: pass one --drafter, and no --baselines"
        )
    if contenders.compiled:
        raise ValueError(
            "--tune finds one table at a time, for eager rounds or for compiled ones: pass --generate-argument "
            "cache_implementation=static for these, instead of --compiled. The other table stays as it is"
        )
    if plan.random_weights:
        raise ValueError(
            "--tune writes what was measured, and a random model has no acceptance to measure: leave --random-weights out"
        )
    if len({condition.temperature for condition in plan.conditions}) > 1 or contenders.settings:
        raise ValueError(
            "--tune finds one table of depths and tree budgets, for one temperature and the drafter's other settings as they "
            "are: pass one --temperature and no --setting (set those in the drafter's generation config first)"
        )
    name, source = next(iter(contenders.drafters.items()))
    if plan.outputs.tuned is not None:
        check_destination(plan.outputs.tuned)
        return name
    folder = Path(source.source)
    if not folder.is_dir():
        raise ValueError(
            f"--tune writes into the drafter's folder, and {source.source} is none: pass --output FOLDER for a tuned copy"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"can't write {folder / GENERATION_CONFIG}: no permission. Pass --output FOLDER")
    return name


def check_drafter(drafter: ParallelDrafter) -> None:
    """Raise a `ValueError` for a drafter whose own settings leave the table out of account."""
    own = settings_in(drafter.generation_config)
    for name, value in (("decode_loop", "native"), ("verification", "match")):
        if own.get(name, value) != value:
            raise ValueError(
                f"the drafter's generation config says {name}={own[name]!r}, and only {value!r} drafts as tuned: set it back"
            )


def measured_table(bench: Workbench, drafter: ParallelDrafter, tuning: Tuning) -> dict[str, Any]:
    """The table that goes into the generation config, and where it was measured."""
    facts = bench.report.facts
    condition = {"temperature": bench.report.rows[0].temperature, "generate_arguments": facts["generate_arguments"]}
    names = ("machine", "target", "dtype", "date", "versions", "max_new_tokens")
    return {
        "by_batch_size": table_of(tuning),
        "instead_of": own_draft(drafter),
        "measured_on": {
            "device_type": bench.target.device.type,
            **{name: facts[name] for name in names},
            **condition,
            "prompts": facts["prompts"]["name"],
        },
    }


def write_tuning(drafter: ParallelDrafter, tuned: dict[str, Any], source: Path, output: Path | None) -> Path:
    """Save a table with the drafter; returns the file.

    Raises:
        OSError: if that fails; then the folder is as it was.
    """
    drafter.generation_config.tuned_drafting = tuned
    if output is not None:
        drafter.save_pretrained(output)
        return output / GENERATION_CONFIG
    # What bears this mark is derived anew from config.json when it is loaded.
    drafter.generation_config._from_model_config = False
    with writing_folder(source, PATIENCE), tempfile.TemporaryDirectory(prefix=".tuning.", dir=source) as beside:
        drafter.generation_config.save_pretrained(beside)
        made, place = Path(beside) / GENERATION_CONFIG, source / GENERATION_CONFIG
        # Whoever could read the old file can read the new one.
        made.chmod(place.stat().st_mode if place.exists() else 0o644)
        made.replace(place)
    return place
