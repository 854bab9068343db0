"""What the schedule is to replace, measured beside it: `adaptive_depth`, and a table as `pardraft eval --tune` writes it."""

import json
from argparse import Namespace
from typing import Any

from hf_pardraft.evaluation.measurement import Condition
from hf_pardraft.evaluation.report import Report
from hf_pardraft.evaluation.tuning.search import plan_search, table_of, tune
from result_files import save
from schedule_cases import Case

ADAPTIVE, TUNED = "adaptive_depth", "tuned table"


def settings_before(case: Case, arguments: Namespace) -> dict[str, dict[str, Any]]:
    """Settings of calls, by name; the table is made greedily, as by default, once for each case that pays."""
    # A drafter on texts that it doesn't know comes with the table of those it does.
    known = case.name.replace(" on code", "").replace(" on other code", "")
    path = arguments.work / f"{known.replace('/', '-')}.table.json"
    if not path.exists():
        save(path, tuned_drafting(case, arguments))
    return {
        ADAPTIVE: {"adaptive_depth": True, "draft_schedule": "fixed"},
        TUNED: {"tuned_drafting": json.loads(path.read_text()), "adaptive_depth": False},
    }


def tuned_drafting(case: Case, arguments: Namespace) -> dict[str, Any]:
    """What tuning writes, with the budgets that it tries by itself."""
    prompts = case.prompts[: arguments.tuning_prompts]
    conditions = [Condition(size, max_new_tokens=arguments.max_new_tokens, repeats=2) for size in arguments.tuned_sizes]
    report = Report({"simulated": False})
    tuning = tune(case.target, case.drafter, prompts, conditions, plan_search(case.drafter, [], []), report)
    return {"by_batch_size": table_of(tuning)}
