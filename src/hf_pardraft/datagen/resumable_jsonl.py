"""A JSONL file that grows row by row and survives a kill: no row twice, none lost, none half."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..checkpoints.atomic_files import explained, write_whole
from ..checkpoints.config_checks import is_whole
from ..checkpoints.locks import locked
from ..user_input.files import parse_json, read_json
from ..user_input.wording import told_differences

KEPT = "the rows in it are whole and stay. Make room, and run the same command again, which goes on there"


def as_line(row: dict[str, Any]) -> bytes:
    """A row as a line of a JSONL file.

    Raises:
        ValueError: if a text in it is none: half of a surrogate pair can't be encoded, and would spoil the file for its readers.
    """
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise ValueError(
            f"it holds {found!r}, half of a surrogate pair, which is no text: mend or drop the row"
        ) from error


class ResumableJsonl:
    """Rows with an `index` each, appended to a file.

    A hidden file beside it holds the settings that the rows were made with, so that a later run goes on with the same ones
    only; another is locked while the file is open.

    Args:
        path: of the file; its folder is made if need be.
        settings: what the rows depend on, as JSON can hold it.

    Attributes:
        done: indices of the rows that are in the file.

    Raises:
        ValueError: if the file was begun with other settings, or holds something else than such rows.
        OSError: if another process writes it, or it can't be written.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(self._beside("lock"), self.path, nests=False))
            self._check_settings(settings)
            self.done = self._read_done()
            # Unbuffered: what could not be written is not tried again when the file is closed.
            self._file = stack.enter_context(self.path.open("ab", buffering=0))
            self._held = stack.pop_all()

    def __enter__(self) -> "ResumableJsonl":
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write a row, and wait until it is on the disk: milliseconds, where an answer takes seconds.

        Raises:
            OSError: if there is no room; of this row nothing is kept, and the file is whole.
        """
        line = memoryview(as_line(row))
        size = os.fstat(self._file.fileno()).st_size
        with explained(self.path, KEPT):
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(size)
                raise
        self.done.add(row["index"])

    def _beside(self, purpose: str) -> Path:
        # Hidden, so that whoever reads the folder as a data set does not read it.
        return self.path.with_name(f".{self.path.name}.{purpose}")

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self._beside("settings")
        settings = json.loads(json.dumps(settings))
        has_rows = self.path.exists() and self.path.stat().st_size > 0
        # Where there are no rows yet, other settings are as good.
        if not (file.exists() and has_rows):
            if has_rows:
                raise ValueError(
                    f"{self.path} exists, but {file.name}, which says how it was made, does not: choose another output"
                )
            write_whole(file, json.dumps(settings, indent=2), KEPT)
            return
        begun = read_json(file)
        if not isinstance(begun, dict):
            raise ValueError(
                f"{file} does not say how {self.path.name} was made, but holds a list or value: choose another output"
            )
        told = told_differences(begun, settings, {**begun, **settings})
        if told:
            raise ValueError(f"{self.path} was begun with {', '.join(told)}: use the same settings, or another output")

    def _read_done(self) -> set[int]:
        """Indices in the file, after what a kill left of a last line is cut off."""
        if not self.path.exists():
            return set()
        done, whole = set(), 0
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    break
                whole += len(line)
                index = self._index_of(line, number)
                if index in done:
                    raise ValueError(f"{self.path}, line {number}: row {index} is there twice: choose another output")
                done.add(index)
        return done

    def _index_of(self, line: bytes, number: int) -> int:
        wrong = f"{self.path}, line {number} is no row of such a file: choose another output"
        try:
            index = parse_json(line, wrong)["index"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(wrong) from error
        if not is_whole(index):
            raise ValueError(wrong)
        return index
