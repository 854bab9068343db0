"""The `pardraft` command, and scripts that end as it does, without a process of their own, which takes seconds to start."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from transformers.utils import logging

from hf_pardraft.cli.app import main


@dataclass(frozen=True)
class Ended:
    """How a command ended, as a shell sees it."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says why it failed, by no bug."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code in (1, 2), (self.code, self.err)
        assert len(lines) == 1, self.err
        assert "this is a bug" not in lines[0], self.err
        return lines[0]


@contextmanager
def unsilenced():
    """What a command silences would stay silent for other tests."""
    verbosity = logging.get_verbosity()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def pardraft(*arguments, stdin: bytes = b"", main: Callable[[], None] = main, **environment: str) -> Ended:
    """Run a command to its end, exit status included; what it raises beyond that is a failure of the test.

    Args:
        arguments: words of its command line.
        stdin: what it can read.
        main: its entry point.
        environment: variables that it finds besides.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    words, terminal = ["pardraft", *map(str, arguments)], io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        unsilenced(),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", terminal),
        mock.patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ending:
            code = ending.code or 0
    return Ended(code, out.getvalue(), err.getvalue())
