"""The `pardraft` command without a process of its own, which takes seconds to start."""

import io
import os
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from click.testing import Result
from transformers.utils import logging
from typer.testing import CliRunner

from hf_pardraft.cli.app import app, main


@dataclass(frozen=True)
class Ended:
    """How a command ended, as a shell sees it."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says why it failed."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code in (1, 2), (self.code, self.err)
        assert len(lines) == 1, self.err
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


def pardraft(*arguments) -> Result:
    with unsilenced():
        return CliRunner().invoke(app, [*map(str, arguments)])


def ended(*arguments, stdin: bytes = b"", **environment: str) -> Ended:
    """Run a command to its end, entry point and exit status included; what it raises beyond that is a failure of the test."""
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
