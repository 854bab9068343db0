"""What a drafter that is always wrong costs beside plain `generate`, with the adaptive depth and without.

    python benchmarks/adaptive_depth.py --stories PATH/stories260K

The target is made sure of a prescribed text and the drafter is an oracle that never guesses it (see loop_overhead.py). The
runs take turns, and each counts with its fastest repeat. Cost is the time over plain `generate`'s, minus one.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from loop_overhead import DEPTH, PROMPT_LENGTH, Bench, random_target
from loop_probe import prescribe
from result_files import save, this_machine

WAYS = ("plain", "fixed depth", "adaptive depth")


def seconds_of(bench: Bench, way: str) -> float:
    """Seconds of one generate call."""
    length = PROMPT_LENGTH + bench.max_new_tokens
    script = prescribe(bench.target.config.vocab_size, length, DEPTH, rate=0.0, in_tree=False)
    bench.probe.start(script)
    bench.drafter.generation_config.adaptive_depth = way == "adaptive depth"
    prompt = script.text[None, :PROMPT_LENGTH]
    drafting = {} if way == "plain" else {"assistant_model": bench.drafter}
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": bench.max_new_tokens}
    started = time.perf_counter()
    text = bench.target.generate(prompt, **options, **drafting)
    seconds = time.perf_counter() - started
    if not torch.equal(text[0], script.text[:length]):
        raise RuntimeError(f"{bench.name}, {way}: the text is not the prescribed one")
    return seconds


def measure(bench: Bench, repeats: int) -> list[dict]:
    """One result row per way of decoding."""
    seconds = {way: [] for way in WAYS}
    drafts = {}
    for _ in range(repeats):
        for way in WAYS:
            seconds[way].append(seconds_of(bench, way))
            stats = bench.drafter.last_stats
            drafts[way] = 0 if way == "plain" else sum(drafted > 0 for drafted in stats.drafted_per_round)
    plain = min(seconds["plain"])
    return [
        {
            "target": bench.name,
            "way": way,
            "milliseconds_per_token": round(1000 * min(seconds[way]) / bench.max_new_tokens, 3),
            "cost": round(min(seconds[way]) / plain - 1, 3),
            "drafts": drafts[way],
            "tokens": bench.max_new_tokens,
        }
        for way in WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--stories", type=Path, help="folder of the stories260K target; without it, the random one only"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the rows and what they were measured on")
    parser.add_argument("--quick", action="store_true", help="a tiny random target, short texts")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    benches = []
    if arguments.stories:
        target = AutoModelForCausalLM.from_pretrained(arguments.stories, dtype=torch.float32).eval()
        benches.append(Bench("stories260K", target, 1, 300, time.perf_counter))
    name, num_tokens = ("tiny random", 60) if arguments.quick else ("random 100M", 200)
    benches.append(Bench(name, random_target(arguments.quick), 2, num_tokens, time.perf_counter))
    rows = [row for bench in benches for row in measure(bench, arguments.repeats)]
    report = {"machine": this_machine(), "repeats": arguments.repeats, "rows": rows}
    if arguments.output:
        save(arguments.output, report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
