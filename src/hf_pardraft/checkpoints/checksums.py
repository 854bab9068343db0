"""Checksums inside a safetensors file, so that a flipped bit is noticed: a CRC-32 for each tensor, in the file's metadata.

Other tools read such a file as any other, and drop the checksums when they write another one.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

METADATA_KEY = "pardraft.crc32"
LENGTH = struct.Struct("<Q")
BLOCK = 1 << 22
# safetensors refuses longer headers.
LONGEST_HEADER = 100_000_000
DAMAGED = "it is damaged or was not downloaded whole: get it again"


def read_header(file: BinaryIO) -> dict:
    """The header of a safetensors file; afterwards `file` stands at the first byte of data.

    Raises:
        ValueError: if there is none.
    """
    start = file.read(LENGTH.size)
    length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else LONGEST_HEADER
    if length >= LONGEST_HEADER:
        raise ValueError(f"{file.name} has no safetensors header: {DAMAGED}")
    return json.loads(file.read(length))


def blocks(file: BinaryIO, count: int) -> Iterator[bytes]:
    """The next `count` bytes of a file, [`BLOCK`] at a time."""
    while count > 0:
        block = file.read(min(count, BLOCK))
        if not block:
            raise ValueError(f"{file.name} ends too soon: {DAMAGED}")
        count -= len(block)
        yield block


def checksums_of(file: BinaryIO, header: dict) -> dict[str, int]:
    """CRC-32 of each tensor's bytes, by name; reads `file` from the first byte of data."""
    start, found = file.tell(), {}
    for name in sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"]):
        first, end = header[name]["data_offsets"]
        file.seek(start + first)
        checksum = 0
        for block in blocks(file, end - first):
            checksum = zlib.crc32(block, checksum)
        found[name] = checksum
    return found


def add_checksums(path: str | Path) -> None:
    """Write checksums into a safetensors file, which is replaced at once."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.checksums")
    try:
        with path.open("rb") as file:
            header = read_header(file)
            start = file.tell()
            checksums = checksums_of(file, header)
            metadata = {**header.get("__metadata__", {}), METADATA_KEY: json.dumps(checksums, sort_keys=True)}
            text = json.dumps({**header, "__metadata__": metadata}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % LENGTH.size)
            file.seek(start)
            with beside.open("wb") as copy:
                copy.write(LENGTH.pack(len(text)) + text)
                for block in blocks(file, path.stat().st_size - start):
                    copy.write(block)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def stored_checksums(path: str | Path, text: str) -> dict[str, int]:
    """The checksums in a file's metadata; a `ValueError` if they are no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is damaged: {METADATA_KEY} in its metadata should hold a checksum for each tensor, got {text[:40]!r}. Get "
            "it again"
        )
    return found


def check_checksums(path: str | Path) -> None:
    """Raise a `ValueError` that names the damaged tensors, if the file has checksums and they don't agree with its bytes.

    The file must have been looked at already: a broken header is not explained here.
    """
    with Path(path).open("rb") as file:
        header = read_header(file)
        stored = header.get("__metadata__", {}).get(METADATA_KEY)
        if stored is None:
            return
        expected, found = stored_checksums(path, stored), checksums_of(file, header)
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        raise ValueError(
            f"{path} is damaged: the checksums of {len(wrong)} tensors ({', '.join(wrong[:5])}{', ...' if wrong[5:] else ''}) "
            "are not those that they were saved with. Get it again"
        )
