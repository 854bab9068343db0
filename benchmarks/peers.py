"""Our loop beside the published loops of z-lab (DFlash), DDTree, AMD (PARD) and DART, in one process, with the same weights.

    OMP_THREAD_LIMIT=1 taskset -c 0 python benchmarks/peers.py --z-lab dflash --ddtree ddtree --pard PARD --dart DART

Each option is a checkout: github.com/z-lab/dflash, liranringel/ddtree, AMD-AGI/PARD and fvliang/DART; DDTree and DART need a
compiler and ninja for their C++. The demo family decodes the built-in prompts: greedy, float32, one text at a time, one core (or
`--threads 2`, without OMP_THREAD_LIMIT), nothing compiled (but for two small functions of DART's drafter, which its authors
compile). Each peer's loop has a target of its own. All take turns on each prompt; seconds are processor time of the thread (of
several threads, of the clock), the prompt's own forward included, and every ratio is a median of the turns. tau are new tokens
for each forward of the target, the prompt's included. What was measured is saved after each turn.

Our loop drafts what the peer's does: chains as deep, or trees of as many nodes, in every round, all else by default; and once
more by `draft_schedule="auto"`, the default, which decides itself, and looks the text up. Trees with n-grams read the same
counts: Python's library, without the modules of the prompts.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from hf_pardraft import NgramModel
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import built_in_prompts
from hf_pardraft.evaluation.calls import Condition, call, generation_config
from hf_pardraft.evaluation.entries import PLAIN, Entry, plain_entry
from hf_pardraft.evaluation.measurement import padded_batch
from hf_pardraft.evaluation.report import markdown_table
from hf_pardraft.user_input.models import end_of_text_ids, up_to_end
from peer_loop_dart import dart_loops
from peer_loops import PeerLoop, Task, ddtree_loops, pard_loop, zlab_loop
from result_files import RESULTS, public_command, save, this_machine

RESULT = RESULTS / "peers.json"
NGRAM_BUDGET = 60
BUDGETS = (16, NGRAM_BUDGET)
CHAIN = {"draft_schedule": "fixed", "tree_budget": 0}


@dataclass
class Way:
    """One way to write a text, and what was seen of it.

    Attributes:
        name: of its row.
        layer: a layer of its target that each forward runs through once.
        write: from token ids `(1, length)` to those of prompt and text.
        rival: the name of the way of ours that drafts the same; `None` for ours.
        texts: the new tokens of each prompt.
        forwards: of its target, for all prompts.
        seconds: of each turn, those of each prompt.
    """

    name: str
    layer: nn.Module
    write: Callable[[torch.LongTensor], torch.LongTensor]
    rival: str | None = None
    texts: list[list[int]] = field(default_factory=list)
    forwards: int = 0
    seconds: list[list[float]] = field(default_factory=list)


def tree(budget: int) -> dict[str, Any]:
    return {"draft_schedule": "fixed", "tree_budget": budget}


def our_way(task: Task, name: str, kind: str | None, setting: dict[str, Any], ngram: NgramModel | None = None) -> Way:
    """A `generate` call with one of the family's drafters, or with none; `ngram` is of its trees."""
    drafter = None if kind is None else task.family.drafters[kind]
    entry = plain_entry() if drafter is None else Entry(name, drafter, setting)
    condition = Condition(max_new_tokens=task.max_new_tokens)

    def write(prompt: torch.LongTensor) -> torch.LongTensor:
        if drafter is not None:
            drafter.ngram = ngram
        return call(task.family.target, entry, padded_batch([prompt]), generation_config(entry, condition))

    return Way(name, task.family.target.model.layers[0], write)


def peer_way(name: str, loop: PeerLoop, rival: str) -> Way:
    return Way(name, loop.layer, loop.write, rival)


def dflash_ways(task: Task, arguments: argparse.Namespace) -> list[Way]:
    """The loops for DFlash drafters, of z-lab and DDTree."""
    ways = []
    if arguments.z_lab:
        ways += [peer_way("z-lab, DFlash chain", zlab_loop(arguments.z_lab, task), "ours, DFlash chain")]
        ways += [our_way(task, "ours, DFlash chain", "DFlash", CHAIN)]
    if arguments.ddtree:
        for budget, loop in ddtree_loops(arguments.ddtree, task, BUDGETS).items():
            rival = f"ours, DFlash tree of {budget}"
            ways += [peer_way(f"DDTree, {budget} nodes", loop, rival)]
            ways += [our_way(task, rival, "DFlash", tree(budget))]
    return [*ways, auto_way(task, "DFlash")] if ways else []


def pard_ways(task: Task, arguments: argparse.Namespace) -> list[Way]:
    """AMD's loop with the attention that it asks for, and with transformers' usual one."""
    if not arguments.pard:
        return []
    rival = "ours, PARD chain"
    ways = [
        peer_way(f"AMD, PARD chain, {attention}", pard_loop(arguments.pard, task, attention), rival)
        for attention in ("eager", "sdpa")
    ]
    return [*ways, our_way(task, rival, "PARD", CHAIN), auto_way(task, "PARD")]


