"""What is said when there is no room: for what, how much there is, and what is left."""

import errno
import json
import os
import resource
import signal

import pytest
from huggingface_hub import ModelCard
from safetensors import SafetensorError

from hf_pardraft.checkpoints import atomic_files as files
from hf_pardraft.checkpoints.atomic_files import explained, told_size
from hf_pardraft.hub.cards import save_card
from tiny_models import tiny_drafter, tiny_target


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_the_file_the_room_and_what_is_left(number, tmp_path):
    match = r"no room to write .*out \(.*; [\d.]+ (GB|MB|kB|bytes) free\): nothing is lost"
    with pytest.raises(OSError, match=match), explained(tmp_path / "new" / "out", "nothing is lost"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="no room to write"), explained(tmp_path, "nothing is lost"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), explained(tmp_path, "nothing is lost"):
        (tmp_path / "missing").read_text()
    with pytest.raises(OSError, match=r"^told already$"), explained(tmp_path, "nothing is lost"):
        raise OSError("told already")


def test_a_size_is_never_nothing():
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 2_340_000: "2.3 MB", 5_600_000_000: "5.6 GB"}
    assert {size: told_size(size) for size in sizes} == sizes


def test_a_card_or_report_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text("old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", full)
    for write in (lambda: save_card(ModelCard("new"), path), lambda: files.write_whole(path, json.dumps({}))):
        with pytest.raises(OSError, match=r"no room to write .*README.md .*what was there before is as it was"):
            write()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / ".file.json.part").write_text("half")
    files.write_whole(tmp_path / "file.json", "whole")
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_a_drafter_that_there_is_no_room_for_leaves_the_one_that_was_there(tmp_path):
    """The kernel itself stops the writing, as it does at a quota: no file may grow past 20 kB."""
    out, drafter = tmp_path / "out", tiny_drafter("dflash", tiny_target("qwen3"))
    drafter.save_pretrained(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"no room to write .*out \(.* free\): what was there before .* Make room"):
            drafter.save_pretrained(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
