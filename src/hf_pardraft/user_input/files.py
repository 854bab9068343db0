"""Files and texts that users bring: read, or refused in one line that names them."""

import json
from pathlib import Path
from typing import Any

from ..checkpoints.atomic_files import check_place_to_write

# Of a value that is told: a file may hold one of any length.
LONGEST_QUOTE = 80


def quoted(value: Any) -> str:
    """A value as messages show it, shortened."""
    # Of a long text a repr would be as long.
    text = repr(value[: LONGEST_QUOTE + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def decode_text(data: bytes, source: str | Path) -> str:
    """Bytes as text, without the byte order mark that some editors begin a file with.

    Args:
        data: what was read.
        source: what to call it in a message.

    Raises:
        ValueError: if they are no UTF-8.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(source, error)) from error


def not_utf8(source: str | Path, error: UnicodeDecodeError) -> str:
    """What to tell about bytes that are no UTF-8."""
    return (
        f"{source} is no UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start}): save it as UTF-8, or check that "
        "it is the file that you mean"
    )


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no UTF-8.
    """
    # As text mode has it: any line end is "\n".
    return decode_text(Path(path).read_bytes(), path).replace("\r\n", "\n").replace("\r", "\n")


def has_half_characters(text: str) -> bool:
    """Whether a text holds lone surrogates, as which bytes arrive that are no UTF-8, typed or on a command line."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def parse_json(text: str | bytes, source: str | Path) -> Any:
    """What a JSON text says.

    Args:
        text: the JSON.
        source: what to call it in a message: a file, an option.

    Raises:
        ValueError: if it is none, or nests deeper than any reader goes.
    """
    try:
        found = json.loads(text)
        if (b"\\u" if isinstance(text, bytes) else "\\u") in text:
            # Half of a pair of surrogates is JSON and no text: no tokenizer takes it, and no file.
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        return found
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{source} holds half a character (a lone surrogate such as \\ud800): mend its text"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{source} nests lists or objects deeper than can be read: expected flat JSON") from error
    # Among them what is no UTF-8, and a number of thousands of digits.
    except ValueError as error:
        raise ValueError(f"{source} is no JSON: {error}") from error


def read_json(path: str | Path) -> Any:
    """What a JSON file says.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no UTF-8 or no JSON.
    """
    return parse_json(decode_text(Path(path).read_bytes(), path), path)


def check_file_to_write(path: Path | None) -> None:
    """Raise a `ValueError` for a folder, a device or a pipe: what is written takes its place, and they would be gone; and an
    `OSError` where it can't be written."""
    if path is not None and path.is_dir():
        raise ValueError(f"expected a file to write to, and {path} is a folder")
    if path is not None and path.exists() and not path.is_file():
        raise ValueError(f"expected a file to write to, and {path} is a device or pipe: write a file, and read that")
    if path is not None:
        check_place_to_write(path)
