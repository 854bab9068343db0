"""The sweep of architectures: what it wrote down is complete, and the page of what is served is made from that."""

import json
from pathlib import Path

import pytest
import transformers

import architectures
from architecture_cases import registered
from architecture_page import is_wrong, page_of
from architectures import tried_before
from in_process import run_main

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "supported_targets.md"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text())


def test_no_text_differed_and_nothing_crashed(result):
    assert not [(row["architecture"], row["variant"]) for row in result["rows"] if is_wrong(row)]


def test_the_page_says_what_was_found(result):
    assert PAGE.read_text() == page_of(result)


def test_every_registered_architecture_was_tried(result):
    if result["versions"]["transformers"] != transformers.__version__:
        pytest.skip(
            f"the sweep is of transformers {result['versions']['transformers']}, here is {transformers.__version__}"
        )
    assert {row["architecture"] for row in result["rows"] if row["variant"] == "default"} == set(registered())


def test_a_sweep_writes_rows_and_a_page_and_tries_nothing_twice(tmp_path, monkeypatch):
    words = ["--only", "llama", "--variants", "default", "--work", tmp_path / "work"]
    words += ["--output", tmp_path / "found.json", "--page", tmp_path / "page.md"]
    done = run_main(architectures.main, *words)
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(row["same"]) == len(architectures.CASES)
    assert "## Served in all of it: 1 model type" in (tmp_path / "page.md").read_text()
    assert "served: 1" in done.out
    monkeypatch.setattr(architectures, "try_quietly", None)
    assert run_main(architectures.main, *words).code == 0
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == [row]


def test_what_was_wrong_is_tried_again_if_asked_for(tmp_path):
    good = {"architecture": "llama", "variant": "default", "differs": [], "crashed": {}, "refused": {}, "same": ["all"]}
    wrong = {**good, "variant": "tied", "crashed": {"KeyError: 'x'": ["all"]}}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, wrong)))
    assert set(tried_before(tmp_path / "rows.jsonl", but_wrong=False)) == {("llama", "default"), ("llama", "tied")}
    assert set(tried_before(tmp_path / "rows.jsonl", but_wrong=True)) == {("llama", "default")}
    assert tried_before(tmp_path / "none.jsonl", but_wrong=True) == {}


def test_an_architecture_that_is_not_registered_is_named(tmp_path):
    done = run_main(architectures.main, "--only", "lama", "--work", tmp_path)
    assert "registers no lama for causal language modelling" in done.code
