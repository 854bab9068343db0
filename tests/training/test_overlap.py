"""What a training set shares with a test set is left out: rows of messages and texts, files and streams."""

import json
import sys

import pytest
from datasets import Dataset

from hf_pardraft.training.data.overlap import load_test_set, runs_of_words, without_overlap

WORDS = [f"word{number}" for number in range(80)]
TEST_SET = [{"prompt": " ".join(WORDS), "test": ["assert x", "an other text " * 12]}]


def message(content: str) -> dict:
    return {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": content}]}


SHARES_32 = message("So: " + ",\n".join(WORDS[20:52]).upper() + " and more")
SHARES_31 = message(" ".join(WORDS[20:51]) + " and " + " ".join(WORDS[60:80]))
# The words of two messages are no run.
SPLIT = {"messages": [{"role": "user", "content": " ".join(part)} for part in (WORDS[:20], WORDS[20:40])]}
ROWS = [SHARES_32, SHARES_31, SPLIT, message("Something else.")]


@pytest.mark.parametrize("kind", [list, Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()])
def test_rows_that_share_32_words_in_a_row_are_left_out(kind, caplog):
    assert [*without_overlap(kind(ROWS), [TEST_SET])] == ROWS[1:]
    assert ("1 of 4 examples share 32 words" in caplog.text) == hasattr(kind(ROWS), "__len__")


def test_rows_in_memory_need_no_package_of_data_sets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert without_overlap(ROWS, [TEST_SET]) == ROWS[1:]


def test_two_test_sets_leave_out_different_rows_of_the_same_data():
    data = Dataset.from_list([{"text": " ".join(WORDS[:40])}, {"text": " ".join(WORDS[40:])}])
    for test_set, left in ((WORDS[:40], 1), (WORDS[40:], 0)):
        assert [*without_overlap(data, [[{"text": " ".join(test_set)}]])] == [data[left]]


def test_runs_are_all_that_there_are_in_each_text():
    assert runs_of_words({"a": "One, two three", "b": ["four five"], "n": 7}, 2) == {
        ("one", "two"),
        ("two", "three"),
        ("four", "five"),
    }


def test_nothing_to_compare_and_nothing_left_are_told():
    with pytest.raises(ValueError, match="got token ids alone"):
        without_overlap([{"input_ids": [1, 2, 3]}], [TEST_SET])
    with pytest.raises(ValueError, match="texts of 32 words and more, got none"):
        without_overlap(ROWS, [[{"text": "too short"}]])
    with pytest.raises(ValueError, match="all 1 examples share 32 words"):
        without_overlap([SHARES_32], [TEST_SET])


def test_a_test_set_is_read_from_a_file(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TEST_SET))
    assert [*load_test_set(str(file))] == TEST_SET
