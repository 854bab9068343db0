"""The benchmark of a real language model runs on tiny ones, measures nothing twice, and its tables are of its figures."""

import gzip
import json
from pathlib import Path

import pytest
import torch

import smollm2
from hf_pardraft.evaluation.calls import Condition, run, watch
from hf_pardraft.evaluation.entries import plain_entry, prompt_lookup_entry
from hf_pardraft.evaluation.measurement import Measured, in_batches
from in_process import pardraft, run_main
from smollm2_cases import DRAFTED
from smollm2_measure import looked_up
from smollm2_page import BEGIN, END, best_ways, cells_of, renewed, tables_of
from smollm2_plot import bars_of, save_plot
from tiny_models import random_prompt, tiny_target

DRAFTERS = ("PARD", "DFlash", "DFlare", "DART")


@pytest.fixture(scope="module")
def folders(tiny_family, tmp_path_factory) -> dict[str, Path]:
    """A target, its drafters, and two benchmarks of two questions each, one of them gzipped."""
    folder = tmp_path_factory.mktemp("smollm2")
    drafters = folder / "drafters"
    drafters.mkdir()
    for name in DRAFTERS:
        (drafters / f"Tiny-{name}").symlink_to(tiny_family / name.lower())
    rows = {
        "humaneval/HumanEval.jsonl.gz": [{"prompt": "def add(a, b):\n"}, {"prompt": "class Point:\n    def"}],
        "gsm8k/test.jsonl": [{"question": "What is 2 + 3?"}, {"question": "And 5?"}],
    }
    for name, questions in rows.items():
        file = folder / "data" / name
        file.parent.mkdir(parents=True)
        text = "".join(json.dumps(question) + "\n" for question in questions).encode()
        file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return {"target": tiny_family / "target", "drafters": drafters, "data": folder / "data"}


def measured(folders: dict[str, Path], output: Path, *words: str) -> dict:
    options = [word for name, folder in folders.items() for word in (f"--{name}", folder)]
    small = ["--benchmarks", "humaneval", "gsm8k", "--dtypes", "float32", "--max-new-tokens", "12", "--limit", "2"]
    done = run_main(smollm2.main, *options, *small, "--output", output, *words)
    assert done.code == 0, done.err
    return json.loads(output.read_text())


def rows_of(result: dict, **identity) -> dict[str, dict]:
    (cell,) = [cell for cell in result["cells"] if all(cell[key] == value for key, value in identity.items())]
    return {row["name"]: row for row in cell["rows"]}


def test_counts_are_those_of_eval_and_are_kept(folders, tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    result = measured(folders, output, "--tau", "--temperatures", "0", "1", "--tree-budget", "6")
    greedy = rows_of(result, benchmark="humaneval", temperature=0)
    shapes = {f"{name}, {shape}" for name in DRAFTERS for shape in ("chain", "tree", "tree with text")}
    assert {*greedy} == {"prompt lookup", *shapes}
    assert {*rows_of(result, benchmark="gsm8k", temperature=1)} == shapes
    # The drafter is the target itself, but for what comes after a mask.
    assert greedy["PARD, chain"]["tau"] > 1.2
    assert greedy["PARD, tree"]["tau"] >= greedy["PARD, chain"]["tau"]
    for cell in result["cells"]:
        assert cell["batch_size"] == 2
        assert all((row["texts"], row["different"]) == (2, 0) for row in cell["rows"])
    assert str(tmp_path) not in json.dumps(result)
    told = tmp_path / "eval.json"
    command = ["eval", "--target", folders["target"], "--drafter", folders["drafters"] / "Tiny-PARD", "--json", told]
    command += ["--prompts", f"humaneval={folders['data']}/humaneval/HumanEval.jsonl.gz", "--dtype", "float32"]
    command += ["--max-new-tokens", "12", "--repeats", "1", "--setting", "draft_schedule=fixed", "--batch-size", "2"]
    assert pardraft(*command).code == 0
    assert json.loads(told.read_text())["rows"][1]["tau"] == greedy["PARD, chain"]["tau"]
    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "counted", lambda *arguments: pytest.fail("it was measured before"))
        assert measured(folders, output, "--tau", "--temperatures", "0", "1", "--tree-budget", "6") == result
    counted, asked = smollm2.counted, []
    monkeypatch.setattr(smollm2, "counted", lambda m, ways, *rest: asked.extend(ways) or counted(m, ways, *rest))
    monkeypatch.setattr("smollm2_cases.digest_of", lambda folder: result["drafters"][folder.name[5:]]["weights"][::-1])
    again = measured(folders, output, "--tau", "--tree-budget", "6", "--names", "DART", "--benchmarks", "gsm8k")
    (cell,) = [cell for cell in again["cells"] if (cell["benchmark"], cell["temperature"]) == ("gsm8k", 0)]
    assert len(cell["commands"]) == 2
    assert len(cell["rows"]) == len(greedy)
    assert [way.entry.name for way in asked] == ["DART, chain", "DART, tree", "DART, tree with text"]
    larger = measured(folders, output, "--tau", "--tree-budget", "9", "--only", "tree", "--benchmarks", "gsm8k")
    assert len(larger["cells"]) == len(again["cells"]) + 1
    assert "## tau: float32, temperature 0, batch 2, trees of 9" in tables_of(larger)


