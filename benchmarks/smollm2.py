"""SmolLM2-135M-Instruct and its drafters on the papers' benchmarks: tau, speed, acceptance by position, and the text.

    S="benchmarks/smollm2.py --target SMOLLM2 --drafters drafters --data DATA"
    python $S --tau --dtypes bfloat16 --max-new-tokens 128                                                   # 12 minutes
    python $S --tau --dtypes bfloat16 --tree-budget 60 --lookup-tokens 20 --only tree_text                   # 10
    python $S --tau --dtypes bfloat16 --benchmarks humaneval --limit 8 --batch-sizes 1 --only chain          # 3
    pardraft ngram build 3-grams --tokenizer SMOLLM2 --dataset "benchmarks/data/smollm2-135m-instruct/*.jsonl.gz"
    python $S --tau --max-new-tokens 128 --ngrams 3-grams --only tree tree_ngrams                            # 20, in float32
    WAYS="prompt_lookup stock_dflash chain tree auto"
    python $S --speed --dtypes bfloat16 --temperatures 0 1 --only $WAYS                                      # 120
    python $S --speed --rounds eager --dtypes bfloat16 --only auto_alone                                     # 9
    python $S --speed --dtypes float32 --temperatures 0 1 --max-new-tokens 128 --only $WAYS                  # 123
    BATCHES="--batch-sizes 4 --limit 4 --max-new-tokens 128"
    python $S --speed --rounds eager --dtypes bfloat16 --temperatures 0 1 $BATCHES --only chain tree auto    # 48
    python $S --speed --rounds eager --dtypes float32 --temperatures 0 1 $BATCHES --only chain tree auto     # 54
    python benchmarks/smollm2.py --page --plot docs/images/smollm2.png

The minutes are those that the commands took on one core with bfloat16 in hardware. Without `--rounds eager` compiled rounds are
measured, too; compiling a shape takes up to a minute.

The first turns of HumanEval, MBPP, GSM8K (test), MATH-500, MT-Bench and Spec-Bench's prompts, `--limit` of each, taken from all
over it, with the chat template; from the files of `--data`, or from the Hub. Up to 256 new tokens.

`--tau` counts, so that it needs no quiet machine: each drafter drafts as deep as it can in every round, as a chain, as a tree
of 16 nodes, and as one that holds a branch from the text itself, too, and every round is watched. The texts are decoded
together in batches, which changes no count but where rounding makes another text of one (such texts are counted). tau is
tokens per forward of the target and text, the bonus token included. That of transformers' prompt lookup is found without a
forward, by what it proposes along plain `generate`'s text.

`--speed` lets all ways take turns on each text: plain `generate`, prompt lookup, transformers' own DFlash loop, and each
drafter in these ways, and tuning itself (`draft_schedule="auto"`, the default) with and without the text's branch, uncompiled
and (but for transformers' loops) compiled with a static cache. Seconds are those of whole calls, the prompt's forward
included. A speedup is the median of the turns' ratios of tokens a second, over the faster one of plain `generate` uncompiled
and compiled in the same dtype, by benchmark.

The text is to be plain `generate`'s, token for token: at temperature 0 in the same dtype, except where the target's logits are a
near tie; at temperature 1 under the same seed.

What is measured is a cell: a benchmark in a dtype, at a temperature, in batches of a size, with trees of a size. Its rows are
kept as soon as they are there, and not measured again, unless prompts, lengths or a drafter's weights are others; so a long
measurement can be made of several commands, also at the same time. Without either, the tables of what is there are printed;
`--page` puts them into docs/smollm2.md, and `--plot` draws the speedups.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.facts import installed_versions, machine
from hf_pardraft.generation.settings import DEFAULT_LOOKUP
from result_files import RESULTS, public_command, save
from smollm2_cases import BENCHMARKS, DRAFTED, SCHEDULED, WAYS, Models, Way, load_all, prompts_of, ways_of
from smollm2_measure import counted, timed, warm_longest
from smollm2_page import CONDITION, PAGE, renewed, tables_of
from smollm2_plot import save_plot

RESULT = RESULTS / "smollm2.json"
DTYPES = ("float32", "bfloat16")
IDENTITY = ("measured", "benchmark", "dtype", "temperature", "batch_size", "tree_budget")
# What figures of a cell depend on, besides the drafters' weights.
SETTINGS = {
    "tau": ("limit", "max_new_tokens", "lookup_tokens"),
    "speed": ("limit", "max_new_tokens", "turns"),
}
Cell = dict[str, Any]


def read_result(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}


def keep(path: Path, about: dict[str, Any], cell: Cell) -> None:
    """Put a cell into the result, whose other cells another command may have renewed meanwhile."""
    result = read_result(path)
    drafters = {**result.get("drafters", {}), **about["drafters"]}
    identity = [cell[key] for key in IDENTITY]
    cells = [each for each in result["cells"] if [each[key] for key in IDENTITY] != identity]
    names = [*BENCHMARKS]
    cells = sorted(
        [*cells, cell],
        key=lambda c: (c["measured"] == "speed", *(c[key] for key in CONDITION), names.index(c["benchmark"])),
    )
    save(path, {**about, "drafters": drafters, "cells": cells}, indent=1)


def known_cell(path: Path, cell: Cell) -> Cell:
    """What was measured before of this cell, in the same way."""
    for each in read_result(path)["cells"]:
        if all(each[key] == cell[key] for key in (*IDENTITY, "settings")):
            return each
    return {"rows": [], "commands": [], "seconds": 0.0}


def is_known(way: Way, rows: list[dict[str, Any]], models: Models) -> bool:
    facts = way.facts(models.weights)
    return any(all(row[key] == value for key, value in facts.items()) for row in rows)


def merged(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by name, the new ones for old ones of theirs."""
    names = {row["name"] for row in new}
    return [row for row in rows if row["name"] not in names] + new


