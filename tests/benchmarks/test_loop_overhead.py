"""The overhead benchmark runs, and what it counts keeps to what this package promises; times are its own business."""

import json
import time

import loop_overhead
from hf_pardraft.generation.compiled.compiler import Compiler
from in_process import run_main


def test_a_round_of_our_loop_stays_within_its_operations_and_waits_once():
    rows = json.loads(run_main(loop_overhead.main, "--quick", "--json", "--only", "rate 0.8").out)
    chains = [row for row in rows if "chain" in row["setting"]]
    # The same luck in every loop, so the same acceptance: what is compared is the loops.
    assert {row["loop"] for row in chains} == {"ours", "stock", "stock DFlash"}
    assert len({row["tau"] for row in chains}) == 1
    limits = {"greedy chain": 50, "temperature + top-p chain": 80, "greedy tree": 200}
    for row in (row for row in rows if row["loop"] == "ours"):
        (limit,) = (limit for name, limit in limits.items() if row["setting"].startswith(name))
        assert row["ops_per_round"] <= limit
        assert row["syncs_per_round"] == 1
        assert row["tau"] > 2
        assert row["efficiency"] > 0


def test_compiled_rounds_without_a_compiler_take_part_if_asked(monkeypatch):
    monkeypatch.setattr(Compiler, "__call__", Compiler.__call__)
    options = ("--quick", "--json", "--only", "greedy chain 8, rate 0.8", "--static-steps")
    rows = {row["loop"]: row for row in json.loads(run_main(loop_overhead.main, *options).out)}
    assert {*rows} == {"ours", "stock", "stock DFlash", "static steps"}
    assert rows["static steps"]["rounds"] >= rows["ours"]["rounds"]
    assert rows["static steps"]["ops_per_round"] > rows["ours"]["ops_per_round"]


def test_the_sites_of_operations_are_those_of_the_rounds_that_count():
    target = loop_overhead.random_target(quick=True)
    bench = loop_overhead.Bench("tiny", target, 2, 48, time.perf_counter)
    setting = loop_overhead.SETTINGS[1]
    row, sites = bench.count("ours", setting)
    counted = sum(count for site, count in sites.items() if site.startswith("op "))
    # A number that the host asks for is a wait, and no operation.
    counted -= sum(count for site, count in sites.items() if site.startswith("op _local_scalar_dense"))
    assert abs(counted / row["rounds"] - row["ops_per_round"]) < 0.051
