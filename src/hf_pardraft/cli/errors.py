"""Where a command ends that could not do its work: one line on standard error, whatever library found out.

What the user can mend is told as it is. Anything else is a bug, and says so. `pardraft --debug`, or PARDRAFT_DEBUG=1 in the
environment, shows the traceback of either.
"""

import os
import sys
import traceback
from pathlib import Path

from ..user_input.models import is_out_of_memory
from ..user_input.redaction import known_secrets, redacted

DEBUG_VARIABLE = "PARDRAFT_DEBUG"
# Errors of input, of files and networks, and of what is not installed.
EXPECTED = (FloatingPointError, ImportError, OSError, ValueError)
# What libraries raise for bad input besides these, by name: a command should not import them for its end.
EXPECTED_OF_LIBRARIES = {
    "binascii.Error": "broken data",
    "datasets.exceptions.DatasetsError": "the data set can't be read",
    "jinja2.exceptions.TemplateError": "the chat template fails",
    "lzma.LZMAError": "a broken compressed file",
    "pyarrow.lib.ArrowException": "the data set can't be read",
    "safetensors_rust.SafetensorError": "a safetensors file can't be read or written",
    "yaml.error.YAMLError": "broken YAML",
    "zlib.error": "a broken compressed file",
    "zipfile.BadZipFile": "a broken zip file",
}
# Whose recursion is the input's.
PARSERS = ("json", "yaml")
LONGEST_MESSAGE = 1000


def is_debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def finish(error: Exception) -> int:
    """Tell on standard error why a command ends.

    Returns:
        The exit status.
    """
    secrets = known_secrets(sys.argv, os.environ)
    if is_debugging():
        sys.stderr.write(redacted("".join(traceback.format_exception(error)), secrets))
    sys.stderr.write(redacted(f"error: {one_line(describe(error))}\n", secrets))
    return getattr(error, "exit_status", 1)


def describe(error: Exception) -> str:
    """What to tell about an error: its own message if the user can mend it, or that it is a bug."""
    text = str(error) or type(error).__name__
    if "Original Traceback" in text:
        # A worker of a data loader tells all that it knows.
        text = text.strip().splitlines()[-1]
    if is_out_of_memory(error):
        return f"not enough memory ({text}): take a smaller batch, model or setting, or another device"
    if isinstance(error, EXPECTED):
        return text
    for cls in type(error).__mro__:
        if (told := EXPECTED_OF_LIBRARIES.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return f"{told}: {text}"
    if isinstance(error, RecursionError) and innermost_package(error) in PARSERS:
        return "the input nests lists or objects deeper than can be read: expected flat JSON or YAML"
    return (
        f"this is a bug in hf_pardraft, not in what you asked for: {type(error).__name__}: {text} ({place_of(error)}). Please "
        "report it with the command, what it prints as `pardraft --debug ...`, and what `pardraft env` prints"
    )


def innermost_package(error: BaseException) -> str:
    """The package, below site-packages or the standard library, that an error was raised in."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return Path(files[-1]).parent.name if files else ""


def place_of(error: BaseException) -> str:
    """The last line of this package that an error came through."""
    here = Path(__file__).parent.parent
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(here)]
    if not own:
        return "outside of its own code"
    return f"{Path(own[-1].filename).relative_to(here).as_posix()}, line {own[-1].lineno}"


def one_line(text: str) -> str:
    """A message in one line, without the end of one that is endless."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ... (all of it: pardraft --debug)"
