"""Whether a drafter leaves the text as it is, on every architecture that transformers registers for causal language modelling.

    python benchmarks/architectures.py
    python benchmarks/architectures.py --only llama gemma3_text --variants default "rope yarn" --output some.json

Targets are tiny and random (architecture_cases.py), in the variants that their configurations have a choice of
(architecture_variants.py: every type of RoPE, windows, experts, ...). On each, greedy text with a drafter is compared with plain
`generate`, token for token, in float32: chains and trees, one sequence and a ragged batch of three, prompts beyond every window
and on both sides of the length where factors of RoPE change; with a drafter that reads token ids only (PARD) and one that reads
the target's hidden states (DFlash), whose drafts are made right three times in four. So is what `for_target` says.

Outcomes: the same text; refused (one sentence, before any work); differs (then in float64, too, and by how much the likeliest
token was ahead, which tells a tie of rounding from an error); crashed, with anything but a refusal; and where plain `generate`
itself fails, or the target can't be built, that. What was measured is kept in `--work`, line by line, and not measured
again (what was wrong is, with `--retry-wrong`). `--page` writes what is served and what is refused, for people:
docs/supported_targets.md.
"""

import argparse
import json
import sys
import warnings
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from architecture_cases import registered
from architecture_page import is_wrong, page_of, print_rows
from architecture_trials import CASES, try_variant
from architecture_variants import variants_of
from hf_pardraft.checkpoints.atomic_files import write_whole
from result_files import RESULTS, public_command, save

RESULT = RESULTS / "architectures.json"
PAGE = Path(__file__).parents[1] / "docs" / "supported_targets.md"


def chosen(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Model types and variants to try."""
    unknown = sorted(set(arguments.only or ()) - registered().keys())
    if unknown:
        raise SystemExit(f"transformers registers no {', '.join(unknown)} for causal language modelling")
    pairs = [(name, variant) for name in arguments.only or registered() for variant, _ in variants_of(name)]
    return [(name, variant) for name, variant in pairs if not arguments.variants or variant in arguments.variants]


def tried_before(path: Path, but_wrong: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """What an earlier command tried, by model type and variant; the latest of each.

    Args:
        path: of the rows.
        but_wrong: whether to forget those whose text differed, or that crashed.
    """
    lines = path.read_text().splitlines() if path.exists() else ()
    rows = {(row["architecture"], row["variant"]): row for row in map(json.loads, lines)}
    return {pair: row for pair, row in rows.items() if not (but_wrong and is_wrong(row))}


def try_quietly(pair: tuple[str, str]) -> dict[str, Any]:
    """[`try_variant`] in a process of its own."""
    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    return try_variant(*pair)


def sweep(pairs: list[tuple[str, str]], jobs: int, log: Path, but_wrong: bool) -> list[dict[str, Any]]:
    """Try what is missing; returns a row for each pair."""
    rows = tried_before(log, but_wrong)
    missing = [pair for pair in pairs if pair not in rows]
    log.parent.mkdir(parents=True, exist_ok=True)
    with get_context("spawn").Pool(jobs) as pool, log.open("a") as file:
        for number, row in enumerate(pool.imap_unordered(try_quietly, missing), start=1):
            rows[row["architecture"], row["variant"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number}/{len(missing)} {row['architecture']}, {row['variant']}", file=sys.stderr, flush=True)
    return [rows[pair] for pair in pairs]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model types; by default all")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="by default all that a configuration allows")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--work", type=Path, default=Path("architectures.work"), help="what was tried is kept here")
    parser.add_argument("--retry-wrong", action="store_true", help="try again what differed or crashed before")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help="write the page of what is served")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity(logging.CRITICAL)
    rows = sweep(chosen(arguments), arguments.jobs, arguments.work / "rows.jsonl", arguments.retry_wrong)
    result = {
        "command": public_command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": [case.label for case in CASES],
        "rows": rows,
    }
    save(arguments.output, result, indent=1)
    print_rows(rows)
    if arguments.page is not None:
        write_whole(arguments.page, page_of(result))


if __name__ == "__main__":
    main()
