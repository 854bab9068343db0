"""What conditional drop-token saves: positions, step time and peak memory of a PARD training step, against all masks.

    python benchmarks/cod.py

A step is collating one text of N tokens, all of them learned, and forward and backward of a small random drafter; one thread,
float32, dense masks. Attention is what grows fastest, so the drafter is kept so small that little else is measured: one layer
of width 32. Time is the processor's, the better of two steps. Memory is how much a fresh process grows beyond what it held
before its first step. "all masks" is the same code with a retention of 1; settings whose all-mask step would have more than
--max-rows positions are not run, and only their number and the size of their mask are told. The result goes to
benchmarks/results/cod.json.
"""

import argparse
import json
import platform
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pardraft import PardDrafter
from hf_pardraft.training.layouts import DroppedMasks
from memory import held_bytes, in_a_process, peak_bytes
from result_files import RESULTS, save

RESULT = RESULTS / "cod.json"
DRAFT_TOKENS, LENGTHS = (4, 8, 12, 16), (512, 1024, 2048, 4096)
RETENTION, MIN_RETENTION = 0.7, 0.2
VOCAB_SIZE, WIDTH = 256, 32


def small_drafter() -> PardDrafter:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=max(LENGTHS),
    )
    return PardDrafter.from_causal_lm(LlamaForCausalLM(config), mask_token_id=VOCAB_SIZE - 1).train()


def train_step(drafter: PardDrafter, collator: DroppedMasks, text: list[int]) -> int:
    """One step; returns how many positions it had."""
    batch = collator([{"input_ids": text, "labels": text}])
    labels = DroppedMasks.supervised(batch, drafter).labels
    logits = DroppedMasks.forward(drafter, drafter, None, batch, None, lambda head, states: head(states))
    torch.nn.functional.cross_entropy(logits, labels).backward()
    drafter.zero_grad()
    return batch["input_ids"].shape[1]


def measure(num_tokens: int, length: int, retention: float, repeats: int) -> dict:
    """Positions, seconds and megabytes of a step, in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    drafter = small_drafter()
    collator = DroppedMasks(VOCAB_SIZE - 1, num_tokens, retention, MIN_RETENTION)
    text = torch.randint(0, VOCAB_SIZE - 1, (length,)).tolist()
    # What torch allocates once is none of the step's.
    train_step(drafter, collator, text[:16])
    before, seconds, peaks = held_bytes(), [], []
    for _ in range(repeats):
        start = time.process_time()
        num_rows = train_step(drafter, collator, text)
        seconds.append(time.process_time() - start)
        peaks.append(peak_bytes() - before)
    # Of the first step: what the allocator has not given back by the second is none of it.
    peak = peaks[0]
    return {"rows": num_rows, "seconds": round(min(seconds), 3), "peak_mb": round(peak / 1e6, 1)}


def compare(num_tokens: int, length: int, max_rows: int, repeats: int) -> dict:
    """COD beside all masks, for one K and N."""
    # Block j has no position before place j, and every text's last token predicts nothing.
    all_rows = length + sum(length - 1 - j for j in range(1, num_tokens))
    row = {"draft_tokens": num_tokens, "length": length}
    row["cod"] = in_a_process("fork", measure, num_tokens, length, RETENTION, repeats)
    row["all_masks"] = {"rows": all_rows, "seconds": None, "peak_mb": None}
    if all_rows <= max_rows:
        row["all_masks"] = in_a_process("fork", measure, num_tokens, length, 1.0, repeats)
        assert row["all_masks"]["rows"] == all_rows
    row["all_masks"]["mask_mb"] = round(all_rows**2 * 4 / 1e6, 1)
    return row


def table_line(row: dict) -> str:
    cod, every = row["cod"], row["all_masks"]
    unless_run = {name: "-" if every[name] is None else every[name] for name in ("seconds", "peak_mb")}
    return (
        f"K={row['draft_tokens']:>2} N={row['length']:>4}  positions {cod['rows']:>6} of {every['rows']:>6} "
        f"({cod['rows'] / every['rows']:.0%})  {cod['seconds']:>7} s of {unless_run['seconds']:>7}  "
        f"{cod['peak_mb']:>7} MB of {unless_run['peak_mb']:>7}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rows", type=int, default=33_000, help="of a step with all masks; memory is its square")
    parser.add_argument("--quick", action="store_true", help="two small settings, once, and nothing is stored")
    parser.add_argument("--resume", action="store_true", help="keep the settings that are stored")
    arguments = parser.parse_args()
    settings = [(k, n) for k in DRAFT_TOKENS for n in LENGTHS]
    if arguments.quick:
        settings = [(4, 256), (8, 256)]
    rows = stored_rows() if arguments.resume else []
    for num_tokens, length in settings:
        if any((row["draft_tokens"], row["length"]) == (num_tokens, length) for row in rows):
            continue
        rows.append(compare(num_tokens, length, arguments.max_rows, repeats=1 if arguments.quick else 2))
        print(table_line(rows[-1]), flush=True)
        if not arguments.quick:
            store(rows)


def stored_rows() -> list[dict]:
    return json.loads(RESULT.read_text())["settings"] if RESULT.exists() else []


def store(rows: list[dict]) -> None:
    result = {
        "command": "python benchmarks/cod.py",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "retention": RETENTION,
        "min_retention": MIN_RETENTION,
        "drafter": f"llama, 1 layer of width {WIDTH}, vocabulary {VOCAB_SIZE}",
        "settings": rows,
    }
    save(RESULT, result, indent=1)


if __name__ == "__main__":
    main()
