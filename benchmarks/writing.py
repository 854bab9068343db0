"""Tokens a second of `pardraft regenerate`, beside plain `generate` of the same batches, and beside an earlier checkout.

    python benchmarks/writing.py --target SmolLM2-135M-Instruct --before ../earlier/src

The prompts are first messages of users from benchmarks/data; the target answers them with at most --max-tokens tokens. "plain"
is `generate` of one batch after another, the prompts sorted by length; "before" is `LocalWriter` of the checkout that --before
names, "after" that of this one, and "compiled" the same once its steps are compiled, as they are after some minutes of writing.
Each way runs --repeats times, in turn, each time in a process of its own; one thread, processor time, the best run counts. Texts
that differ from plain's are counted (greedy only), and the peak of memory is told. "limit" is what a full batch's products with
the weights alone would allow, each by the packed weight, with no prompt to read. The result goes to
benchmarks/results/writing_DTYPE.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.rewriting import Rewrite
from hf_pardraft.evaluation.prompt_sources import read_rows
from memory import peak_bytes
from result_files import RESULTS, public_command, save, this_machine

PROMPTS = Path(__file__).parent / "data" / "smollm2-135m-instruct"
WAYS = ("plain", "before", "after", "compiled", "limit")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--before", help="the src folder of an earlier checkout")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--top-p", type=float, default=0.95, help="with a temperature above 0")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def first_messages(count: int) -> list[Rewrite]:
    """Rows to be answered."""
    rows = (row for file in sorted(PROMPTS.glob("*.jsonl.gz")) for row in read_rows(file))
    return [Rewrite(index, {"messages": row["messages"][:1]}) for index, row in enumerate(islice(rows, count))]


def plain_texts(writer: LocalWriter, rewrites: list[Rewrite]) -> dict[int, list[int]]:
    """The tokens that plain `generate` writes, by row."""
    prompts = sorted(((len(ids), row.index, ids) for row in rewrites for ids in [writer.prompt_ids(row)]), reverse=True)
    sampling = {"do_sample": False}
    if writer.temperature:
        sampling = {"do_sample": True, "temperature": writer.temperature, "top_p": writer.top_p, "top_k": 0}
    texts = {}
    for start in range(0, len(prompts), writer.batch_size):
        batch = prompts[start : start + writer.batch_size]
        length = batch[0][0]
        ids = torch.tensor([[writer.pad_id] * (length - count) + ids for count, _, ids in batch])
        real = torch.tensor([[0] * (length - count) + [1] * count for count, _, _ in batch])
        written = writer.target.generate(
            ids,
            attention_mask=real,
            max_new_tokens=writer.max_tokens,
            eos_token_id=sorted(writer.end_ids),
            pad_token_id=writer.pad_id,
            **sampling,
        )
        for (_, index, _), tokens in zip(batch, written[:, length:].tolist(), strict=True):
            end = next((place for place, token in enumerate(tokens, start=1) if token in writer.end_ids), None)
            texts[index] = tokens[:end]
    return texts


def limit(target: PreTrainedModel, batch_size: int) -> float:
    """Tokens a second that the products of a step with the weights of linear layers allow, the best of ten steps."""
    # An earlier checkout has none.
    from hf_pardraft.generation.packing.packed_layers import packed_layers

    layers = [module for module in target.modules() if isinstance(module, torch.nn.Linear)]
    tokens = {layer.in_features: torch.randn(batch_size, layer.in_features, dtype=target.dtype) for layer in layers}
    times = []
    with torch.no_grad(), packed_layers(target, wanted=True):
        for _ in range(11):
            started = time.process_time()
            for layer in layers:
                layer(tokens[layer.in_features])
            times.append(time.process_time() - started)
    return batch_size / min(times)


def run(options: argparse.Namespace, way: str, temperature: float) -> None:
    """One way, in this process; prints what it took."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype))
    writer = LocalWriter(
        target,
        tokenizer,
        temperature=temperature,
        top_p=options.top_p if temperature else 1.0,
        max_tokens=options.max_tokens,
        batch_size=options.batch_size,
    )
    if way == "limit":
        print(json.dumps({"tokens_a_second": round(limit(target, options.batch_size) * options.threads, 1)}))
        return
    rewrites = first_messages(options.rows)
    if way == "compiled":
        writer.steps.seconds = math.inf
        list(writer.write(first_messages(2)))
        assert writer.steps.num_steps, "the target's steps can't be compiled"
        writer.num_tokens = 0
    started = time.process_time()
    if way == "plain":
        written = plain_texts(writer, rewrites)
        num_tokens = sum(map(len, written.values()))
        texts = {index: writer.answer_of(tokens, []).text for index, tokens in written.items()}
    else:
        texts = {row.index: row.messages[-1]["content"] for row in writer.write(rewrites)}
        num_tokens = writer.num_tokens
    seconds = (time.process_time() - started) / options.threads
    found = {"tokens": num_tokens, "seconds": round(seconds, 2), "tokens_a_second": round(num_tokens / seconds, 1)}
    print(
        json.dumps({**found, "peak_megabytes": peak_bytes() >> 20, "texts": [texts[index] for index in sorted(texts)]})
    )


def in_a_process(options: argparse.Namespace, way: str, temperature: float) -> dict:
    """What [`run`] prints in a process of its own, with the checkout that the way asks for."""
    command = [sys.executable, __file__, "--target", options.target, "--way", way]
    command += ["--temperatures", str(temperature)]
    for name in ("dtype", "top_p", "rows", "batch_size", "max_tokens", "threads"):
        command += [f"--{name.replace('_', '-')}", str(vars(options)[name])]
    source = options.before if way == "before" else str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compared(options: argparse.Namespace, temperature: float) -> dict:
    """All ways, in turn."""
    ways = [way for way in WAYS if way != "before" or options.before]
    runs = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way in ways:
            runs[way].append(in_a_process(options, way, temperature))
            print(temperature, way, runs[way][-1]["tokens_a_second"], flush=True)
    best = {way: max(found, key=lambda one: one["tokens_a_second"]) for way, found in runs.items()}
    texts = {way: one.pop("texts", []) for way, one in best.items()}
    result = {"temperature": temperature, **best}
    for way in ways[1:]:
        if not temperature and way != "limit":
            result[way]["texts_unlike_plain"] = sum(map(str.__ne__, texts[way], texts["plain"]))
        result[way]["times_plain"] = round(result[way]["tokens_a_second"] / result["plain"]["tokens_a_second"], 2)
    return result


def main() -> None:
    options = parse_arguments()
    if options.way:
        run(options, options.way, options.temperatures[0])
        return
    rows = [compared(options, temperature) for temperature in options.temperatures]
    settings = {name: vars(options)[name] for name in ("dtype", "rows", "batch_size", "max_tokens", "top_p", "repeats")}
    save(
        options.output or RESULTS / f"writing_{options.dtype}.json",
        {"command": public_command(), "machine": this_machine(), **settings, "results": rows},
    )


if __name__ == "__main__":
    main()
