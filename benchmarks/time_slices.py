"""Processes that share a core in short slices, so that a machine whose speed changes is as fast for one as for another.

Other tenants of a machine may make it half as fast for a tenth of a second, and fast again. What runs one after the other is then
compared with another machine; what runs in slices of some milliseconds has the same one, and takes the same CPU time for the same
work to a hundredth. Linux and macOS: processes are forked, stopped and continued.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

# Seconds; a round or some of a tiny model, and a fraction of how long such a change lasts.
SLICE = 0.01


class Worker:
    """A process that does one kind of work, whenever it is asked to.

    Args:
        work: what it does with what it is asked; it begins with all that is there now, and keeps what it learns to itself.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=self._serve, args=(work, other), daemon=True)
        self.process.start()
        # A worker that dies closes the last one, which ends to wait for it.
        other.close()

    @staticmethod
    def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
        while True:
            connection.send(work(connection.recv()))


@contextmanager
def workers(works: Sequence[Callable[[Any], Any]]) -> Iterator[list[Worker]]:
    """A worker for each of these."""
    found = [Worker(work) for work in works]
    try:
        yield found
    finally:
        for worker in found:
            # Whether it is stopped or not.
            worker.process.kill()
            worker.process.join()


def ask_all(asked: Sequence[Worker], question: Any) -> list[Any]:
    """Their answers to a question, for which all of them work at once, in slices.

    Raises:
        EOFError: if one of them died.
    """
    answers: dict[int, Any] = {}
    for worker in asked:
        os.kill(worker.process.pid, signal.SIGSTOP)
        worker.connection.send(question)
    while len(answers) < len(asked):
        for number, worker in enumerate(asked):
            if number in answers:
                continue
            os.kill(worker.process.pid, signal.SIGCONT)
            if worker.connection.poll(SLICE):
                answers[number] = worker.connection.recv()
            else:
                os.kill(worker.process.pid, signal.SIGSTOP)
    return [answers[number] for number in range(len(asked))]