def test_speeds_are_on_the_page_and_in_the_plot(folders, tmp_path):
    output, page, plot = tmp_path / "result.json", tmp_path / "page.md", tmp_path / "plot.svg"
    page.write_text(f"before\n{BEGIN}\n\nearlier\n\n{END}\nafter\n")
    words = ["--rounds", "eager", "--batch-sizes", "1", "2", "--page", page, "--plot", plot]
    words += ["--names", "DFlash", "DART", "--benchmarks", "gsm8k"]
    result = measured(folders, output, "--speed", *words)
    rows = rows_of(result, benchmark="gsm8k", batch_size=1)
    ways = {f"{name}, {title}" for name in ("DFlash", "DART") for way, title in DRAFTED.items() if way != "tree_ngrams"}
    assert {*rows} == {"plain", "prompt lookup", "DFlash, stock DFlash loop"} | ways
    assert {*rows_of(result, benchmark="gsm8k", batch_size=2)} == {"plain"} | ways
    for row in rows.values():
        assert row["different"] == 0
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
    assert rows["plain"]["over_eager_plain"] == rows["plain"]["tau"] == 1
    assert rows["prompt lookup"]["tau"] >= 1
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}")
    assert text.endswith(f"{END}\nafter\n")
    assert "earlier" not in text
    assert tables_of(result) in text
    assert f"| DART, auto | {rows['DART, auto']['over_eager_plain']:.2f}x |" in text
    assert ">GSM8K<" in plot.read_text()
    before = plot.read_bytes()
    save_plot(result, plot)
    assert plot.read_bytes() == before


def test_trees_that_an_n_gram_model_chooses_are_counted_beside_others(folders, tmp_path):
    text, ngrams, output = tmp_path / "text.txt", tmp_path / "3-grams", tmp_path / "result.json"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    command = ["ngram", "build", ngrams, "--tokenizer", folders["target"], "--text-file", text, "--vocab-size", "300"]
    assert pardraft(*command).code == 0
    words = ["--tau", "--names", "DART", "--only", "tree", "tree_ngrams"]
    assert {*rows_of(measured(folders, output, *words), benchmark="humaneval")} == {"DART, tree"}
    rows = rows_of(measured(folders, output, *words, "--ngrams", ngrams), benchmark="humaneval")
    assert {*rows} == {"DART, tree", "DART, tree with n-grams"}
    assert all(row["different"] == 0 for row in rows.values())


def test_prompt_lookup_is_counted_without_a_forward():
    target = tiny_target("llama")
    prompts = [torch.cat([random_prompt(9, seed=seed)] * 3, dim=1) for seed in range(4)]
    condition = Condition(max_new_tokens=40)
    batches = in_batches(target, prompts, 1)
    plain = Measured(plain_entry(), [[run(target, plain_entry(), batch, condition)] for batch in batches], [])
    counts = [
        count for batch in batches for count in watch(target, prompt_lookup_entry(), batch, condition).tokens_per_round
    ]
    assert max(counts) > 2
    found = looked_up(target, prompts, plain, condition)
    assert (found["tokens"], found["rounds"]) == (sum(counts), len(counts))