def measure_cell(
    what: str,
    benchmark: str,
    condition: Condition,
    models: Models,
    prompts: list[torch.LongTensor],
    arguments: argparse.Namespace,
) -> None:
    """Measure the rows that are missing, and keep each (those that take turns, together)."""
    cell = {
        "measured": what,
        "benchmark": benchmark,
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "temperature": condition.temperature,
        "batch_size": condition.batch_size,
        "tree_budget": arguments.tree_budget,
        "settings": {name: vars(arguments)[name] for name in SETTINGS[what]},
    }
    known = known_cell(arguments.output, cell)
    rows = known["rows"]
    ways = (
        counted_ways(models, arguments, condition)
        if what == "tau"
        else ways_of(models, arguments, condition.batch_size)
    )
    ways = [way for way in ways if not is_known(way, rows, models)]
    if not ways:
        return
    print(title_of(cell), flush=True)
    about = {"target": arguments.target.resolve().name, "drafters": models.about_drafters()}
    started = time.perf_counter()
    found = (counted if what == "tau" else timed)(models, ways, prompts, condition)
    for new in found:
        rows = merged(rows, new)
        facts = {
            "machine": machine(models.target.device),
            "versions": installed_versions(),
            "commands": list(dict.fromkeys([*known["commands"], public_command()])),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "prompt_tokens": [prompt.shape[1] for prompt in prompts],
            "seconds": round(known["seconds"] + time.perf_counter() - started, 1),
        }
        keep(arguments.output, about, {**cell, **facts, "rows": rows})
        for row in new:
            print(f"  {line_of(row)}", flush=True)


def counted_ways(models: Models, arguments: argparse.Namespace, condition: Condition) -> list[Way]:
    """The ways whose counts do not depend on the clock; what prompt lookup proposes is known along greedy texts only."""
    eager = argparse.Namespace(**{**vars(arguments), "rounds": ["eager"]})
    counted = [way for way in DRAFTED if way not in SCHEDULED]
    if condition.temperature == 0:
        counted.append("prompt_lookup")
    return [way for way in ways_of(models, eager, batch_size=1) if way.way in counted]


def title_of(cell: Cell) -> str:
    return (
        f"{cell['measured']}: {cell['benchmark']}, {cell['dtype']}, temperature {cell['temperature']:g}, "
        f"batch {cell['batch_size']}"
    )


