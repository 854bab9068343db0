"""Drafting that tunes itself, beside plain `generate` and beside every fixed depth and tree budget, in one run.

    python benchmarks/schedule.py --stories PATH/stories260K --drafters PATH/stories260k.work --prompt-text STORIES.txt

Two bounds are checked, and what misses one is listed: `draft_schedule="auto"` is never below 0.97 of plain `generate`, eager
beside eager and compiled beside compiled; and where drafting pays it has at least 0.97 of the best fixed setting's speed.

Cases where drafting may lose: an untrained drafter that is made sure of tokens the target never writes, at the real cost of
its drafts; drafters of random weights; drafters on texts that they do not know (stories drafters on code, the shipped family
on parts of Python's library outside the six files it knows); temperature 1 and large batches of everything. Cases where it
should pay: stories260K with the drafters that benchmarks/stories260k.py leaves in its work folder, and the shipped family.

Each condition (case, temperature, batch size) is measured in two stages. The sweep lets plain `generate` and all fixed
settings, chains and trees, take turns. Then the fastest few of them, the drafter's own depth, plain `generate` and the schedule
take more turns, and each speed of the table is the median of the turns' ratios to plain `generate`. "first call" is a copy of
the drafter that nothing is known about, as in a fresh process: a new copy each turn, whose first text counts alone. The best
fixed settings were chosen by dozens of calls; `--learning-calls` says how many the schedule has at least before its turns.

What the schedule took the place of, `adaptive_depth` and a table as `pardraft eval --tune` wrote it, was measured by the same
benchmark before both went; benchmarks/results/schedule_before.json has these rows, and the table shows them as "adaptive" and
"tuned", beside the plain `generate` of their own run.

With `--cpu-clock --slices` all ways of a turn run at once on one core, see time_slices.py: on a machine whose speed changes by a
factor within a second ratios are then good to a hundredth.

With `--modelled-clock` parts of a round take what they are said to (modelled_clock.py). The shares then say how good the
schedule's choices are on a machine that nothing disturbs, or one that seems to the schedule as uneven as `--clock-noise` says.

What was measured is kept in `--work` and not measured again; the result has all that is there. So a long measurement can be made
of several commands, with `--cases`, `--batch-sizes`, `--temperatures`, `--stages` and `--compiled`.
"""

import argparse
import json
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_pardraft.demo.family import SHIPPED_FAMILY
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.facts import machine
from modelled_clock import ModelledClock, PartCosts
from result_files import RESULTS, public_command, save
from schedule_cases import Cases
from schedule_measure import DEFAULT, DEPTHS, TREE_BUDGETS, Bench
from schedule_report import print_conditions, save_plot

RESULT = RESULTS / "schedule.json"
# Measured by this benchmark when the package had them: `adaptive_depth`, and a table as tuning wrote it.
RECORDED = RESULTS / "schedule_before.json"
BATCH_SIZES = (1, 4, 16, 64)
IDENTITY = ("case", "temperature", "batch_size", "compiled")
STAGES = ("sweep", "turns")
# What a stage's figures depend on.
SETTINGS = {
    "sweep": ("max_new_tokens", "prompts", "depths", "tree_budgets", "most_slots", "sweep_turns", "cpu_clock"),
    "turns": ("max_new_tokens", "prompts", "turns", "finalists", "cpu_clock", "learning_calls"),
}
# And further ones with a modelled clock, and in slices.
MODELLED, SLICED = ("modelled_clock", "clock_noise"), ("slices",)


def stage_file(arguments: argparse.Namespace, stage: str, case: str, temperature: float, batch_size: int) -> Path:
    """Where a stage of a condition is kept."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", case)
    kind = "compiled" if arguments.compiled else "eager"
    return arguments.work / f"{words}-t{temperature:g}-batch{batch_size}-{kind}.{stage}.json"


def measured_before(paths: dict[str, Path], stage: str, settings: dict[str, Any]) -> bool:
    """Whether an earlier command measured this, in the same way; turns are those of the sweep's best settings."""
    if not paths[stage].exists():
        return False
    known = json.loads(paths[stage].read_text())
    if stage == "sweep" or known["settings"] != settings:
        return known["settings"] == settings
    took_part = {row["name"] for row in known["rows"] if row["is_fixed"]} - {DEFAULT}
    return took_part == {row["name"] for row in swept(paths["sweep"])[: settings["finalists"]]}