def dart_ways(task: Task, arguments: argparse.Namespace) -> list[Way]:
    """DART's loop without and with n-grams."""
    if not arguments.dart:
        return []
    loops, counts = dart_loops(arguments.dart, task, NGRAM_BUDGET)
    ways = []
    for has_ngrams, loop in loops.items():
        trees = f"{NGRAM_BUDGET} nodes{', n-grams' if has_ngrams else ''}"
        ways += [peer_way(f"DART, {trees}", loop, f"ours, DART {trees}")]
        ways += [our_way(task, f"ours, DART {trees}", "DART", tree(NGRAM_BUDGET), counts if has_ngrams else None)]
    return [*ways, auto_way(task, "DART")]


def auto_way(task: Task, kind: str) -> Way:
    """Our loop as it is by default."""
    return our_way(task, f"ours, {kind} auto", kind, {"draft_schedule": "auto"})


def watch(way: Way, task: Task) -> None:
    """Write each text once, untimed, and note it and the forwards that it took."""
    ends = end_of_text_ids(task.family.target)
    calls: list[None] = []
    hook = way.layer.register_forward_pre_hook(lambda *_: calls.append(None))
    for prompt in task.prompts:
        new_tokens = way.write(prompt)[0, prompt.shape[1] :][: task.max_new_tokens].tolist()
        way.texts.append(up_to_end(new_tokens, ends))
    hook.remove()
    way.forwards = len(calls)


def seconds_of(way: Way, prompt: torch.LongTensor) -> float:
    """Processor time of this thread for one text, if it is the only one."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    way.write(prompt)
    return clock() - started


def take_turn(ways: list[Way], task: Task, turn: int) -> None:
    """Time all ways on each prompt; who begins changes from turn to turn."""
    for way in ways:
        way.seconds.append([])
    for prompt in task.prompts:
        for index in range(len(ways)):
            way = ways[(turn + index) % len(ways)]
            way.seconds[-1].append(seconds_of(way, prompt))


def ratios(way: Way, other: Way) -> list[float]:
    """How many times as fast as another a way is in each turn, over all prompts."""
    return [sum(theirs) / sum(own) for own, theirs in zip(way.seconds, other.seconds, strict=True)]


def ratio(way: Way, other: Way) -> float:
    """The median of the turns' ratios."""
    return median(ratios(way, other))


def row_of(way: Way, by_name: dict[str, Way]) -> dict[str, Any]:
    """The figures of one way."""
    plain, num_tokens = by_name[PLAIN], sum(map(len, way.texts))
    per_turn = [sum(seconds) for seconds in way.seconds]
    row = {
        "name": way.name,
        "speedup": round(ratio(way, plain), 3),
        "tau": round(num_tokens / way.forwards, 3),
        "forwards": way.forwards,
        "same_text": way.texts == plain.texts,
        "seconds_per_turn": round(median(per_turn), 4),
        "milliseconds_per_forward": round(1000 * median(per_turn) / way.forwards, 3),
    }
    if way.rival is not None:
        ours = by_name[way.rival]
        row |= {"ours": way.rival, "ours_over_it": round(ratio(ours, way), 3)}
        row["ours_over_it_in_turns"] = [round(value, 3) for value in sorted(ratios(ours, way))]
    return row


def rows_of(ways: list[Way]) -> list[dict[str, Any]]:
    by_name = {way.name: way for way in ways}
    return [row_of(way, by_name) for way in ways]


def facts_of(task: Task, turns: int) -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "command": public_command(),
        "machine": this_machine(),
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "clock": "processor time of the thread" if torch.get_num_threads() == 1 else "wall time",
        "prompts": len(task.prompts),
        "prompt_tokens": [prompt.shape[1] for prompt in task.prompts],
        "new_tokens_at_most": task.max_new_tokens,
        "turns": turns,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("name", "speedup", "tau", "milliseconds_per_forward", "same_text", "ours", "ours_over_it")
    lines = [[str(row.get(name, "")) for name in columns] for row in rows]
    print(markdown_table([*columns], lines, num_words=len(columns)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for option, name in (("z-lab", "DFlash"), ("ddtree", "DDTree"), ("pard", "PARD"), ("dart", "DART")):
        parser.add_argument(f"--{option}", type=lambda text: Path(text).resolve(), help=f"checkout of {name}'s code")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7, help="turns; figures are medians of them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    family = load_family(SHIPPED_FAMILY)
    prompts = [family.tokenizer(text, return_tensors="pt")["input_ids"] for text in built_in_prompts()]
    with tempfile.TemporaryDirectory() as work:
        task = Task(family, prompts[: arguments.prompts], arguments.max_new_tokens, Path(work))
        ways = [our_way(task, PLAIN, None, {})]
        for make in (dflash_ways, pard_ways, dart_ways):
            ways += make(task, arguments)
        # A peer's import may have asked for others.
        torch.set_num_threads(arguments.threads)
        for way in ways:
            watch(way, task)
        for turn in range(arguments.repeats):
            take_turn(ways, task, turn)
            rows = rows_of(ways)
            save(arguments.output, {**facts_of(task, turn + 1), "rows": rows})
    print_table(rows)


if __name__ == "__main__":
    main()
