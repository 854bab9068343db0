"""What attention of a round takes: with keys copied for each head, as in transformers, without copies, and by our kernel.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/round_attention.py

One token or several after a text, with their mask, in one layer of a target. All ways take turns, and every figure is a median of
the turns, in microseconds. Results are compared: without copies they are the same to the last bit, by our kernel to rounding.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from hf_pardraft.generation.packing.token_attention import attend
from result_files import RESULTS, public_command, save, this_machine

# Heads of keys, queries for each of them, and the size of a head.
SHAPES = {"SmolLM2-135M": (3, 3, 64), "Qwen3-0.6B": (8, 2, 128), "Qwen3-8B": (8, 4, 128)}
# How often each way is taken in a turn.
TAKES = 20


def measured(shape: tuple[int, int, int], text: int, tokens: int, dtype: torch.dtype, turns: int) -> dict[str, float]:
    """Microseconds of each way."""
    heads, queries, size = shape
    query = torch.randn(1, heads * queries, tokens, size).to(dtype)
    key, value = (torch.randn(1, heads, text, size).to(dtype) for _ in range(2))
    mask, scale = torch.zeros(1, 1, tokens, text, dtype=dtype), size**-0.5
    ways = {
        "copied": lambda: scaled_dot_product_attention(query, repeat_kv(key, queries), repeat_kv(value, queries), mask),
        "shared": lambda: scaled_dot_product_attention(query, key, value, mask, enable_gqa=True),
        "kernel": lambda: attend(query, key, value, mask, scale).transpose(1, 2),
    }
    copied, shared, ours = (way() for way in ways.values())
    assert torch.equal(copied, shared)
    torch.testing.assert_close(ours, copied, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    seconds = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(TAKES):
                way()
            seconds[name].append((time.perf_counter() - started) / TAKES)
    return {name: round(1e6 * median(found), 1) for name, found in seconds.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, nargs="+", default=[200, 1000], help="tokens of the text")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 17], help="of a round")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "round_attention.json")
    return parser.parse_args()


def main() -> None:
    options, rows = parse_arguments(), []
    with torch.no_grad():
        for dtype in options.dtypes:
            for name, shape in SHAPES.items():
                for text in options.texts:
                    for tokens in options.tokens:
                        found = measured(shape, text, tokens, getattr(torch, dtype), options.turns)
                        faster = round(min(found["copied"], found["shared"]) / found["kernel"], 2)
                        rows.append(
                            {"dtype": dtype, "shape": name, "text": text, "tokens": tokens, **found, "faster": faster}
                        )
                        print(*rows[-1].values(), flush=True)
    save(options.output, {"command": public_command(), "machine": this_machine(), "turns": options.turns, "rows": rows})


if __name__ == "__main__":
    main()
