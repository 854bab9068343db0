"""One writer at a time: who holds an output is named, and the dead hold nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hf_pardraft.checkpoints import locks
from hf_pardraft.checkpoints.atomic_folders import writing_folder
from hf_pardraft.checkpoints.locks import LOCK
from processes import in_a_process


def held_by_another(folder) -> tuple[int, int]:
    """A process that holds a folder until it is killed, and its end of a pipe."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with writing_folder(folder):
            os.write(writing, b"held")
            time.sleep(600)
        os._exit(1)
    assert os.read(reading, 4) == b"held"
    return process, reading


def test_a_second_writer_is_told_who_the_first_one_is_until_that_is_killed(tmp_path):
    process, _ = held_by_another(tmp_path / "out")
    try:
        with (
            pytest.raises(OSError, match=rf"out is being written by process {process} \(.*, since .*wait for it"),
            writing_folder(tmp_path / "out"),
        ):
            pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with writing_folder(tmp_path / "out"):
        (tmp_path / "out" / "mine").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_a_dead_writer_has_started_is_waited_for(tmp_path, monkeypatch):
    """Such as workers of a data loader, which keep a lock for a moment that was theirs by a fork."""
    code = (
        "import os, sys, time, fcntl\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        'os.write(file, b\'{"pid": %d, "host": "%s"}\' % (int(sys.argv[2]), sys.argv[3].encode()))\n'
        "print('held', flush=True)\n"
        "time.sleep(0.5)\n"
    )
    (tmp_path / "out").mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    words = [str(tmp_path / "out" / LOCK), str(dead.pid), locks.socket.gethostname()]
    worker = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "held\n"
    with writing_folder(tmp_path / "out"):
        assert worker.wait() == 0


def test_a_writer_may_write_inside_of_what_it_writes_and_its_threads_may_not(tmp_path):
    seen = []

    def intrude():
        try:
            with writing_folder(tmp_path / "out"):
                seen.append("written")
        except OSError as error:
            seen.append(str(error))

    with writing_folder(tmp_path / "out"):
        with writing_folder(tmp_path / "out"):
            pass
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(seen) == 1
    assert f"process {os.getpid()}" in seen[0]


def test_a_forked_process_holds_nothing_of_its_parents(tmp_path):
    def work():
        with pytest.raises(OSError, match="is being written by"), writing_folder(tmp_path / "out"):
            pass

    with writing_folder(tmp_path / "out"):
        assert in_a_process(work) == 0


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with writing_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
