"""The `pardraft` command without a process of its own, which takes seconds to start."""

from click.testing import Result
from transformers.utils import logging
from typer.testing import CliRunner

from hf_pardraft.cli import app


def pardraft(*arguments) -> Result:
    verbosity = logging.get_verbosity()
    try:
        return CliRunner().invoke(app, [*map(str, arguments)])
    finally:
        # What a command silences would stay silent for other tests.
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
