"""How fast an n-gram model is built and looked up, how large it is, and what it brings to token trees.

    python benchmarks/ngram.py --tokenizer PATH/qwen2.5

The text is the source of the Python library that runs this, without the modules that the demo's prompts are from. It is
tokenised first, which is not timed. Building is measured in one process and thread, from token ids on; a level of the
search is 20 contexts from the text, each with the same 25 candidates, taken from other places of it (so most are unseen) and
from after the contexts (so some are seen). Every level is looked up once in a fresh model and again when all of them have
been, since the first look-ups read the file. Trees are those of the demo's target and drafters: greedy, on the demo's
prompts. The result goes to benchmarks/results/ngram.json.
"""

import argparse
import inspect
import json
import platform
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_pardraft import NgramModel
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import BEGINNINGS, built_in_prompts
from hf_pardraft.evaluation.calls import Condition
from hf_pardraft.evaluation.entries import Entry, plain_entry
from hf_pardraft.evaluation.measurement import race
from hf_pardraft.evaluation.rows import compare
from hf_pardraft.ngram.sources import token_documents
from result_files import RESULTS, public_command, save, this_machine

RESULT = RESULTS / "ngram.json"
BEAMS, CANDIDATES = 20, 25
WALK_LEVELS = 8
TREE_BUDGET = 59
PARTS = ("building", "looking_up", "trees")
# Order, max_memory, min_count.
BUILDS = [(3, "1GB", 1), (3, "64MB", 1), (3, "1GB", 2), (2, "1GB", 1), (4, "1GB", 1), (5, "1GB", 1)]
# By name, generation settings beside the budget; an order of 0 is no model.
TREES = {
    "tree": (0, {}),
    "tree, DART's weights without the model": (0, {"tree_scoring": "dart", "tree_beam_width": 20, "tree_top_k": 25}),
    "tree + 3-grams": (3, {}),
    "tree + 3-grams from the first token on": (3, {"ngram_first_level": 0}),
    "tree + 3-grams, weight 0.25": (3, {"ngram_weight": 0.25}),
    "tree + 3-grams, weight 1": (3, {"ngram_weight": 1.0}),
    "tree + 3-grams, probability scoring": (3, {"tree_scoring": "probability"}),
    "tree + 3-grams, stupid backoff": (3, {"ngram_smoothing": "stupid_backoff"}),
    "tree + 3-grams, interpolated": (3, {"ngram_smoothing": "interpolated"}),
    "tree + 3-grams, pruned at 2": (-3, {}),
    "tree + 2-grams": (2, {}),
    "tree + 4-grams": (4, {}),
}


def library_texts(megabytes: float) -> list[str]:
    """Python files of the standard library, whole, up to a size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {Path(inspect.getsourcefile(beginning)) for beginning in BEGINNINGS}
    texts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or path in left_out or size > 1e6 * megabytes:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        texts.append(text)
    return texts


def building(documents: list[np.ndarray], vocab_size: int, repeats: int) -> list[dict]:
    """Tokens a second and bytes an n-gram, for several orders and memories."""
    num_tokens, rows = sum(map(len, documents)), []
    for order, max_memory, min_count in BUILDS:
        seconds = []
        for _ in range(repeats):
            started = time.process_time()
            model = NgramModel.from_token_stream(
                documents, vocab_size=vocab_size, order=order, max_memory=max_memory, min_count=min_count
            )
            seconds.append(time.process_time() - started)
        rows.append(
            {
                "order": order,
                "max_memory": max_memory,
                "min_count": min_count,
                "tokens_per_core_second": round(num_tokens / min(seconds)),
                "ngrams": model.info.num_ngrams,
                "bytes": model.path.stat().st_size,
                "bytes_per_longest_ngram": round(model.path.stat().st_size / model.info.num_ngrams[-1], 2),
            }
        )
    return rows


def levels_of(documents: list[np.ndarray], num_levels: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Contexts `(1, beams, 8)` and candidates `(1, candidates)`, see the head of this file."""
    ids, generator = np.concatenate(documents), np.random.default_rng(seed)
    levels = []
    for _ in range(num_levels):
        starts = generator.integers(0, len(ids) - 9, BEAMS)
        contexts = np.stack([ids[start : start + 8] for start in starts])
        candidates = np.concatenate([ids[starts[:5] + 8], ids[generator.integers(0, len(ids), CANDIDATES - 5)]])
        levels.append((torch.from_numpy(contexts).long()[None], torch.from_numpy(candidates).long()[None]))
    return levels


