"""Sampled text with a drafter beside plain `generate`: tau, speed, and how rarely float32 rounding makes another text of it.

    python benchmarks/sampled_text.py --stories PATH/stories260K --drafters PATH/stories260k.work --prompt-text STORIES.txt

The drafters are those that benchmarks/stories260k.py leaves in its work folder. For each drafter and temperature, plain
`generate`, chains, trees of 16 nodes, and chains that are verified by rejection take turns on the same beginnings of stories,
each with its own seed; another repeat has other stories. Speed is the median over the repeats of tokens a second over those of
plain `generate` in the same repeat; tau is that of all repeats together.

With `--differences TOKENS`, batches are written with and without a drafter from the same seed, drafters and proposals in turn,
until so many tokens were compared; noted is where each text parts from plain `generate`'s, if it does.

What was measured is kept in `--work`, and not measured again in the same way; the result has all that is there.
`--source before` marks rows that were measured with the source of an earlier commit (by PYTHONPATH).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_pardraft.evaluation.calls import Condition
from result_files import RESULTS, public_command, save, this_machine
from sampled_measure import Case, all_compared, case_of, quick_case, repeat_of
from sampled_report import difference_summary, difference_table, rows_of, save_plot, speed_table
from stories260k import KINDS

RESULT = RESULTS / "sampled_text.json"
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
# What figures depend on, by its name in what is kept.
SETTINGS = {"new_tokens_at_most": "max_new_tokens", "prompts_per_repeat": "prompts"}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def kept_before(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What an earlier command measured, if it was in the same way."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return kept if all(kept.get(name) == vars(arguments)[own] for name, own in SETTINGS.items()) else {}


def measure_speed(case: Case, kind: str, temperature: float, arguments: argparse.Namespace) -> None:
    """Measure the repeats that are missing, and keep each."""
    path = arguments.work / f"speed-{arguments.source}-{kind}-{temperature:g}.json"
    repeats = kept_before(path, arguments).get("repeats", [])
    while len(repeats) < arguments.repeats:
        turns = repeat_of(case, kind, temperature, len(repeats), arguments.prompts, arguments.max_new_tokens)
        repeats.append([vars(turn) for turn in turns])
        save(path, {"source": arguments.source, "temperature": temperature, **facts(arguments), "repeats": repeats})


def measure_differences(case: Case, batch_size: int, temperature: float, arguments: argparse.Namespace) -> None:
    """Compare texts until there are enough, and keep the comparison."""
    name = f"differences-{arguments.dtype}-{batch_size}-{temperature:g}.json"
    path = arguments.work / name
    if sum(seed["tokens"] for seed in kept_before(path, arguments).get("seeds", [])) >= arguments.differences:
        return
    condition = Condition(batch_size, temperature, arguments.max_new_tokens)
    case.target.to(DTYPES[arguments.dtype])
    seeds = list(all_compared(case, arguments.only, arguments.differences, condition))
    run = {"dtype": arguments.dtype, "temperature": temperature, "batch_size": batch_size, **facts(arguments)}
    save(path, {**run, "seeds": seeds}, indent=1)


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured, where and how."""
    return {
        "machine": f"{this_machine()}, transformers {transformers.__version__}",
        "command": public_command(),
        **{name: vars(arguments)[own] for name, own in SETTINGS.items()},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stories", type=Path, help="folder of the stories260K target")
    parser.add_argument("--drafters", type=Path, help="work folder of benchmarks/stories260k.py, with drafters for it")
    parser.add_argument("--prompt-text", type=Path, help="stories to continue, a paragraph each")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="drafters to measure")
    parser.add_argument("--temperatures", type=float, nargs="*", default=list(TEMPERATURES), help="0 is greedy")
    parser.add_argument("--repeats", type=int, default=5, help="turns; speeds are medians of them")
    parser.add_argument("--prompts", type=int, default=5, help="texts of a repeat")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--source", default="now", help="what the source that is measured is called in the result")
    parser.add_argument("--differences", type=int, metavar="TOKENS", help="compare as many tokens, and time nothing")
    parser.add_argument("--batch-size", type=int, default=16, help="of the texts that are compared")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of what is compared")
    parser.add_argument("--work", type=Path, default=Path("sampled_text.work"), help="what was measured is kept here")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--plots", action="store_true", help="draw speed by temperature beside the output")
    parser.add_argument("--quick", action="store_true", help="a tiny random target and untrained drafters")
    arguments = parser.parse_args()
    if not arguments.quick and None in (arguments.stories, arguments.drafters, arguments.prompt_text):
        parser.error("--stories, --drafters and --prompt-text say what to measure (or --quick)")
    return arguments


def read_results(work: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(work.glob(pattern))]


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    arguments.work.mkdir(parents=True, exist_ok=True)
    most = max(arguments.repeats * arguments.prompts, 4 * arguments.batch_size)
    case = quick_case(most) if arguments.quick else case_of(arguments, most)
    for temperature in arguments.temperatures:
        if arguments.differences:
            measure_differences(case, arguments.batch_size, temperature, arguments)
            continue
        for kind in arguments.only:
            measure_speed(case, kind, temperature, arguments)
    speeds = read_results(arguments.work, "speed-*.json")
    rows = [row for run in speeds for row in rows_of(run["source"], run["temperature"], run["repeats"])]
    comparisons = read_results(arguments.work, "differences-*.json")
    summaries = [difference_summary(run) for run in comparisons]
    save(arguments.output, {"rows": rows, "differences": summaries, "measured": speeds, "compared": comparisons})
    if rows:
        print(speed_table(rows), end="\n\n")
    if summaries:
        print(difference_table(summaries))
    if arguments.plots:
        save_plot(rows, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
