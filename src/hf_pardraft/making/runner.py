"""Running a command as a user would type it, printed first, with the time that it takes noted on the way."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How often the time is noted that a command has taken so far: a kill loses no more of it.
HEARTBEAT = 20.0
# Seconds that a command has to end by itself after a signal.
GRACE = 30.0

# Environment variable with the process that a command is to end with, and Linux's word for that.
PARENT, PR_SET_PDEATHSIG = "HF_PARDRAFT_PARENT", 1

# Runs the words of a command, calls the function now and then, and returns the exit status.
RunCommand = Callable[[list[str], Callable[[], None]], int]


def as_typed(words: list[str]) -> str:
    return shlex.join(["pardraft", *words])


def run_command(words: list[str], tick: Callable[[], None]) -> int:
    """Run `pardraft` with these words in a process of its own, which ends with this one.

    Args:
        words: of its command line.
        tick: called now and then while it runs.

    Returns:
        Its exit status.
    """
    command, environment = [sys.executable, "-m", "hf_pardraft", *words], os.environ | {PARENT: str(os.getpid())}
    with ended_by_signals(), subprocess.Popen(command, env=environment) as process:
        try:
            while True:
                try:
                    return process.wait(HEARTBEAT)
                except subprocess.TimeoutExpired:
                    tick()
        except KeyboardInterrupt:
            # The terminal has told the command, too.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()


def end_with_parent() -> None:
    """Let this process end with the one that began it as a stage, even by a kill that nobody can catch: on Linux, if asked to."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the process that began this one has ended")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this process as an exception, so that the command that it waits for ends, too."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class LapTimer:
    """Notes the seconds since it was last asked, until now.

    Args:
        note: is told how many seconds more have passed.
        clock: seconds, from any start on.
    """

    def __init__(self, note: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.clock, self.last = note, clock, clock()

    def lap(self) -> None:
        now = self.clock()
        self.note(now - self.last)
        self.last = now
