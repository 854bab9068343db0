"""Compiled and eager rounds beside plain `generate`, eager and compiled, and transformers' own DFlash loop, in one run.

    python benchmarks/decode.py --stories PATH/stories260K --drafters PATH/stories260k.work --prompt-text STORIES.txt

Targets: stories260K with the drafters that benchmarks/stories260k.py leaves in its work folder, the demo family, a random
target of 100 M weights, and on a GPU random weights at the true shapes of Qwen3-4B, Qwen3-8B and Llama-3.1-8B in bfloat16.
Where no trained drafter exists, acceptance is SIMULATED (as by simulate.py), at what the papers
report, and the rows say so.

"plain compiled" is transformers' own static cache; "ours compiled" is `cache_implementation="static"` with a drafter. All take
turns, and every figure is a median of the turns. First calls, which compile, count apart. What a round takes is the difference
between a text and its first half, so that reading the prompt is no part of it. Efficiency is (verify + draft forward) / round:
the forwards, one after the other, are repeated in the same turns (decode_limits.py), and what a loop does besides is what is
missing to 1. On a GPU there is also the time in which the weights that both forwards need can be read.

What was measured is kept in `--work` and not measured again; the result has all that is there. So a long measurement can be
made of several commands, with `--targets`, `--only`, `--columns` and `--batch-sizes`.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from decode_cases import CASES, default_targets
from decode_measure import COLUMNS, measure
from decode_report import print_runs, save_plots
from hf_pardraft.evaluation.entries import PLAIN
from hf_pardraft.evaluation.facts import machine
from result_files import RESULTS, public_command, save

RESULT = RESULTS / "decode.json"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def run_file(target: str, batch_size: int, arguments: argparse.Namespace) -> Path:
    """Where the rows of one target and batch size are kept."""
    parts = [target, f"batch{batch_size}", *(arguments.only or []), *(c.replace(" ", "_") for c in arguments.columns)]
    return arguments.work / f"{'-'.join(parts)}.json"


def measured_before(path: Path, settings: dict[str, Any]) -> bool:
    """Whether an earlier command measured this, in the same way."""
    return path.exists() and json.loads(path.read_text())["settings"] == settings


def measure_target(name: str, arguments: argparse.Namespace) -> None:
    """Measure what is missing of one target, and keep it."""
    names = ("repeats", "forwards", "prompts", "max_new_tokens", "backend", "quick")
    settings = {key: vars(arguments)[key] for key in names}
    paths = {size: run_file(name, size, arguments) for size in arguments.batch_sizes}
    missing = {size: path for size, path in paths.items() if not measured_before(path, settings)}
    if not missing:
        return
    case = CASES[name](arguments)
    for size, path in missing.items():
        print(f"{name}, batch {size} ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        try:
            rows, reason = measure(case, size, arguments), None
        except torch.OutOfMemoryError:
            rows, reason = [], "out of memory"
        facts = {
            "target": name,
            "batch_size": size,
            "simulated": case.simulated,
            "dtype": str(case.target.dtype).removeprefix("torch."),
            "machine": machine(case.target.device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": public_command(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "prompts": len(case.prompts_for(size)),
            "new_tokens_at_most": case.max_new_tokens,
            "seconds": round(time.perf_counter() - started, 1),
            "not_measured": reason,
            "settings": settings,
        }
        save(path, {**facts, "rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stories", type=Path, help="folder of the stories260K target")
    parser.add_argument("--drafters", type=Path, help="work folder of benchmarks/stories260k.py, with drafters for it")
    parser.add_argument("--prompt-text", type=Path, help="stories to continue, a paragraph each")
    parser.add_argument("--targets", nargs="+", choices=CASES, help="by default all that can be measured here")
    parser.add_argument("--only", nargs="+", help="drafters to measure, by their names; by default all")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), help=f"besides {PLAIN}")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1], help=f"the whole curve: {BATCH_SIZES}")
    parser.add_argument("--prompts", type=int, default=6, help="texts of trained drafters, where they come one by one")
    parser.add_argument("--max-new-tokens", type=int, help="by default what suits the target")
    parser.add_argument("--repeats", type=int, default=5, help="turns; figures are medians of them")
    parser.add_argument("--forwards", type=int, default=20, help="repeats of each forward by itself, each turn")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--quick", action="store_true", help="a tiny random target in place of the large one")
    parser.add_argument("--work", type=Path, default=Path("decode.work"), help="what was measured is kept here")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--plots", action="store_true", help="draw speedup by batch size beside the output")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    num_threads = torch.get_num_threads()
    # Plain generate compiles one function for all batch sizes, each of which is a shape of its own.
    with torch._dynamo.config.patch(recompile_limit=64):
        for name in arguments.targets or default_targets(arguments):
            # The demo family takes one thread.
            torch.set_num_threads(num_threads)
            measure_target(name, arguments)
    runs = [json.loads(path.read_text()) for path in sorted(arguments.work.glob("*.json"))]
    runs.sort(key=lambda run: (list(CASES).index(run["target"]), run["batch_size"]))
    save(arguments.output, {"command": public_command(), "runs": runs})
    print_runs(runs)
    if arguments.plots:
        for path in save_plots(runs, arguments.output):
            print(f"Wrote {path.name}")


if __name__ == "__main__":
    main()
