"""The overhead benchmark runs, and what it counts keeps to what this package promises; times are its own business."""

import json

import loop_overhead
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
