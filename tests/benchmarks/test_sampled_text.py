"""The benchmark of sampled text runs, measures nothing twice, and finds that drafted text is plain `generate`'s."""

import json
from pathlib import Path

import pytest

import sampled_text
from in_process import run_main
from sampled_measure import common_length
from sampled_report import difference_summary, rows_of


def run_quickly(folder: Path, *words: str) -> tuple[dict, str]:
    """What is in the result, and what was printed."""
    quick = ["--quick", "--only", "PARD", "DART", "--max-new-tokens", "12", "--prompts", "2", "--repeats", "2"]
    quick += ["--work", str(folder / "work"), "--output", str(folder / "sampled.json")]
    done = run_main(sampled_text.main, *quick, *words)
    assert done.code == 0
    return json.loads((folder / "sampled.json").read_text()), done.out


def test_all_ways_at_all_temperatures_are_in_one_table(tmp_path, monkeypatch):
    result, printed = run_quickly(tmp_path, "--temperatures", "0", "1", "--plots")
    rows = result["rows"]
    names = {(row["temperature"], row["name"]) for row in rows}
    ways = {f"{kind}, {way}" for kind in ("PARD", "DART") for way in ("chain", "tree", "rejection")}
    assert names == {(1, name) for name in ways} | {(0, name) for name in ways if "rejection" not in name}
    for row in rows:
        assert row["repeats"] == 2
        assert row["tau"] >= 1
        assert row["speedup_least"] <= row["speedup"] <= row["speedup_most"]
        if "rejection" not in row["name"]:
            assert row["same_texts"] == 4
    assert all(name in printed for name in ways)
    assert "T=1 now: tau" in printed
    assert str(tmp_path) not in json.dumps(result)
    assert (tmp_path / "sampled.png").stat().st_size > 10_000
    with monkeypatch.context() as patched:
        patched.setattr(sampled_text, "repeat_of", lambda *arguments: pytest.fail("it was measured before"))
        assert run_quickly(tmp_path, "--temperatures", "0", "1")[0] == result


def test_texts_of_other_lengths_are_not_taken_for_those_that_were_measured(tmp_path):
    for longest in (6, 12):
        result, _ = run_quickly(tmp_path, "--temperatures", "0", "--only", "DART", "--max-new-tokens", str(longest))
        assert {row["tokens"] for row in result["rows"]} == {4 * longest}


def test_texts_are_compared_until_there_are_enough(tmp_path):
    result, printed = run_quickly(
        tmp_path, "--temperatures", "1", "--differences", "150", "--batch-size", "2", "--dtype", "float64"
    )
    (summary,) = result["differences"]
    assert 150 <= summary["tokens"] < 200
    assert summary["texts_that_differ"] == summary["seeds_whose_generator_stands_elsewhere"] == 0
    assert summary["tokens_per_difference"] is None
    assert {seed["way"] for seed in result["compared"][0]["seeds"]} == {
        f"{kind}, {way}" for kind in ("PARD", "DART") for way in ("chain", "tree")
    }
    assert "| float64 | 1 | 2 |" in printed
    longer = ["--temperatures", "1", "--differences", "250", "--batch-size", "2", "--dtype", "float64"]
    assert run_quickly(tmp_path, *longer)[0]["differences"][0]["tokens"] >= 250


def test_a_text_counts_to_its_first_difference():
    assert common_length((3, 4, 5), (3, 4, 6)) == 2
    assert common_length((3, 4), (3, 4, 6)) == 2
    seeds = [
        {"tokens": 30, "first_differences": [4, 20], "same_state": False},
        {"tokens": 50, "first_differences": [], "same_state": True},
    ]
    summary = difference_summary({"dtype": "float32", "temperature": 1.0, "batch_size": 3, "seeds": seeds})
    assert summary["texts"] == 6
    assert summary["texts_that_differ"] == 2
    assert summary["tokens_per_difference"] == 40
    assert summary["seeds_whose_generator_stands_elsewhere"] == 1


def test_speed_is_the_median_of_the_repeats_beside_plain_in_the_same_repeat():
    def turn(name, tokens, seconds, rounds):
        return {"name": name, "tokens": tokens, "seconds": seconds, "rounds": rounds, "same_texts": 1}

    # The machine is slower in each repeat.
    repeats = [
        [turn("plain", 10, slowness, 10), turn("DART, chain", 10, slowness / ratio, 5)]
        for slowness, ratio in ((1, 1.5), (2, 2.0), (4, 1.0))
    ]
    (row,) = rows_of("now", 1.0, repeats)
    assert (row["speedup"], row["speedup_least"], row["speedup_most"]) == (1.5, 1.0, 2.0)
    assert row["tau"] == 2
    assert row["plain_tokens_per_second"] == 5
