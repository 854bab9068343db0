"""How near a forward of a few tokens is to the time in which a CPU can read the weights, and what drafting brings there.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/memory_limit.py --parts forwards generate --dtypes float32 bfloat16

Targets have the shape of SmolLM2-135M's layers and random weights. Every figure is a median of turns, in which all ways follow
each other.

forwards    The target's forward, as a round makes it, over one token and over several: uncompiled, uncompiled with packed
            weights, compiled, compiled with inductor's `freezing`, and compiled with packed weights. The limit is the bytes that
            it has to read (weights and the KV cache's columns) over the bandwidth of one plain read of 512 MiB, measured in the
            same turns.
generate    Tokens a second with a drafter that is always right (SIMULATED), eight tokens a round, uncompiled and compiled, with
            and without packed weights, with a draft vocabulary of 8,192 tokens, and that with a drafter in bfloat16, beside plain
            `generate`, uncompiled and compiled. Plain `generate` can't be frozen: inductor takes transformers' static cache,
            whose tensors are marked as static, for constants, and what it compiles writes out of bounds. How fast it could be is
            the frozen forward of one token, above.

Each part, dtype and number of layers is one entry of the result, and replaces what an earlier command has measured with as many
threads.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from acceptance_profile import AcceptanceProfile
from decode_limits import bytes_read, weight_bytes
from hf_pardraft import DFlashDrafter
from hf_pardraft.evaluation.entries import Entry, plain_entry
from hf_pardraft.generation.compiled import steps
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.compiled.static_cache import new_static_cache
from hf_pardraft.generation.packing import huge_pages, packed_weights
from hf_pardraft.generation.packing.fast_attention import fast_attention
from hf_pardraft.generation.packing.packed_layers import packed_layers
from hf_pardraft.generation.tree.token_tree import chain_tree
from result_files import RESULTS, public_command, save, this_machine
from simulation import Simulation, write_script

DEPTH = 7
NUM_CACHED, CAPACITY = 200, 256
NEW_TOKENS = 256
# Tokens that a drafter with a draft vocabulary proposes; the text has no others.
DRAFT_VOCABULARY = 8192
# Turns before those that count: products are tried in both ways before the faster one is known, in each forward once, and in each
# text in dozens of rounds.
WARM_UP = {"forwards": 26, "generate": 4}
UNCOMPILED_PACKED = "uncompiled, packed"
FROZEN = CompileConfig(mode=None, options={"freezing": True}, dynamic=False)
COMPILED = CompileConfig(mode=None, dynamic=False)


def smollm2(num_layers: int, dtype: torch.dtype, quick: bool = False) -> PreTrainedModel:
    """Random weights in the shape of SmolLM2-135M, but for the number of layers, or a tiny target."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    if not quick:
        size = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(
        **size,
        vocab_size=512 if quick else 49152,
        num_hidden_layers=num_layers,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def freezing(name: str) -> AbstractContextManager:
    """Where weights become constants, if a way is called so: Dynamo asks inductor's settings, not a call's options."""
    return torch._inductor.config.patch(freezing=name.endswith("frozen"))


def in_turns(
    ways: dict[Any, Callable[[], Any]],
    repeats: int,
    warm_up: int,
    around: Callable[[Any], AbstractContextManager] = lambda name: nullcontext(),
) -> dict[Any, list[float]]:
    """Seconds of all ways, turn by turn, after a few of each in which everything is compiled and packed that there is.

    Args:
        ways: a call by its name.
        repeats, warm_up: how many turns, and how many before them.
        around: what a way's call runs in; to enter it is not timed.
    """
    found: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(warm_up + repeats):
        for name, call in ways.items():
            with around(name):
                found[name].append(seconds_of(call))
    return {name: seconds[warm_up:] for name, seconds in found.items()}


def measure_forwards(dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows of the target's forward."""
    target = smollm2(arguments.layers, dtype, arguments.quick)
    read = memory_to_read(arguments.quick)
    ways: dict[Any, Callable[[], Any]] = {"read": read.sum}
    for num_tokens in arguments.tokens:
        side, tree = target_side(target), chain_tree(torch.arange(num_tokens - 1)[None] + 10)
        for name in ("uncompiled", UNCOMPILED_PACKED):
            ways[name, num_tokens] = lambda side=side, tree=tree: steps.read(side, tree)
        compilers = {
            "compiled": Compiler(target, COMPILED),
            "compiled, frozen": Compiler(target, FROZEN),
            "compiled, packed": Compiler(target, COMPILED, packs=True),
        }
        for name, compiler in compilers.items():
            shape = (name, num_tokens)

            def call(compiler=compiler, shape=shape, side=side, tree=tree) -> None:
                with freezing(shape[0]):
                    compiler(steps.read, shape, side, tree)

            ways[shape] = call

    def around(way: Any) -> AbstractContextManager:
        return packed_layers(target, wanted=True) if way[0] == UNCOMPILED_PACKED else nullcontext()

    with fast_attention(target):
        times = in_turns(ways, arguments.repeats, WARM_UP["forwards"], around)
    bandwidth = read.nbytes / median(times.pop("read"))
    cached = sum(tensor.nbytes for layer in side.cache.layers for tensor in (layer.keys, layer.values))
    size = weight_bytes(target, target.get_input_embeddings()) + cached
    ones = {name: median(seconds) for (name, num_tokens), seconds in times.items() if num_tokens == 1}
    rows = [
        {
            "way": name,
            "tokens": num_tokens,
            "milliseconds": round(1000 * median(seconds), 2),
            "over_one_token": round(median(seconds) / ones[name], 2),
            "over_one_token_of_the_best": round(median(seconds) / min(ones.values()), 2),
            "over_limit": round(median(seconds) * bandwidth / size, 2),
        }
        for (name, num_tokens), seconds in times.items()
    ]
    # A copy is as large as its weight, but for what fills its last panel up. What an earlier dtype packed may be there still.
    packed = sum(weight.nbytes for weight in target.parameters() if packed_weights.is_packed(weight, transposed=False))
    return {
        "bandwidth_gb_per_second": round(bandwidth / 1e9, 1),
        "bytes_read": size,
        "limit_milliseconds": round(1000 * size / bandwidth, 2),
        "packed_bytes": packed,
        "rows": rows,
    }


def memory_to_read(quick: bool = False) -> torch.Tensor:
    """Several times what fits into the processor's caches, in huge pages, as packed weights are."""
    return huge_pages.empty((2**20 if quick else 2**26,), torch.float64).zero_()


def target_side(target: PreTrainedModel) -> steps.TargetSide:
    """A target with a text of `NUM_CACHED` tokens in its static KV cache."""
    config = target.config
    shape = (1, config.num_key_value_heads, NUM_CACHED, config.hidden_size // config.num_attention_heads)
    entries = [(torch.randn(shape).to(target.dtype), torch.randn(shape).to(target.dtype)) for _ in target.model.layers]
    length, anchor = torch.tensor([NUM_CACHED]), torch.tensor([[5]])
    places = length[None].clone(), torch.ones_like(length), length[None] + CAPACITY
    decode_state = steps.DecodeState(length, length.clone(), anchor, *places)
    cache = new_static_cache(entries, CAPACITY)
    return steps.TargetSide(target, {}, {"full_attention": None}, [], cache, decode_state)


def measure_generate(dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows of whole texts."""
    target = smollm2(arguments.layers, dtype, arguments.quick)
    drafter, narrow, half = (
        DFlashDrafter.for_target(target, num_layers=1, block_size=DEPTH + 1, mask_token_id=1).to(own_dtype).eval()
        for own_dtype in (dtype, dtype, torch.bfloat16)
    )
    num_proposed = min(DRAFT_VOCABULARY, target.config.vocab_size // 2)
    for each in (narrow, half):
        each.set_draft_vocabulary(torch.arange(num_proposed))
    prompt = torch.arange(2, 18)[None]
    script = write_script(num_proposed, 18 + NEW_TOKENS + 4 * DEPTH, {0, 1})
    simulation = Simulation(target, script, AcceptanceProfile(rate=1.0))
    fixed = {"draft_schedule": "fixed", "tree_budget": 0}
    static = {"cache_implementation": "static", "compile_config": COMPILED}
    settings = {
        "plain": (None, {}),
        "plain compiled": (None, static),
        "drafted": (drafter, {**fixed, "pack_weights": False}),
        "drafted, packed": (drafter, fixed),
        "drafted, compiled": (drafter, {**fixed, **static, "pack_weights": False}),
        "drafted, compiled, packed": (drafter, {**fixed, **static}),
        "drafted, compiled, packed, draft vocabulary": (narrow, {**fixed, **static}),
    }
    if dtype != half.dtype:
        settings["the same, drafter in bfloat16"] = (half, {**fixed, **static})
    texts: dict[str, torch.LongTensor] = {}

    def way(name: str) -> Callable[[], None]:
        assistant, options = settings[name]
        entry = Entry(name, assistant, options) if assistant is not None else plain_entry()

        def call() -> None:
            with simulation.during(entry), kept_packed():
                texts[name] = write(target, prompt, assistant, options)

        return call

    times = in_turns({name: way(name) for name in settings}, arguments.repeats, WARM_UP["generate"])
    read = memory_to_read(arguments.quick)
    bandwidth = read.nbytes / median(in_turns({"read": read.sum}, arguments.repeats, WARM_UP["generate"])["read"])
    speeds = {name: NEW_TOKENS / median(seconds) for name, seconds in times.items()}
    best_plain = max(speed for name, speed in speeds.items() if name.startswith("plain"))
    size = {name: bytes_read(target, entry[0]) for name, entry in settings.items() if entry[0] is not None}
    plain_size = weight_bytes(target, target.get_input_embeddings())
    rows = []
    for name, speed in speeds.items():
        tokens = DEPTH + 1 if name in size else 1
        limit = tokens * bandwidth / size.get(name, plain_size)
        rows.append(
            {
                "way": name,
                "tokens_per_second": round(speed, 1),
                "over_best_plain": round(speed / best_plain, 2),
                "bytes_read_a_round": size.get(name, plain_size),
                "tokens_per_second_at_the_limit": round(limit, 1),
                "of_limit": round(speed / limit, 2),
                "text_is_plain": torch.equal(texts[name], texts["plain"]),
            }
        )
    facts = {"new_tokens": NEW_TOKENS, "acceptance": "SIMULATED: drafts are always right"}
    return {**facts, "bandwidth_gb_per_second": round(bandwidth / 1e9, 1), "rows": rows}


@contextmanager
def kept_packed() -> Iterator[None]:
    """Keep what other calls have packed, which a call that packs nothing forgets."""
    held = dict(packed_weights._packed)
    yield
    packed_weights._packed.update(held)


def write(target: PreTrainedModel, prompt: torch.LongTensor, drafter: Any, options: dict[str, Any]) -> torch.LongTensor:
    """A text of `NEW_TOKENS` tokens."""
    own = {name: options[name] for name in ("draft_schedule", "tree_budget", "pack_weights") if name in options}
    if drafter is not None:
        for name in ("draft_schedule", "tree_budget", "pack_weights"):
            setattr(drafter.generation_config, name, own.get(name))
    rest = {name: value for name, value in options.items() if name not in own}
    if "compile_config" in rest:
        rest["compile_config"]._compile_all_devices = True
    mask = torch.ones_like(prompt)
    return target.generate(
        prompt, attention_mask=mask, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False, **rest
    )


PARTS = {"forwards": measure_forwards, "generate": measure_generate}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=10, help="of the target; SmolLM2 has 30")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16], help="of the forwards; 1 among them")
    parser.add_argument("--repeats", type=int, default=15, help="turns; figures are medians of them")
    parser.add_argument("--quick", action="store_true", help="tiny targets")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory_limit.json")
    arguments = parser.parse_args()
    if 1 not in arguments.tokens:
        parser.error("--tokens needs 1, whose time the others are compared with")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    entries = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for part in arguments.parts:
        for dtype in arguments.dtypes:
            with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
                measured = PARTS[part](getattr(torch, dtype), arguments)
            facts = {"machine": this_machine(), "command": public_command(), "repeats": arguments.repeats}
            name = f"{part}, {dtype}, {arguments.layers} layers, {torch.get_num_threads()} threads"
            entries[name] = {**facts, **measured}
            save(arguments.output, dict(sorted(entries.items())))
            for row in measured["rows"]:
                print(part, dtype, *row.values())


if __name__ == "__main__":
    main()
