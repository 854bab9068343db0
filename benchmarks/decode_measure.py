"""One target at one batch size: all ways to decode take turns, and become rows; see decode.py."""

from argparse import Namespace
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import CompileConfig

from decode_cases import Case, Pair
from decode_limits import CompiledForwards, EagerForwards, bytes_read, medians, memory_bandwidth
from hf_pardraft.evaluation.calls import Condition, run, watch
from hf_pardraft.evaluation.entries import STOCK_KINDS, Entry, plain_entry
from hf_pardraft.evaluation.measurement import Measured, in_batches
from hf_pardraft.evaluation.rows import summarise

# Besides plain `generate`.
COLUMNS = ("plain compiled", "stock", "eager", "compiled")


@dataclass
class Contender:
    """One way to decode, and what was seen of it.

    Attributes:
        entry: how to decode.
        pair: of its drafter; `None` for plain `generate`.
        whole, half: the runs of whole texts, and of their first halves.
        first_seconds: of its first call, which compiles.
        forwards: median seconds of the forwards by themselves, for each turn.
    """

    entry: Entry
    pair: Pair | None
    whole: Measured
    half: Measured
    first_seconds: float = 0.0
    forwards: list[dict[str, float]] = field(default_factory=list)

    @property
    def is_compiled(self) -> bool:
        return "cache_implementation" in self.entry.setting

    @property
    def seconds(self) -> float:
        return median_seconds(self.whole)

    @property
    def speed(self) -> float:
        """New tokens of all prompts a second. Each turn writes the same."""
        return sum(turns[0].num_tokens for turns in self.whole.runs) / self.seconds

    @property
    def rounds(self) -> int:
        return sum(watched.rounds for watched in self.whole.watched)

    @property
    def round_seconds(self) -> float | None:
        """Of a round after the first half of the texts; `None` if there is none."""
        rounds = self.rounds - sum(watched.rounds for watched in self.half.watched)
        return (self.seconds - median_seconds(self.half)) / rounds if rounds > 0 else None


def median_seconds(measured: Measured) -> float:
    """For all batches together, each with the median of its turns."""
    return sum(median(each.seconds for each in turns) for turns in measured.runs)


def contenders_of(case: Case, arguments: Namespace, batch_size: int) -> list[Contender]:
    """Everything that takes part, plain `generate` first."""
    static = {"cache_implementation": "static", "compile_config": compile_config(arguments.backend)}
    entries: list[tuple[Entry, Pair | None]] = [(plain_entry(), None)]
    if "plain compiled" in arguments.columns:
        entries.append((Entry("plain compiled", setting=static), None))
    for name, pair in case.pairs.items():
        ways = {column: how for column, how in (("eager", {}), ("compiled", static)) if column in arguments.columns}
        proposals = {"": {"tree_budget": 0}, f", tree {pair.tree['tree_budget']}": pair.tree}
        for suffix, proposal in proposals.items():
            for column, how in ways.items():
                title = f"{name}, ours{' compiled' if column == 'compiled' else ''}{suffix}"
                # What one round costs is measured in the middle of a text, so all rounds draft alike.
                setting = {"draft_schedule": "fixed", **pair.setting, **proposal, **how}
                entries.append((Entry(title, pair.drafter, setting), pair))
        if "stock" in arguments.columns and pair.drafter.config.drafter_kind in STOCK_KINDS:
            entries.append((Entry(f"{name}, stock DFlash loop", pair.drafter, {"speculation_type": "dflash"}), pair))
    count = len(case.prompts_for(batch_size)) // batch_size

    def nothing_yet(entry: Entry) -> Measured:
        return Measured(entry, [[] for _ in range(count)], [])

    return [
        Contender(entry, pair, nothing_yet(entry), nothing_yet(entry))
        for entry, pair in entries
        if batch_size == 1 or not entry.one_at_a_time
    ]


def compile_config(backend: str) -> CompileConfig:
    """transformers' own choice, on a CPU, too; each shape is compiled as it is, also for plain `generate`."""
    mode = CompileConfig().mode if backend == "inductor" else None
    config = CompileConfig(backend=backend, mode=mode, dynamic=False)
    config._compile_all_devices = True
    return config


