"""What `pardraft eval --tune` does; cli/app.py only reads its arguments."""

import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoints.atomic_folders import writing_folder
from ..checkpoints.locks import PATIENCE
from ..checkpoints.staging import check_destination
from ..evaluation.entries import plain_entry
from ..evaluation.measurement import is_compiled
from ..evaluation.plan import EvalRequest, Plan, make_plan
from ..evaluation.report import Report
from ..evaluation.tuning import Tuning, plan_search, table_of, tune, tuning_facts
from ..evaluation.tuning_tables import TUNING_LEGEND, acceptance_line, cost_tables, speed_table, verdict_lines
from ..generation.cache import is_hybrid
from ..generation.schedule import with_table
from ..generation.settings import own_draft, settings_in
from ..models.base import ParallelDrafter
from .eval import Workbench, conditions_of, prepare, save_json, show

GENERATION_CONFIG = "generation_config.json"


def tune_drafter(request: EvalRequest, screen: Console, notes: Console) -> Report:
    """Find the best draft at each batch size, print tables, and write the drafter's generation config.

    Nothing is written into the drafter if something could not be measured, or a text was not the target's own.

    Args:
        request: what to do.
        screen: for the tables.
        notes: for what goes on meanwhile.

    Raises:
        ImportError, OSError, ValueError: if the request can't be met, before anything is measured; a `ValueError` also if what
            was measured should not be relied on, and then results that were asked for as files are there all the same.
    """
    plan = make_plan(request)
    name = check_tuning(request, plan)
    source = Path(plan.drafters[name].source)
    bench = prepare(request, plan, notes)
    drafter = bench.drafters[name]
    check_drafter(drafter)
    conditions = conditions_of(request, plan)
    search = plan_search(
        drafter,
        request.depths,
        request.tree_budgets,
        takes_trees=not is_hybrid(bench.target.config.get_text_config(decoder=True)),
    )
    compiled = is_compiled(plain_entry(), conditions[0])
    tuning = tune(
        bench.target,
        drafter,
        bench.prompts,
        conditions,
        search,
        bench.report,
        bench.around,
        lambda line: notes.print(line, highlight=False),
        lambda: save_json(request, bench.report),
        # Compiled rounds keep their shape, and so the rows that are finished.
        rows_leave=not compiled,
    )
    bench.report.facts["tuning"] = tuning_facts(tuning)
    save_json(request, bench.report)
    show(request, bench.report, screen, notes)
    show_tuning(tuning, screen)
    if tuning.problems:
        raise ValueError(f"{'; '.join(tuning.problems)}: nothing was written into the drafter")
    tuned = with_table(
        vars(drafter.generation_config).get("tuned_drafting"), measured_table(bench, drafter, tuning), compiled
    )
    written = write_tuning(drafter, tuned, source, request.output)
    screen.print(f"Written: {written}", highlight=False, soft_wrap=True)
    return bench.report


def check_tuning(request: EvalRequest, plan: Plan) -> str:
    """The name of the drafter to tune, if tuning makes sense.

    Raises:
        ValueError: if not.
        OSError: if the result could not be written.
    """
    if len(plan.drafters) != 1 or request.baselines:
        raise ValueError(
            f"--tune is for one drafter beside plain generate, got {len(plan.drafters)} drafters and {len(request.baselines)} "
            "baselines: pass one --drafter, and no --baselines"
        )
    if request.compiled:
        raise ValueError(
            "--tune finds one table at a time, for eager rounds or for compiled ones: pass --generate-argument "
            "cache_implementation=static for these, instead of --compiled. The other table stays as it is"
        )
    if plan.profile is not None or request.random_weights:
        raise ValueError(
            "--tune writes what was measured, and a simulated or random model has no acceptance to measure: leave "
            "--simulate-acceptance and --random-weights out"
        )
    if len(set(request.temperatures)) > 1 or request.settings:
        raise ValueError(
            "--tune finds one table of depths and tree budgets, for one temperature and the drafter's other settings as they "
            "are: pass one --temperature and no --setting (set those in the drafter's generation config first)"
        )
    name, source = next(iter(plan.drafters.items()))
    if request.output is not None:
        check_destination(request.output)
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
