"""The `pardraft` command as a user types it."""

import io
import json
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

import in_process
from hf_pardraft import AutoDrafter

TRIE = Path(__file__).parent.parent / "fixtures" / "trees" / "ngram_plain2.trie"


def test_demo_json_prints_the_table_and_nothing_else(tiny_family):
    command = [sys.executable, "-m", "hf_pardraft", "demo", "--family", str(tiny_family), "--max-new-tokens", "4"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)] == ["plain", "PARD", "DFlash", "DFlare", "DART"]
    assert done.stderr == ""


def test_generate_writes_the_same_text_with_and_without_a_drafter(tiny_family):
    common = ["generate", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 8]
    plain = in_process.pardraft(*common, "def main():")
    drafter = ["--drafter", tiny_family / "dflash", "--stats"]
    drafted = in_process.pardraft(*common, *drafter, stdin=b"def main():")
    assert plain.code == drafted.code == 0
    assert plain.out == drafted.out != ""
    assert "a round (tau)" in drafted.err


def test_generate_says_if_the_drafter_was_trained_with_another_tokenizer(tiny_family, tmp_path):
    drafter = AutoDrafter.from_pretrained(tiny_family / "dflash")
    drafter.config.tokenizer_hash = "0" * 64
    drafter.save_pretrained(tmp_path)
    common = ["generate", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 4, "x = 1"]
    with pytest.warns(UserWarning, match="its tokenizer had another vocabulary .hash 000000000000"):
        assert in_process.pardraft(*common, "--drafter", tmp_path).code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_process.pardraft(*common, "--drafter", tiny_family / "dflash").code == 0


def test_env_names_versions():
    done = in_process.pardraft("env")
    assert done.code == 0
    assert {"hf-pardraft", "torch", "transformers", "devices"} <= {line.split(":")[0] for line in done.out.split("\n")}


def test_an_ngram_model_is_built_from_text_and_described(tiny_family, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n\ndef add(a, c):\n")
    tokenizer = ["--tokenizer", tiny_family / "target"]
    done = in_process.pardraft(
        "ngram", "build", tmp_path / "ngram", *tokenizer, "--text-file", text, "--separator", "\\n\\n"
    )
    assert done.code == 0
    assert "3-grams: " in done.out
    info = in_process.pardraft("ngram", "info", tmp_path / "ngram", *tokenizer, "--verify")
    assert (info.code, info.out) == (0, done.out)
    converted = in_process.pardraft("ngram", "convert", TRIE, tmp_path / "converted", *tokenizer)
    assert (converted.code, "order: 2" in converted.out) == (0, True)


def test_an_ngram_model_is_built_from_a_data_set_within_limits(tiny_family, tmp_path):
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"body": f"def add(a, b{n % 7}):"}) for n in range(300)))
    source = ["--tokenizer", tiny_family / "target", "--dataset", rows, "--column", "body"]
    limits = ["--order", 4, "--min-count", 50, "--max-memory", "1MiB", "--num-proc", 2, "--vocab-size", 300]
    done = in_process.pardraft("ngram", "build", tmp_path / "limited", *source, *limits, "--add-end-token")
    assert done.code == 0
    facts = dict(line.split(": ", 1) for line in done.out.splitlines() if ": " in line)
    assert (facts["order"], facts["min_count"], facts["vocab_size"]) == ("4", "50", "300")
    whole = in_process.pardraft("ngram", "build", tmp_path / "whole", *source)
    kept = dict(line.split(": ", 1) for line in whole.out.splitlines() if ": " in line)
    # Each of the seven endings was seen 42 or 43 times. The ends of the texts are tokens, too.
    assert int(facts["3-grams"]) < int(kept["3-grams"])
    assert int(facts["tokens counted"]) == int(kept["tokens counted"]) + 300
    refused = in_process.pardraft("ngram", "build", tmp_path / "x", *source, "--max-memory", "1KB")
    assert "1048576" in refused.error


def test_what_an_ngram_model_can_not_be_built_from_is_an_error(tiny_family, tmp_path):
    neither = in_process.pardraft("ngram", "build", tmp_path / "out", "--tokenizer", tiny_family / "target")
    assert "--text-file or --dataset" in neither.error
    assert "nowhere" in in_process.pardraft("ngram", "info", "nowhere").error


@pytest.mark.parametrize("arguments", [["demo", "--family", "nowhere"], ["generate", "--target", "nowhere", "x"]])
def test_an_error_is_one_line_that_helps(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process.pardraft(*arguments)
    assert done.code == 1
    assert "nowhere" in done.error
    assert "Traceback" not in done.err


def test_streams_that_are_closed_are_no_bug(monkeypatch):
    told = io.StringIO()
    for name, stream in (("stdin", None), ("stdout", None), ("stderr", told)):
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["pardraft", "generate", "--target", "x"])
    with in_process.unsilenced(), pytest.raises(SystemExit):
        in_process.main()
    assert "expected a prompt, got an empty text" in told.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_character_that_a_pipe_or_file_lacks_ends_no_command(encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    in_process.main(lambda: sys.stdout.write("tau of 你好"))
    sys.stdout.flush()
    assert written.getvalue() == b"tau of \\u4f60\\u597d"


def test_the_version_is_told():
    ended = in_process.pardraft("--version")
    assert (ended.code, ended.out) == (0, f"pardraft {metadata.version('hf-pardraft')}\n")


def test_an_error_of_the_layout_or_the_destination_does_not_blame_the_source(tiny_family, tmp_path):
    drafter, file = tiny_family / "dflash", tmp_path / "file"
    file.touch()
    for destination, layout, told in (
        (tmp_path / "out", "nosuch", "unknown layout 'nosuch'"),
        (tmp_path / "out", "dart", "the dart layout holds dart drafters"),
        (file / "out", "zlab", f"can't write {file / 'out'}"),
    ):
        error = in_process.pardraft("convert", drafter, destination, "--to", layout).error
        assert told in error
        assert "can't load" not in error