def measure(case: Case, batch_size: int, arguments: Namespace) -> list[dict[str, Any]]:
    """The rows of one target and batch size."""
    whole = Condition(batch_size, max_new_tokens=case.max_new_tokens)
    half = replace(whole, max_new_tokens=case.max_new_tokens // 2)
    prompts = case.prompts_for(batch_size)
    batches = in_batches(case.target, prompts, batch_size)
    contenders = contenders_of(case, arguments, batch_size)
    for each in contenders:
        with case.around(each.entry):
            each.first_seconds = run(case.target, each.entry, batches[0], whole).seconds
            if each.is_compiled:
                # Compiled in the parts that are timed.
                watch(case.target, each.entry, batches[0], half)
            for condition, measured in ((whole, each.whole), (half, each.half)):
                measured.watched.extend(watch(case.target, each.entry, batch, condition) for batch in batches)
    for _ in range(arguments.repeats):
        for index, batch in enumerate(batches):
            for each in contenders:
                with case.around(each.entry):
                    each.whole.runs[index].append(run(case.target, each.entry, batch, whole))
                    each.half.runs[index].append(run(case.target, each.entry, batch, half))
        for each in contenders:
            if each.entry.is_parallel:
                each.forwards.append(forwards_of(case, each, batches[0], whole, arguments.forwards))
    bandwidth = memory_bandwidth(case.target.device)
    return [row_of(case, each, contenders, whole, bandwidth) for each in contenders]


def forwards_of(
    case: Case, contender: Contender, batch: dict[str, torch.Tensor], condition: Condition, repeats: int
) -> dict[str, float]:
    """Median seconds of the two forwards, repeated in the middle of the rounds that are timed."""
    at = contender.whole.watched[0].rounds * 3 // 4
    forwards = (
        CompiledForwards(case.target, max(0, at - 2), repeats)
        if contender.is_compiled
        else EagerForwards(case.target, contender.entry.assistant, at, repeats)
    )
    with case.around(contender.entry), forwards.watching():
        run(case.target, contender.entry, batch, condition)
    return medians(forwards.seconds())


def row_of(
    case: Case, contender: Contender, contenders: list[Contender], condition: Condition, bandwidth: float | None
) -> dict[str, Any]:
    """All figures of one contender."""
    plain, pair = contenders[0], contender.pair
    by_name = {each.entry.name: each for each in contenders}
    row = asdict(summarise(contender.whole, plain.whole, condition))
    round_seconds = contender.round_seconds
    row["setting"] = {name: value for name, value in row["setting"].items() if name != "compile_config"}
    row["differences"] = row["differences"][:5]
    row |= {"seconds": contender.seconds, "tokens_per_second": contender.speed}
    row["speedup"] = contender.speed / plain.speed
    eager = contender.entry.name.replace(" compiled", "") if contender.is_compiled else None
    for key, other in (("speedup_over_compiled", "plain compiled"), ("speedup_over_eager", eager)):
        row[key] = contender.speed / by_name[other].speed if other in by_name else None
    row["milliseconds_per_round"] = None if round_seconds is None else 1000 * round_seconds
    first = median(turn.seconds for turn in contender.whole.runs[0])
    row["compile_seconds"] = max(0.0, contender.first_seconds - first) if contender.is_compiled else None
    row["simulated"] = case.simulated
    row["acceptance"] = None if pair is None or pair.source is None else f"SIMULATED: {pair.source}"
    row["paper"] = pair.paper_speedup if pair else None
    row |= limits_of(case, contender, bandwidth)
    return row


def limits_of(case: Case, contender: Contender, bandwidth: float | None) -> dict[str, Any]:
    """How near a round is to its two forwards, and to the time in which their weights can be read; in milliseconds."""
    found: dict[str, Any] = dict.fromkeys(("draft_forward_ms", "verify_forward_ms", "efficiency"))
    found |= dict.fromkeys(("weights_gb", "bandwidth_gb_per_second", "bandwidth_ms", "bandwidth_efficiency"))
    round_seconds = contender.round_seconds
    if not contender.entry.is_parallel or round_seconds is None:
        return found
    complete = [turn for turn in contender.forwards if {"draft", "verify"} <= turn.keys()]
    if complete:
        draft, verify = (median(turn[name] for turn in complete) for name in ("draft", "verify"))
        found["draft_forward_ms"], found["verify_forward_ms"] = 1000 * draft, 1000 * verify
        found["efficiency"] = (draft + verify) / round_seconds
    if bandwidth is not None:
        size = bytes_read(case.target, contender.entry.assistant)
        found["weights_gb"], found["bandwidth_gb_per_second"] = size / 1e9, bandwidth / 1e9
        found["bandwidth_ms"] = 1000 * size / bandwidth
        found["bandwidth_efficiency"] = size / bandwidth / round_seconds
    return found
