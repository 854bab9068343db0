"""The `pardraft` command, and scripts that end as it does, without a process of their own, which takes seconds to start."""

import inspect
import io
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from transformers.utils import logging

from hf_pardraft.cli.app import main


@dataclass(frozen=True)
class Ended:
    """How a command ended, as a shell sees it."""

    code: int | str
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


def pardraft(*arguments, stdin: bytes = b"", **environment: str) -> Ended:
    """The command; see [`run_main`]."""
    return run_main(main, *arguments, stdin=stdin, **environment)


def run_main(entry: Callable[[], None], *arguments, stdin: bytes = b"", **environment: str) -> Ended:
    """Run an entry point to its end, exit status included; what it raises beyond that is a failure of the test.

    Args:
        entry: of a command or script.
        arguments: words of its command line.
        stdin: what it can read.
        environment: variables that it finds besides.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    name = Path(inspect.getsourcefile(entry)).name if entry is not main else "pardraft"
    terminal = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        unsilenced(),
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        mock.patch.object(sys, "stdin", terminal),
        mock.patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            entry()
        except SystemExit as ending:
            code = ending.code or 0
    return Ended(code, out.getvalue(), err.getvalue())
