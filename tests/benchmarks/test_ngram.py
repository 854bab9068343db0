"""The n-gram benchmark runs, and the sizes and operations that it counts keep to their budgets; times are its own business."""

import json

import ngram
from in_process import run_main


def test_building_and_looking_up_keep_to_their_budgets(tmp_path, tiny_family):
    size = ["--only", "building", "looking_up", "--megabytes=0.3", "--levels=20", "--repeats=1"]
    files = [f"--tokenizer={tiny_family / 'target'}", f"--output={tmp_path / 'result.json'}"]
    assert run_main(ngram.main, *size, *files).code == 0
    report = json.loads((tmp_path / "result.json").read_text())
    built = report["building"]["rows"]
    assert {(row["order"], row["min_count"]) for row in built} == {(2, 1), (3, 1), (3, 2), (4, 1), (5, 1)}
    assert all(row["tokens_per_core_second"] > 0 for row in built)
    (first, in_runs) = (row["bytes_per_longest_ngram"] for row in built if (row["order"], row["min_count"]) == (3, 1))
    assert first == in_runs <= 12
    looked_up = report["looking_up"]["rows"]
    assert [row["order"] for row in looked_up] == [2, 3, 4, 5]
    assert all(row["again_median_us"] > 0 and row["walk_median_us_a_level"] > 0 for row in looked_up)
    assert all(0 < row["share_seen"] < 1 for row in looked_up)
    # Every length more costs a little, and not one more search for each shorter one.
    assert all(row["walk_operations_a_level"] < limit for row, limit in zip(looked_up, (27, 43, 50, 56), strict=True))
