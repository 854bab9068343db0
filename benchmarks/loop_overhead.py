"""What a decode loop costs besides its two models: tensor operations, waits for the device, and time.

    python benchmarks/loop_overhead.py --stories PATH/stories260K

Our loop and transformers' own decode side by side: with transformers' DFlash candidates ("stock DFlash"), and with ours
("stock"). All of them run the same untrained DFlash drafter. So that acceptance can be set, the target is made sure of a
prescribed text (a bonus on its logits, sampled or not), and the drafter's logits are replaced by an oracle's: draft
position k after an anchor is right with a set probability, drawn once for each anchor, so every loop meets the same luck.

What is counted, in the rounds between the prompt's and the last: everything that torch dispatches outside the forwards of
the target, the drafter, and the target's embedding and lm_head where a drafter borrows them. `ops_per_round` are operations
that make or change a tensor; views have a count of their own. A wait (`syncs_per_round`) is whatever makes the host wait
for an accelerator to answer, though it costs nothing on a CPU; see `WAITS`. Beside it stand uploads, tensors made of numbers
that the host knows: an accelerator gets them by a copy that the host may have to wait for as well.

Efficiency is measured speed / (tau / (target forward + draft forward)). The forwards are those of a round from the middle
of our own loop's run, repeated apart: same shapes, same length of the cache, our cache. The same divisor serves all loops
of a setting. Runs and forwards take turns, and each counts with its fastest repeat.

With --static-steps a fourth loop takes part: compiled rounds whose step functions run as they are, without a compiler. It is
what one engine for both kinds of rounds would cost where nothing is compiled.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.utils import logging

from hf_pardraft import DFlashDrafter
from hf_pardraft.generation.compiled.compiler import Compiler
from loop_probe import LoopCounter, Mark, Probe, prescribe
from result_files import public_command, save, this_machine

DEPTH = 8
PROMPT_LENGTH = 16
LOOPS = {
    "ours": ("native", {}),
    "stock": ("stock", {}),
    "stock DFlash": ("native", {"speculation_type": "dflash"}),
}
STATIC_STEPS = "static steps"
ALL_LOOPS = {**LOOPS, STATIC_STEPS: ("native", {"cache_implementation": "static"})}


@dataclass(frozen=True)
class Setting:
    """How to decode: the oracle's rate, arguments of `generate`, and the nodes of the tree (0 for a chain).

    `has_static_steps` lets [`STATIC_STEPS`] take part."""

    name: str
    rate: float
    sampling: dict
    tree_budget: int = 0
    has_static_steps: bool = False

    @property
    def loops(self) -> list[str]:
        loops = ["ours"] if self.tree_budget else list(LOOPS)
        return [*loops, STATIC_STEPS] if self.has_static_steps else loops


GREEDY = {"do_sample": False}
TOP_P = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
SETTINGS = [
    *(Setting(f"greedy chain {DEPTH}, rate {rate}", rate, GREEDY) for rate in (0.5, 0.8, 0.95)),
    *(Setting(f"temperature + top-p chain {DEPTH}, rate {rate}", rate, TOP_P) for rate in (0.5, 0.8, 0.95)),
    *(Setting(f"greedy tree 60x{DEPTH}, rate {rate}", rate, GREEDY, 60) for rate in (0.5, 0.8, 0.95)),
]


class Bench:
    """One target, with an untrained drafter of its width.

    Args:
        name: of the target, in the rows.
        target: to decode with.
        num_layers: of the drafter.
        max_new_tokens: to write in a run.
        clock: seconds.
    """

    def __init__(
        self, name: str, target: PreTrainedModel, num_layers: int, max_new_tokens: int, clock: Callable[[], float]
    ) -> None:
        self.name, self.target = name, target
        self.drafter = DFlashDrafter.for_target(target, num_layers=num_layers, block_size=DEPTH + 1, mask_token_id=0)
        self.probe = Probe(target, self.drafter, clock)
        self.max_new_tokens = max_new_tokens

    def run(self, loop: str, setting: Setting, capture_at: int = -1) -> list[Mark]:
        """One generate call; returns the marks between which whole drafts were verified."""
        max_length = PROMPT_LENGTH + self.max_new_tokens
        script = prescribe(self.target.config.vocab_size, max_length, DEPTH, setting.rate, setting.tree_budget > 0)
        self.probe.start(script, capture_at)
        decode_loop, arguments = ALL_LOOPS[loop]
        self.drafter.generation_config.decode_loop = decode_loop
        self.drafter.generation_config.tree_budget = setting.tree_budget
        self.drafter.generation_config.draft_schedule = "fixed"
        prompt = script.text[None, :PROMPT_LENGTH]
        text = self.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=self.drafter,
            max_new_tokens=self.max_new_tokens,
            **setting.sampling,
            **arguments,
        )
        if not torch.equal(text[0], script.text[:max_length]):
            raise RuntimeError(f"{loop} on {self.name}, {setting.name}: the text is not the prescribed one")
        # The first mark is the prompt's, and the last drafts are cut short by the maximum length.
        return [mark for mark in self.probe.marks[1:] if mark.num_cached <= max_length - DEPTH - 2]

    def count(self, loop: str, setting: Setting) -> tuple[dict, Counter]:
        """Means per round, and what was counted where."""
        counter, self.probe.marks = LoopCounter(self.probe), []
        with counter:
            marks = self.run(loop, setting)
        rounds = len(marks) - 1
        first, last = marks[0], marks[-1]
        row = {
            "loop": loop,
            "target": self.name,
            "setting": setting.name,
            "ops_per_round": round((last.ops - first.ops) / rounds, 1),
            "views_per_round": round((last.views - first.views) / rounds, 1),
            "syncs_per_round": round((last.waits - first.waits) / rounds, 2),
            "uploads_per_round": round((last.uploads - first.uploads) / rounds, 2),
            # A static cache does not say how much of it is in use.
            "tau": None if loop == STATIC_STEPS else round((last.num_cached - first.num_cached) / rounds, 3),
            "rounds": rounds,
        }
        # Of the rounds that count: the first mark is the prompt's.
        return row, sum((counter.sites[begun] for begun in range(2, rounds + 2)), Counter())

    def round_seconds(self, loop: str, setting: Setting, capture_at: int = -1) -> float:
        marks = self.run(loop, setting, capture_at)
        return (marks[-1].seconds - marks[0].seconds) / (len(marks) - 1)

    @torch.no_grad()
    def forward_seconds(self, repeats: int) -> tuple[float, float]:
        """Mean seconds of the captured round's target forward, and of its draft: embedding, drafter and lm_head."""
        spent = dict.fromkeys(self.probe.modules, 0.0)
        for _ in range(repeats):
            for name in self.probe.modules:
                call = self.probe.calls[name]
                call.rewind()
                started = self.probe.clock()
                call.module(*call.args, **call.kwargs)
                spent[name] += self.probe.clock() - started
        target = spent.pop("target")
        return target / repeats, sum(spent.values()) / repeats

    def measure(self, setting: Setting, repeats: int) -> list[dict]:
        """One row per loop, with counts, times and efficiency."""
        rows = [self.count(loop, setting)[0] for loop in setting.loops]
        rounds = rows[0]["rounds"]
        round_times, forward_times = {loop: [] for loop in setting.loops}, []
        for _ in range(repeats):
            # Ours comes last, so that its forwards are repeated right after it.
            for loop in reversed(setting.loops):
                round_times[loop].append(self.round_seconds(loop, setting, 1 + rounds // 2 if loop == "ours" else -1))
            forward_times.append(self.forward_seconds(rounds))
        target_seconds, draft_seconds = min(forward_times, key=sum)
        for row in rows:
            seconds = min(round_times[row["loop"]])
            row["efficiency"] = round((target_seconds + draft_seconds) / seconds, 3)
            row["round_ms"], row["target_ms"], row["draft_ms"] = (
                round(1000 * value, 3) for value in (seconds, target_seconds, draft_seconds)
            )
        return rows


def random_target(quick: bool) -> PreTrainedModel:
    """A Qwen3 of 100 million random weights, or a tiny one."""
    size = (
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        if quick
        else {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        **size,
        num_attention_heads=size["hidden_size"] // 16 if quick else 12,
        num_key_value_heads=4,
        head_dim=16 if quick else 64,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def print_table(rows: list[dict]) -> None:
    columns = ("target", "setting", "loop", "tau", "ops_per_round", "views_per_round", "syncs_per_round")
    columns += ("uploads_per_round", "round_ms", "target_ms", "draft_ms", "efficiency")
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in columns]
    for line in ({name: name for name in columns}, *rows):
        print("  ".join(str(line[name]).ljust(width) for name, width in zip(columns, widths, strict=True)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--stories", type=Path, help="folder of the stories260K target; without it, random targets only"
    )
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--skip-random", action="store_true", help="leave out the random target of 100 M weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--output", type=Path, help="file for the rows and what they were measured on")
    parser.add_argument(
        "--quick", action="store_true", help="short runs; a tiny random target in place of the large one"
    )
    parser.add_argument("--static-steps", action="store_true", help="compiled rounds without a compiler take part, too")
    parser.add_argument("--cpu-clock", action="store_true", help="processor time of one thread, for a busy machine")
    parser.add_argument(
        "--sites", action="store_true", help="list where our loop's operations come from, and time nothing"
    )
    return parser.parse_args()


def benches(arguments: argparse.Namespace):
    """The targets, one at a time."""
    clock = time.perf_counter
    if arguments.cpu_clock:
        torch.set_num_threads(1)
        clock = time.thread_time
    if arguments.stories:
        target = AutoModelForCausalLM.from_pretrained(arguments.stories, dtype=torch.float32).eval()
        yield Bench("stories260K", target, 1, 64 if arguments.quick else 300, clock)
    if not arguments.skip_random:
        name, max_new_tokens = ("tiny random", 64) if arguments.quick else ("random 100M", 100)
        yield Bench(name, random_target(arguments.quick), 2, max_new_tokens, clock)


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    settings = [
        replace(setting, has_static_steps=arguments.static_steps)
        for setting in SETTINGS
        if (arguments.only or "") in setting.name
    ]
    if arguments.static_steps:
        Compiler.__call__ = lambda compiler, step, shape, *step_arguments: step(*step_arguments)
    rows = []
    for bench in benches(arguments):
        for setting in settings:
            if arguments.sites:
                row, sites = bench.count("ours", setting)
                print(f"{bench.name}, {setting.name}: {row}")
                for site, count in sites.most_common():
                    print(f"  {count / row['rounds']:6.2f}  {site}")
                continue
            rows += bench.measure(setting, 1 if arguments.quick else arguments.repeats)
    if arguments.output:
        clock = "thread time" if arguments.cpu_clock else "wall time"
        facts = {"machine": this_machine(), "command": public_command(), "clock": clock, "repeats": arguments.repeats}
        save(arguments.output, {**facts, "rows": rows})
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_table(rows)


if __name__ == "__main__":
    main()
