"""What a training step costs, in this checkout and in an earlier one: seconds, memory, and whether the gradients are the same.

    git worktree add /tmp/before COMMIT
    python benchmarks/training_step.py --before /tmp/before/src --drafters DFlash --dtypes float32 --anchors 128

The target is random and has SmolLM2-135M's shape: 30 layers of width 576, a vocabulary of 49,152. Drafters are fresh ones as
`for_target` makes them (DFlash 5 layers, DFlare 7, DART 1); PARD's is an ordinary model of 5 such layers. A step is the target's
forward over one text, the drafter's, the loss and the backward pass; the optimiser is none of it. There is one thread, or as many
as `--threads` says.

Each checkout has a process of its own for a case. They take turns, one step at a time, so that what else the machine does slows
both. Told are medians, the ratio of steps in the same turn (median), how far each process's peak exceeds what it held before its
first step, and the relative difference of all gradients as one vector. A case that is in the file already is measured anew.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memory import held_bytes, peak_bytes
from result_files import RESULTS, public_command, save, this_machine

RESULT = RESULTS / "training_step.json"
KINDS = ("DFlash", "DFlare", "PARD", "DART")
DRAFT_TOKENS = 8
MIB = 2**20


def smollm2_shape(num_layers: int = 30) -> LlamaForCausalLM:
    torch.manual_seed(num_layers)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def fresh_drafter(kind: str, target: LlamaForCausalLM):
    # Of the checkout that this process runs.
    from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter

    mask = target.config.vocab_size - 1
    torch.manual_seed(1)
    if kind == "PARD":
        return PardDrafter.from_causal_lm(smollm2_shape(num_layers=5), mask_token_id=mask)
    if kind == "DART":
        return DartDrafter.for_target(target, draft_tokens=DRAFT_TOKENS)
    return {"DFlash": DFlashDrafter, "DFlare": DFlareDrafter}[kind].for_target(target, mask_token_id=mask)


def step_of(case: dict):
    """A function that takes a step and returns seconds of forward and backward pass, loss, and number of positions."""
    from hf_pardraft import DraftTrainingArguments
    from hf_pardraft.training.batch_scorer import BatchScorer
    from hf_pardraft.training.losses.objectives import objective_sums, total_loss

    target = smollm2_shape().eval().requires_grad_(False)
    drafter = fresh_drafter(case["drafter"], target).train()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[case["dtype"]]
    target, drafter = target.to(dtype), drafter.to(dtype)
    settings = {"num_anchors": case["anchors"], "draft_tokens": DRAFT_TOKENS, "objective": case["objective"]}
    args = DraftTrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], **settings)
    scorer = BatchScorer.for_training(drafter, target, args)
    # The last token is the mask.
    num_tokens, generator = target.config.vocab_size - 1, torch.Generator().manual_seed(0)
    ids = torch.randint(0, num_tokens, (case["length"],), generator=generator).tolist()
    batch = scorer.layout.for_drafter(drafter, args)([{"input_ids": ids, "labels": ids}])

    def step() -> dict:
        drafter.zero_grad(set_to_none=True)
        start = time.perf_counter()
        scores = scorer.scores(drafter, batch)
        sums = objective_sums(scorer.coefficients, scores, args.objective_settings(None))
        loss = total_loss(scorer.coefficients, sums)
        middle = time.perf_counter()
        loss.backward()
        seconds = {"forward": middle - start, "backward": time.perf_counter() - middle}
        return {**seconds, "loss": loss.item(), "positions": int(scores.valid.sum())}

    return step, drafter


def work(case: dict) -> None:
    """Take a step for each line that comes in. An empty one ends it: the gradients are written, and the peak is told."""
    torch.set_num_threads(case["threads"])
    step, drafter = step_of(case)
    before = held_bytes()
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        print(json.dumps(step()), flush=True)
    gradients = [weight.grad.flatten().float() for weight in drafter.parameters() if weight.grad is not None]
    torch.save(torch.cat(gradients), case["gradients"])
    print(json.dumps({"peak_mib": round((peak_bytes() - before) / MIB)}), flush=True)


class Worker:
    """A process that takes steps with the package in `source`."""

    def __init__(self, source: Path, case: dict) -> None:
        command = [sys.executable, __file__, "--work", json.dumps(case)]
        environment = {**os.environ, "PYTHONPATH": f"{source}:{Path(__file__).parent}"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        self._answer()

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}: its error is above")
        return line

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self._answer())


def compare(case: dict, sources: dict[str, Path], turns: int) -> dict:
    """Steps of all sources in turns."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in sources}
        workers = {name: Worker(source, {**case, "gradients": str(files[name])}) for name, source in sources.items()}
        steps = {name: [] for name in sources}
        for _ in range(turns):
            for name, worker in workers.items():
                steps[name].append(worker.ask("step"))
        peaks = {name: worker.ask("") for name, worker in workers.items()}
        gradients = {name: torch.load(file).double() for name, file in files.items()}
    row = {**case, "positions": steps["now"][0]["positions"]}
    for name in sources:
        parts = {
            part: round(statistics.median(step[part] for step in steps[name]), 3) for part in ("forward", "backward")
        }
        row[name] = {**parts, "loss": steps[name][0]["loss"], **peaks[name]}
    if "before" in sources:
        seconds = {name: [step["forward"] + step["backward"] for step in steps[name]] for name in sources}
        ratios = [now / before for now, before in zip(seconds["now"], seconds["before"], strict=True)]
        row["time_ratio"] = round(statistics.median(ratios), 3)
        row["memory_ratio"] = round(row["now"]["peak_mib"] / row["before"]["peak_mib"], 3)
        difference = (gradients["now"] - gradients["before"]).norm() / gradients["before"].norm()
        row["gradient_difference"] = float(f"{difference:.1e}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the folder src of an earlier checkout")
    parser.add_argument("--drafters", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--anchors", type=int, nargs="+", default=[128], help="most blocks of the text")
    parser.add_argument("--length", type=int, default=512, help="tokens of the text")
    parser.add_argument("--objective", help="another one than the drafter's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    torch.set_num_threads(options.threads)
    sources = {"before": options.before} if options.before else {}
    sources["now"] = Path(__file__).parent.parent / "src"
    for drafter in options.drafters:
        for dtype in options.dtypes:
            for anchors in options.anchors:
                case = {"drafter": drafter, "dtype": dtype, "length": options.length, "anchors": anchors}
                case |= {"objective": options.objective, "threads": options.threads}
                row = compare(case, sources, options.turns)
                print(json.dumps(row), flush=True)
                store(row, options.output)


def store(row: dict, file: Path) -> None:
    """Put a row into the file, in place of one of the same case."""
    names = ("drafter", "dtype", "length", "anchors", "objective", "threads")
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [other for other in rows if any(other[name] != row[name] for name in names)] + [row]
    save(file, {"machine": this_machine(), "command": public_command(), "rows": rows})


if __name__ == "__main__":
    main()
