"""Packed dialogues are read as training data, and the README beside them counts them."""

import json
from pathlib import Path

import pytest

import pack_dialogues
from hf_pardraft.user_input.data import load_data
from in_process import run_main
from tiny_tokenizers import tiny_chat_tokenizer

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "data" / "smollm2-135m-instruct"


def dialogue(index: int, turns: int, truncated: bool) -> dict:
    said = [{"role": "user", "content": "two and"}, {"role": "assistant", "content": "three is five"}]
    return {"messages": said * turns, "index": index, "truncated": truncated}


def test_a_file_that_is_being_written_is_packed_and_counted(tmp_path):
    tokenizer, written = tiny_chat_tokenizer(), tmp_path / "greedy.jsonl"
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [dialogue(2, 1, True), dialogue(0, 2, False), dialogue(1, 1, False)]
    written.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"messages": [{"role"')
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "README.md").write_text("Before.\n<!-- counts -->\nold\n<!-- end of counts -->\nAfter.\n")
    words = ["--tokenizer", tmp_path / "target", "--hours", "1.2", "--to", folder, written]
    for _ in range(2):
        assert run_main(pack_dialogues.main, *words).code == 0
    assert [row["index"] for row in load_data(str(folder / "*.jsonl.gz"))] == [0, 1, 2]
    asked, answered = (len(tokenizer(text)["input_ids"]) for text in ("two and", "three is five"))
    told = (folder / "README.md").read_text()
    assert f"| greedy.jsonl.gz | 3 | 1 | 4 | {4 * answered} | {4 * asked} | 1 | {answered} tokens |" in told
    assert "Written in 1.2 hours" in told
    assert told.startswith("Before.\n")
    assert told.endswith("\nAfter.\n")
    assert "old" not in told


def test_the_committed_dialogues_are_what_their_readme_counts():
    files = sorted(COMMITTED.glob("*.jsonl.gz"))
    if not files:
        pytest.skip("none are committed yet")
    told = (COMMITTED / "README.md").read_text()
    for file in files:
        rows = list(load_data(str(file)))
        assert f"| {file.name} | {len(rows):,} |" in told
        assert len({row["messages"][0]["content"].casefold() for row in rows}) == len(rows)
        assert all([m["role"] for m in row["messages"][:2]] == ["user", "assistant"] for row in rows)
    assert sum(file.stat().st_size for file in files) < 4e6