@torch.inference_mode()
def looking_up(documents: list[np.ndarray], vocab_size: int, order: int, num_levels: int) -> dict:
    """Microseconds a level."""
    levels = levels_of(documents, num_levels, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        NgramModel.from_token_stream(documents, vocab_size=vocab_size, order=order, save_directory=folder)
        model = NgramModel.from_pretrained(folder, verify=False)
        row = {"order": order, "contexts": BEAMS, "candidates": CANDIDATES}
        for name in ("first", "again"):
            micros = []
            for contexts, candidates in levels:
                started = time.perf_counter()
                model(contexts, candidates)
                micros.append(1e6 * (time.perf_counter() - started))
            row |= {
                f"{name}_median_us": round(statistics.median(micros)),
                f"{name}_95_percent_below_us": round(sorted(micros)[int(0.95 * len(micros))]),
            }
        row |= walking(model, levels)
        seen = torch.stack([(model(*level) > 0).float().mean() for level in levels]).mean()
        row["share_seen"] = round(float(seen), 3)
        return row


def walking(model: NgramModel, levels: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
    """Microseconds and operations a level of a walk."""
    micros, generator = [], torch.Generator().manual_seed(0)
    # The root has no prefix beside it.
    sizes = [CANDIDATES, *[BEAMS * CANDIDATES] * (WALK_LEVELS - 1)]
    for start in range(0, len(levels) - WALK_LEVELS, WALK_LEVELS):
        context = levels[start][0][:, 0]
        candidates = torch.stack([tokens for _, tokens in levels[start : start + WALK_LEVELS]], dim=1)
        extensions = [torch.randperm(size, generator=generator)[None, :BEAMS] for size in sizes]
        for _ in range(2):
            started = time.perf_counter()
            walk_down(model, context, candidates, extensions)
            micros.append(1e6 * (time.perf_counter() - started) / WALK_LEVELS)
    with Operations() as operations:
        walk_down(model, context, candidates, extensions)
    return {
        "walk_median_us_a_level": round(statistics.median(micros)),
        "walk_operations_a_level": round(operations.count / WALK_LEVELS, 1),
    }


def walk_down(model: NgramModel, context: torch.Tensor, candidates: torch.Tensor, extensions: list) -> None:
    walk = model.walk(context, candidates)
    for chosen in extensions:
        walk.probabilities()
        walk.step(chosen)


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def growing_trees(texts: list[str], max_new_tokens: int, repeats: int) -> list[dict]:
    """What the model brings to the demo's drafters: tau and speed on the demo's prompts."""
    family = load_family(SHIPPED_FAMILY)
    documents = list(token_documents(texts, family.tokenizer))
    prompts = [family.tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in built_in_prompts()]
    with tempfile.TemporaryDirectory() as folder:
        names = {}
        for order in sorted({order for order, _ in TREES.values() if order}):
            names[order] = str(Path(folder) / str(order))
            NgramModel.from_token_stream(
                documents,
                tokenizer=family.tokenizer,
                vocab_size=family.target.config.vocab_size,
                order=abs(order),
                min_count=2 if order < 0 else 1,
                save_directory=names[order],
            )
        entries = [plain_entry()]
        for name, drafter in family.drafters.items():
            entries.append(Entry(f"{name}, chain", drafter, {"draft_schedule": "fixed"}))
            for tree, (order, settings) in TREES.items():
                ngram = {"ngram_model": names[order]} if order else {}
                entries.append(Entry(f"{name}, {tree}", drafter, {"tree_budget": TREE_BUDGET, **ngram, **settings}))
        condition = Condition(max_new_tokens=max_new_tokens, repeats=repeats)
        rows = compare(race(family.target, entries, prompts, condition), condition)
        return [
            {"name": row.name, "tau": round(row.tau, 3), "tokens_per_second": round(row.tokens_per_second, 1)}
            for row in rows
        ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=str(SHIPPED_FAMILY / "target"), help="a folder or a Hub repository")
    parser.add_argument("--megabytes", type=float, default=40, help="of text")
    parser.add_argument("--levels", type=int, default=500, help="to look up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="leave the others as the result has them"
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    texts = library_texts(arguments.megabytes)
    documents = [np.array(ids, dtype=np.int32) for ids in token_documents(texts, tokenizer)]
    report = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    report["machine"] = f"{this_machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    text = {"files": len(texts), "megabytes": round(sum(map(len, texts)) / 1e6, 1)}
    ids = {**text, "tokens": sum(map(len, documents)), "vocab_size": len(tokenizer)}
    parts = {
        "building": lambda: {"text": ids, "rows": building(documents, len(tokenizer), arguments.repeats)},
        "looking_up": lambda: {
            "text": ids,
            "rows": [looking_up(documents, len(tokenizer), order, arguments.levels) for order in (2, 3, 4, 5)],
        },
        "trees": lambda: {"text": text, "rows": growing_trees(texts, arguments.max_new_tokens, arguments.repeats)},
    }
    for name in arguments.only:
        report[name] = {"command": public_command(), **parts[name]()}
        print(json.dumps({name: report[name]}, indent=2), flush=True)
        save(arguments.output, report)


if __name__ == "__main__":
    main()