def cell(dtype: str, benchmark: str, rows: list[dict]) -> dict:
    facts = {
        "settings": {"limit": 1, "max_new_tokens": 8},
        "tree_budget": 16,
        "prompt_tokens": [9],
        "commands": ["run"],
    }
    facts |= {
        "versions": {"torch": "2", "transformers": "5"},
        "machine": "a CPU",
        "date": "2026-01-01",
        "seconds": 90.0,
    }
    same = {"texts": 1, "different": 0, "near_ties": 0, "compiled": False, "drafter": None, "tau": 1.0}
    condition = {"measured": "speed", "dtype": dtype, "benchmark": benchmark, "temperature": 0.0, "batch_size": 1}
    return {
        **condition,
        **facts,
        "rows": [{**same, **row, "tokens_per_second": 10 * row["over_eager_plain"]} for row in rows],
    }


def speeds(plain: float, chain: float, compiled: float) -> list[dict]:
    ours = {"drafter": "DART", "way": "chain"}
    return [
        {"name": "plain", "way": "plain", "over_eager_plain": 1.0},
        {"name": "plain, compiled", "way": "plain", "over_eager_plain": plain, "compiled": True},
        {"name": "DART, chain", "over_eager_plain": chain, "tau": 2.0, **ours},
        {"name": "DART, chain, compiled", "over_eager_plain": compiled, "tau": 3.0, "compiled": True, **ours},
    ]


def test_speedups_are_over_the_faster_plain_way_of_the_dtype():
    result = {
        "target": "tiny",
        "cells": [
            cell("float32", "humaneval", speeds(2.0, 3.0, 5.0)),
            cell("float32", "gsm8k", speeds(0.5, 3.0, 2.0)),
            cell("bfloat16", "humaneval", speeds(1.0, 1.0, 3.5)),
            cell("bfloat16", "gsm8k", speeds(2.0, 1.0, 4.0)),
        ],
    }
    text = tables_of(result)
    assert "| DART, chain | 1.50x | 3.00x | 2.25x | 2.00 | 2 of 2 |" in text
    assert "| DART, chain, compiled | 2.50x | 2.00x | 2.25x | 3.00 | 2 of 2 |" in text
    assert "measuring took 3 minutes:\n\n```text\nrun\n```" in text
    assert "HumanEval 20.0 (compiled), GSM8K 10.0." in text
    assert "| best plain way | 20.00 | 1.00 | 10.00 | 1.00 | 15.00 | 1.00 |" in text
    cells = cells_of(result, "speed", dtype="bfloat16")
    assert best_ways(cells) == {"DART": "DART, chain, compiled"}
    assert bars_of(result) == {
        "DART, chain, compiled, bfloat16 (mean 2.75x, tau 3.00)": {"humaneval": 3.5, "gsm8k": 2.0}
    }
    # Only what was measured on as many benchmarks is compared.
    fewer = {**result, "cells": [cell("float64", "gsm8k", speeds(1.0, 9.0, 9.0)), *result["cells"]]}
    assert bars_of(fewer) == bars_of(result)
    del result["cells"][3]["rows"][3]
    # What was measured on one benchmark alone has no mean.
    assert "| DART, chain, compiled | 3.50x | - | - | - | 1 of 1 |" in tables_of(result)
    assert renewed(f"{BEGIN}\n\nold\n\n{END}", {"cells": []}) == f"{BEGIN}\n\n{END}"


def test_what_can_not_be_measured_is_said_before(folders, tmp_path):
    output = tmp_path / "result.json"
    done = run_main(smollm2.main, "--tau", "--target", "nowhere", "--drafters", tmp_path)
    assert "--target expects a folder" in done.err
    words = ["--tau", "--target", folders["target"], "--drafters", tmp_path, "--output", output]
    assert "error: expected drafters in" in run_main(smollm2.main, *words).code
    words[4] = folders["drafters"]
    assert "no drafter in" in run_main(smollm2.main, *words, "--names", "Eagle").code
    assert "nothing was measured yet" in run_main(smollm2.main, "--output", output).code
