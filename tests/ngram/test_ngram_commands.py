"""`pardraft ngram build` and `convert` take nobody's model away, make none of nothing, and say when there is no room."""

import errno
import os
import resource
import signal
from contextlib import contextmanager

import pytest

import in_process
from hf_pardraft import NgramModel
from hf_pardraft.ngram import store as ngram_store


@pytest.fixture
def words(tiny_family, tmp_path):
    (tmp_path / "text.txt").write_text("two and three make five " * 20)
    return ["ngram", "build", str(tmp_path / "out"), "--tokenizer", str(tiny_family / "target"), "--text-file"]


def test_a_model_that_is_there_is_replaced_only_if_that_is_asked_for(words, tmp_path):
    assert in_process.pardraft(*words, str(tmp_path / "text.txt")).code == 0
    before = (tmp_path / "out" / "ngram.safetensors").read_bytes()
    (tmp_path / "other.txt").write_text("something else")
    refused = in_process.pardraft(*words, str(tmp_path / "other.txt"))
    assert "holds an n-gram model: choose another folder, or pass --overwrite" in refused.error
    assert (tmp_path / "out" / "ngram.safetensors").read_bytes() == before
    assert in_process.pardraft(*words, str(tmp_path / "other.txt"), "--overwrite").code == 0
    assert (tmp_path / "out" / "ngram.safetensors").read_bytes() != before
    converted = in_process.pardraft("ngram", "convert", str(tmp_path / "text.txt"), str(tmp_path / "out"), *words[3:5])
    assert "holds an n-gram model" in converted.error


def test_a_file_in_the_way_is_named(words, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert "out is a file" in in_process.pardraft(*words, str(tmp_path / "text.txt")).error


@pytest.mark.parametrize("text", ["", None])
def test_nothing_to_count_makes_no_model(text, words, tiny_family, tmp_path):
    (tmp_path / "empty.txt").write_text("---" if text is None else text)
    more = [] if text == "" else ["--separator", "---"]
    result = in_process.pardraft(*words, str(tmp_path / "empty.txt"), *more, "--add-end-token")
    assert "there is nothing to count: the text is empty" in result.error
    assert not (tmp_path / "out").exists()


@contextmanager
def files_up_to(size: int):
    """The kernel itself stops the writing, as it does at a quota."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_full_disk_is_told_and_what_was_there_stays(num_proc, tmp_path):
    """Wherever it is met: in this process, or in one that counts."""
    folder = tmp_path / "out"
    NgramModel.from_token_stream([[1, 2, 3]], vocab_size=9, save_directory=folder)
    before = (folder / "ngram.safetensors").read_bytes()
    options = {"vocab_size": 50_000, "num_proc": num_proc, "save_directory": folder, "max_memory": 1 << 20}
    match = r"no room to write .*ngram.safetensors \(File too large; .* free\): nothing was written"
    with files_up_to(30_000), pytest.raises(OSError, match=match):
        NgramModel.from_token_stream([[place * 7919 % 50_000 for place in range(20_000)]], **options)
    assert [path.name for path in folder.iterdir()] == ["ngram.safetensors"]
    assert (folder / "ngram.safetensors").read_bytes() == before


def test_a_disk_that_fills_up_at_the_very_end_is_told_as_well(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ngram_store.os, "fsync", full)
    with pytest.raises(OSError, match=r"no room to write .*No space left on device; .* free"):
        NgramModel.from_token_stream([[1, 2, 3]], vocab_size=9, save_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()