def line_of(row: dict[str, Any]) -> str:
    """A row, for the terminal."""
    tau = "        " if row["tau"] is None else f"tau {row['tau']:4.2f}"
    speed = f"  {row['tokens_per_second']:6.1f} tokens/s  {row['over_eager_plain']:5.2f}x" if "turns" in row else ""
    same = f"{row['texts'] - row['different']} of {row['texts']} texts are plain's"
    ties = f", {row['near_ties']} near ties" if row["near_ties"] else ""
    return f"{row['name']:36} {tau}{speed}  {same}{ties}"


def measure(what: str, arguments: argparse.Namespace) -> None:
    """All cells that were asked for."""
    for dtype in arguments.dtypes:
        models = load_all(arguments, dtype)
        prompts = {name: prompts_of(name, models, arguments) for name in arguments.benchmarks}
        conditions = [
            Condition(size, temperature, arguments.max_new_tokens, repeats=arguments.turns)
            for temperature, size in product(arguments.temperatures, arguments.batch_sizes)
        ]
        for condition in conditions:
            if what == "speed" and "compiled" in arguments.rounds:
                warm_longest(models, [prompt for each in prompts.values() for prompt in each], condition)
            for name, texts in prompts.items():
                measure_cell(what, name, condition, models, texts, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tau", action="store_true", help="count: tau, acceptance by position, texts")
    parser.add_argument("--speed", action="store_true", help="measure seconds; needs a quiet machine")
    parser.add_argument("--target", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--drafters", type=Path, help="folder of drafters for it, or one drafter")
    parser.add_argument("--data", type=Path, help="folder of the benchmarks' files; by default they come from the Hub")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="by default float32 for tau, and both for speed")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], help="0 is greedy")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="by default --limit for tau, and 1 for speed")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--names", nargs="+", metavar="DRAFTER", help="of the drafters, such as DFlare; by default all")
    parser.add_argument("--rounds", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--limit", type=int, help="prompts of a benchmark; by default 4 for tau, and 1 for speed")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--tree-budget", type=int, default=16, help="nodes of a tree")
    parser.add_argument(
        "--lookup-tokens", type=int, default=DEFAULT_LOOKUP, help="how deep what the text suggests may go into a tree"
    )
    parser.add_argument("--ngrams", type=Path, help="folder of an n-gram model, of `pardraft ngram build`, for trees")
    parser.add_argument("--turns", type=int, default=1, help="how often each way decodes each text")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help="renew the tables of docs/smollm2.md")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speedups by benchmark")
    arguments = parser.parse_args()
    if (arguments.tau or arguments.speed) and not (arguments.target and arguments.drafters):
        parser.error("--target and --drafters say what to measure")
    for name in ("target", "drafters", "data", "ngrams"):
        folder = vars(arguments)[name]
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name} expects a folder, and {folder} is none")
    if arguments.tau and arguments.speed:
        parser.error("measure one of --tau and --speed at a time: their defaults differ")
    for name, least in (("limit", 1), ("max_new_tokens", 2), ("turns", 1), ("tree_budget", 1), ("lookup_tokens", 1)):
        if vars(arguments)[name] is not None and vars(arguments)[name] < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    arguments.limit = arguments.limit or (4 if arguments.tau else 1)
    arguments.batch_sizes = arguments.batch_sizes or [arguments.limit if arguments.tau else 1]
    arguments.dtypes = arguments.dtypes or (["float32"] if arguments.tau else list(DTYPES))
    if max(arguments.batch_sizes) > arguments.limit:
        parser.error(f"a batch of {max(arguments.batch_sizes)} needs as many prompts: pass --limit")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Each shape is compiled for itself.
    with torch._dynamo.config.patch(recompile_limit=64):
        for what in ("tau", "speed"):
            if vars(arguments)[what]:
                try:
                    measure(what, arguments)
                except (ImportError, OSError, ValueError) as error:
                    sys.exit(f"error: {error}")
    result = read_result(arguments.output)
    if not result["cells"]:
        sys.exit(f"error: nothing was measured yet, and nothing is in {arguments.output}: pass --tau or --speed")
    if not arguments.tau and not arguments.speed:
        print(tables_of(result))
    if arguments.page:
        arguments.page.write_text(renewed(arguments.page.read_text(encoding="utf-8"), result), encoding="utf-8")
    if arguments.plot:
        save_plot(result, arguments.plot)


if __name__ == "__main__":
    main()
