"""The demo: accepted runs are visible, the table is right, and what is missing is said."""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from hf_pardraft.demo.display import results_table
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import built_in_prompts
from hf_pardraft.demo.show import DemoOptions, demo_json, show_demo
from hf_pardraft.evaluation.rows import Comparison
from hf_pardraft.terminal.runs import RunStreamer, last_lines
from threads import torch_threads


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def printed(console: Console) -> str:
    return console.file.getvalue()


def test_every_accepted_run_follows_a_marker(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    prompt, runs = "def f(", ["a, ", "b", "):\n    pass"]
    console = plain_console()
    streamer = RunStreamer(tokenizer, console)
    streamer.put(tokenizer(prompt, return_tensors="pt").input_ids)
    for run in runs:
        streamer.put(tokenizer(run, return_tensors="pt").input_ids)
    streamer.end()
    assert printed(console) == "def f(|a, |b|):\n    pass|\n"


def test_a_character_split_over_two_rounds_is_printed_whole(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    ids = tokenizer("é").input_ids
    assert len(ids) == 2
    console = plain_console()
    streamer = RunStreamer(tokenizer, console)
    streamer.put(torch.tensor(tokenizer("x").input_ids))
    streamer.put(torch.tensor(ids[:1]))
    streamer.put(torch.tensor(ids[1:]))
    streamer.end()
    assert printed(console) == "x||é|\n"


def test_long_prompts_show_their_end():
    assert last_lines("a\nb\nc", 2) == "...\nb\nc"
    assert last_lines("a\nb", 2) == "a\nb"


def test_the_table_says_what_was_measured():
    console = plain_console()
    console.print(results_table([Comparison("PARD", 123.4, 2.05, 3.456, False)]))
    assert printed(console).split()[-5:] == ["PARD", "123", "2.05x", "3.46", "NO"]


def test_the_demo_shows_all_drafters_and_a_table(tiny_family):
    console = plain_console()
    show_demo(DemoOptions(tiny_family, None, 8), console)
    text = printed(console)
    assert all(word in text for word in ("PARD", "DFlash", "DFlare", "DART", "plain", "tokens/s", "tau", "|"))


def test_the_json_is_the_table(tiny_family, tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def main():\n")
    rows = json.loads(demo_json(DemoOptions(tiny_family, file, 8)))
    assert [row["name"] for row in rows] == ["plain", "PARD", "DFlash", "DFlare", "DART"]
    assert all(set(row) == {"name", "tokens_per_second", "speedup", "tau", "identical"} for row in rows)
    assert all(row["identical"] for row in rows)


def test_trees_and_batches_are_compared_too(tiny_family):
    rows = json.loads(demo_json(DemoOptions(tiny_family, None, 8, tree_budget=6, batch_size=3)))
    kinds = ("PARD", "DFlash", "DFlare", "DART")
    assert [row["name"] for row in rows] == [
        "plain",
        *(f"{kind}{way}" for kind in kinds for way in ("", ", tree of 6")),
    ]
    assert all(row["identical"] for row in rows)


def test_compiled_rounds_are_compared_too(tiny_family, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    file, console = tmp_path / "x.py", plain_console()
    file.write_text("def main():\n")
    show_demo(DemoOptions(tiny_family, file, 8, tree_budget=6, compiled=True), console)
    table = printed(console).split("Measuring ...")[1]
    assert table.startswith(" Compiling takes")
    rows = [line.strip() for line in table.split("\n") if line.strip().endswith(" yes")]
    ways = ("", ", compiled", ", tree of 6", ", tree of 6, compiled")
    names = [f"{kind}{way}" for kind in ("PARD", "DFlash", "DFlare", "DART") for way in ways]
    assert [row.split("  ")[0] for row in rows] == ["plain", *names]


def test_the_prompts_are_beginnings_of_code_from_this_pythons_library():
    prompts = built_in_prompts()
    assert len(prompts) >= 4
    for prompt in prompts:
        assert prompt == prompt.rstrip()
        assert any(line.strip().startswith(("def ", "class ")) for line in prompt.split("\n"))


def test_what_is_missing_is_said(tiny_family, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"examples/train_demo\.py"):
        load_family(tmp_path)
    empty = tmp_path / "empty.py"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="holds no text"):
        demo_json(DemoOptions(tiny_family, empty, 8))
    with pytest.raises(ValueError, match="leave no room"):
        demo_json(DemoOptions(tiny_family, None, 256))


def test_the_shipped_family_writes_identical_text_with_long_runs():
    if not (SHIPPED_FAMILY / "target" / "config.json").exists():
        pytest.skip("the demo family has not been trained: python examples/train_demo.py")
    with torch_threads(2):
        family = load_family(SHIPPED_FAMILY)
        # Whoever loads it goes on with as many as before.
        assert torch.get_num_threads() == 2
    prompt = family.tokenizer(built_in_prompts()[0], return_tensors="pt")
    options = {**prompt, "do_sample": False, "max_new_tokens": 64}
    expected = family.target.generate(**options)
    assert list(family.drafters) == ["PARD", "DFlash", "DFlare", "DART"]
    for drafter in family.drafters.values():
        assert torch.equal(family.target.generate(**options, assistant_model=drafter), expected)
        assert drafter.last_stats.tau > 2.5


def test_the_shipped_family_fits_the_repository():
    if not SHIPPED_FAMILY.exists():
        pytest.skip("the demo family has not been trained: python examples/train_demo.py")
    assert sum(path.stat().st_size for path in SHIPPED_FAMILY.rglob("*") if path.is_file()) <= 16 * 1024 * 1024
