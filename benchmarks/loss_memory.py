"""What lm_head and loss of a training step need in memory, positions taken a chunk at a time against all at once.

    python benchmarks/loss_memory.py --out benchmarks/results/loss_memory.json

Each row of the table is measured in a process of its own: it makes an lm_head, the hidden states of the supervised positions,
and where the target's law is learned the target's hidden states and head; notes the memory that it then has; and runs one
step's lm_head, loss and backward pass. What is reported is by how much the process's peak (its largest resident set) exceeds
that. The gradient of the lm_head is part of it, and is given beside it. The C library is told to give back what is freed
(MALLOC_MMAP_THRESHOLD_), or else its own stock would be measured.
"""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from hf_pardraft.training.losses.scoring import PositionScorer
from memory import held_bytes, in_a_process, peak_bytes
from result_files import public_command, save, this_machine

MIB = 2**20
OBJECTIVES = ("cross_entropy", "forward_kl")


@dataclass(frozen=True)
class Setting:
    """One step.

    Attributes:
        objective: with the text's tokens alone, or with the target's law too.
        rows_per_chunk: how many positions go through the lm_head at a time.
        rows, hidden, vocab: sizes.
    """

    objective: str
    rows_per_chunk: int
    rows: int
    hidden: int
    vocab: int


def measure_all(settings: list[Setting]) -> list[dict]:
    """Each in a process of its own."""
    results = []
    for setting in settings:
        results.append(in_a_process("fork", measure, setting))
        print(json.dumps(results[-1]), flush=True)
    return results


def measure(setting: Setting) -> dict:
    """One step, and what it needed, after a tiny one that loads what the operations need."""
    step(Setting(setting.objective, 2, 4, 8, 16))
    return step(setting)


def step(setting: Setting) -> dict:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(setting.hidden, setting.vocab, bias=False)
    nn.init.normal_(head.weight, std=setting.hidden**-0.5, generator=generator)
    states = torch.randn(setting.rows, setting.hidden, generator=generator, requires_grad=True)
    labels = torch.randint(0, setting.vocab, (setting.rows,), generator=generator)
    target_logits = None
    if setting.objective == "forward_kl":
        target_weight = torch.randn(setting.vocab, setting.hidden, generator=generator) * setting.hidden**-0.5
        target_states = torch.randn(setting.rows, setting.hidden, generator=generator)

        def target_logits(rows: slice) -> torch.Tensor:
            return target_states[rows] @ target_weight.T

    scorer = PositionScorer(
        labels,
        with_log_probs=setting.objective == "cross_entropy",
        target_logits=target_logits,
        chunk_size=setting.rows_per_chunk,
    )
    before = held_bytes()
    scored = scorer(head, states)
    loss = -scored["log_probs"].mean() if target_logits is None else scored["divergences"].mean()
    loss.backward()
    return {
        **asdict(setting),
        "all_logits_mib": round(setting.rows * setting.vocab * 4 / MIB),
        "head_gradient_mib": round(head.weight.grad.nbytes / MIB),
        "peak_mib": round((peak_bytes() - before) / MIB),
        "loss": round(loss.item(), 4),
        "gradient_norm": round(states.grad.norm().item(), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="supervised positions of a step")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 512], help="positions at a time, besides all")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--out", type=Path, help="where to write the table, as JSON")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    settings = [
        Setting(objective, rows_per_chunk, options.rows, options.hidden, options.vocab)
        for objective in options.objectives
        for rows_per_chunk in (*options.chunks, options.rows)
    ]
    # The C library looks at its environment when a process begins.
    results = in_a_process("spawn", measure_all, settings)
    if options.out:
        save(options.out, {"machine": this_machine(), "command": public_command(), "rows": results})


if __name__ == "__main__":
    main()
