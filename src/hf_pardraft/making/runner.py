"""Running a command as a user would type it, printed first, with the time that it takes noted on the way."""

import contextlib
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

# Runs the words of a command, calls the function now and then, and returns the exit status.
Run = Callable[[list[str], Callable[[], None]], int]


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
    with ended_by_signals(), subprocess.Popen([sys.executable, "-m", "hf_pardraft", *words]) as process:
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


class Stopwatch:
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