def swept(path: Path) -> list[dict[str, Any]]:
    """The rows of a sweep, fastest first."""
    if not path.exists():
        sys.exit(f"error: the best settings of a sweep take the turns, and there is no {path}: add sweep to --stages")
    return json.loads(path.read_text())["rows"]


def measure_condition(
    cases: Cases, name: str, temperature: float, batch_size: int, arguments: argparse.Namespace
) -> None:
    """Measure what is missing of one condition, and keep it."""
    more = (MODELLED if arguments.modelled_clock else ()) + (SLICED if arguments.slices else ())
    settings = {stage: {key: vars(arguments)[key] for key in SETTINGS[stage] + more} for stage in STAGES}
    paths = {stage: stage_file(arguments, stage, name, temperature, batch_size) for stage in STAGES}
    bench = None
    for stage in STAGES:
        if stage not in arguments.stages or measured_before(paths, stage, settings[stage]):
            continue
        print(f"{name}, temperature {temperature:g}, batch {batch_size}: {stage} ...", file=sys.stderr)
        finalists = [] if stage == "sweep" else swept(paths["sweep"])[: arguments.finalists]
        bench = bench or Bench(cases[name], Condition(batch_size, temperature, arguments.max_new_tokens), arguments)
        case, started = bench.case, time.monotonic()
        # Where drafting does not pay, it is enough to know what the drafter's own depth costs.
        rows = bench.sweep() if stage == "sweep" and case.pays else []
        if stage == "turns":
            rows = bench.finals([row["setting"] for row in finalists])
        facts = {
            "case": name,
            "pays": case.pays,
            "temperature": temperature,
            "batch_size": batch_size,
            "compiled": arguments.compiled,
            "machine": "a modelled clock" if arguments.modelled_clock else machine(case.target.device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": public_command(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "prompts": len(case.prompts_for(batch_size, arguments.prompts)),
            "seconds": round(time.monotonic() - started, 1),
            "settings": settings[stage],
        }
        save(paths[stage], {**facts, "rows": rows})


def clock_of(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """The clock of a condition: the machine's, or one that begins anew."""
    if arguments.modelled_clock:
        return ModelledClock(PartCosts(*arguments.modelled_clock), arguments.clock_noise).running()
    return nullcontext()


def kept_conditions(work: Path, names: list[str], recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All conditions that went through both stages, in the order of the cases, each with its sweep and what was recorded."""
    conditions = []
    for path in sorted(work.glob("*.turns.json")):
        of_sweep = swept(path.with_name(path.name.replace(".turns.", ".sweep.")))
        condition = {**json.loads(path.read_text()), "sweep": of_sweep}
        of_it = (each for each in recorded if all(each[key] == condition[key] for key in IDENTITY))
        conditions.append({**condition, "recorded": next(of_it, None)})

    def place(condition: dict[str, Any]) -> tuple:
        order = names.index(condition["case"]) if condition["case"] in names else len(names)
        return condition["compiled"], order, condition["temperature"], condition["batch_size"]

    return sorted(conditions, key=place)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stories", type=Path, help="folder of the stories260K target")
    parser.add_argument("--drafters", type=Path, help="work folder of benchmarks/stories260k.py, with drafters for it")
    parser.add_argument("--prompt-text", type=Path, help="stories to continue, a paragraph each")
    parser.add_argument("--family", type=Path, default=SHIPPED_FAMILY, help="by default the one that is shipped")
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help="to measure, by default all that can be; '-' for none"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--compiled", action="store_true", help="compiled rounds beside plain generate compiled")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--prompts", type=int, default=4, help="texts of a turn; of batches that are larger, one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5, help="figures are medians of them")
    parser.add_argument("--sweep-turns", type=int, default=2)
    parser.add_argument(
        "--learning-calls", type=int, default=1, help="calls, at least, that the schedule learns by before its turns"
    )
    parser.add_argument("--finalists", type=int, default=3, help="fixed settings of the sweep that go on")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS), help="and the drafter's most")
    parser.add_argument("--tree-budgets", type=int, nargs="*", default=list(TREE_BUDGETS))
    parser.add_argument("--most-slots", type=int, default=1024, help="tokens of a forward, all items together")
    parser.add_argument(
        "--cpu-clock", action="store_true", help="CPU time of one thread: for a machine that does other work"
    )
    parser.add_argument(
        "--slices",
        action="store_true",
        help="all ways at once on one core, in slices of milliseconds and a process each, with --cpu-clock: for a machine whose "
        "speed changes",
    )
    parser.add_argument(
        "--modelled-clock",
        type=float,
        nargs=6,
        metavar="MS",
        help="milliseconds of the target's forward over one token, over two, and for each more; of a draft; of a tree "
        "besides; and of a look at probabilities. For one text at a time, uncompiled",
    )
    parser.add_argument(
        "--clock-noise", type=float, default=0.0, help="share by which the schedule sees it wrong, of a part of a round"
    )
    parser.add_argument("--quick", action="store_true", help="one short text and a small sweep, to see that it runs")
    parser.add_argument("--work", type=Path, default=Path("schedule.work"), help="what was measured is kept here")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--plot", action="store_true", help="draw all speedups beside the output")
    arguments = parser.parse_args()
    if arguments.stories and not arguments.prompt_text:
        parser.error("--stories needs --prompt-text, stories to continue")
    if arguments.modelled_clock and (arguments.compiled or arguments.batch_sizes != [1]):
        parser.error(
            "--modelled-clock is for uncompiled rounds of one text: leave --compiled out, and say --batch-sizes 1"
        )
    if arguments.slices and (arguments.modelled_clock or not arguments.cpu_clock):
        parser.error("--slices compares what processes have of a core: say --cpu-clock, and leave --modelled-clock out")
    if arguments.quick:
        small = {"prompts": 1, "max_new_tokens": 12, "turns": 1, "sweep_turns": 1, "finalists": 1}
        vars(arguments).update(small, depths=[1, 3], tree_budgets=[4])
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    if arguments.cpu_clock:
        torch.set_num_threads(1)
        # Of all that measures here, the schedule included.
        time.perf_counter = time.thread_time
    cases = Cases(arguments)
    # A case can be asked for by its name, and by that of its group.
    words = {name: {name, name.split("/")[0]} for name in cases.names}
    known, asked = set().union(*words.values()), {*(arguments.cases or cases.names)} - {"-"}
    if asked - known:
        names = [*cases.names, *sorted(known - {*cases.names})]
        sys.exit(f"error: --cases expects any of {', '.join(names)}, not {min(asked - known)}")
    # Plain generate compiles one function for all batch sizes, each of which is a shape of its own.
    with torch._dynamo.config.patch(recompile_limit=64):
        for name in cases.names:
            if not asked & words[name]:
                continue
            for temperature in arguments.temperatures:
                for batch_size in arguments.batch_sizes:
                    with clock_of(arguments):
                        measure_condition(cases, name, temperature, batch_size, arguments)
    recorded = json.loads(RECORDED.read_text())["conditions"] if RECORDED.exists() else []
    conditions = kept_conditions(arguments.work, cases.names, recorded)
    save(arguments.output, {"command": public_command(), "conditions": conditions})
    print_conditions(conditions)
    if arguments.plot:
        print(f"Wrote {save_plot(conditions, arguments.output.with_suffix('.png')).name}")


if __name__ == "__main__":
    main()
