"""Data sets that users bring: what `datasets` and its readers make of damaged ones is told in one line that names them."""

import bz2
import gzip
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Levels of lists and objects. The JSON readers of `datasets` have no such limit, and overflow the stack of the whole process
# between 1000 and 10000.
DEEPEST = 1000
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
OPENING, CLOSING = b"[{", b"]}"
JSON_SUFFIXES = (".json", ".jsonl")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@contextmanager
def reading_data(source: Any) -> Iterator[None]:
    """Say which data set can't be read.

    Raises:
        OSError: if it is not there, or can't be reached.
        ValueError: if it is damaged, empty, or of a kind that is not read.
    """
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except StopIteration as error:
        raise ValueError(f"the data set {str(source)!r} is empty: expected at least one row") from error
    # What reads it (Arrow, pandas, compression, the Hub) raises nearly anything, and nothing is lost yet.
    except Exception as error:
        text = f"can't read the data set {str(source)!r}: {reason_of(error)}"
        if isinstance(error, OSError) and not isinstance(error.__cause__, ValueError):
            raise OSError(text) from error
        raise ValueError(
            f"{text}. Expected whole .jsonl, .json, .csv or .parquet files in UTF-8, or the name of a data set without a script"
        ) from error


def reason_of(error: BaseException) -> str:
    """Why reading failed: `datasets` itself says no more than that it did."""
    while type(error).__name__.startswith("DatasetGeneration") and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


def check_json_files(paths: Iterable[Path]) -> None:
    """Raise a `ValueError` if one of these files, those of JSON among them, is no UTF-8 or nests deeper than can be read."""
    for path in paths:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        opener = OPENERS.get(suffixes[-1], open) if suffixes else open
        if not any(suffix in JSON_SUFFIXES for suffix in suffixes[-2:]) or not path.is_file():
            continue
        with reading_data(path), opener(path, "rb") as lines:
            check_json(lines)


def check_json(lines: Iterable[bytes]) -> None:
    """Raise a `ValueError` for JSON, one text a line or one over several, that is no UTF-8 or nests deeper than [`DEEPEST`]."""
    depth = 0
    for line in lines:
        # Arrow takes any bytes for a text, and only who reads that text later stumbles.
        line.decode("utf-8")
        num_open = sum(line.count(byte) for byte in OPENING)
        if depth == 0 and num_open <= DEEPEST and num_open == sum(line.count(byte) for byte in CLOSING):
            # As nearly every line is that holds a row; the exact way takes ten times as long.
            continue
        # A JSON string ends in the line that it begins in.
        structure = JSON_STRING.sub(b"", line)
        num_open = sum(structure.count(byte) for byte in OPENING)
        if depth + num_open > DEEPEST:
            for byte in structure:
                depth += (byte in OPENING) - (byte in CLOSING)
                if depth > DEEPEST:
                    raise ValueError(f"it nests lists or objects more than {DEEPEST} deep")
        else:
            depth += num_open - sum(structure.count(byte) for byte in CLOSING)
        depth = max(0, depth)
