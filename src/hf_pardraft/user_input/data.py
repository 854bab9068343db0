"""Data sets that users bring, from the Hub, files or memory: what `datasets` and its readers make of damaged ones is told in one
line that names them."""

import bz2
import glob
import gzip
import importlib.util
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .copies import copying

# Levels of lists and objects. The JSON readers of `datasets` have no such limit, and overflow the stack of the whole process
# between 1000 and 10000.
DEEPEST = 1000
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
OPENING, CLOSING = b"[{", b"]}"
JSON_SUFFIXES = (".json", ".jsonl")
FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def require_datasets(purpose: str = "reading data sets") -> None:
    """Raise an `ImportError` that says what to install if `datasets` is missing, and what for."""
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(f'{purpose} needs the datasets package: pip install "hf-pardraft[train]"')


def load_data(source: Any, config: str | None = None, split: str = "train", streaming: bool = False) -> Any:
    """A data set from wherever it is.

    Args:
        source: a data set's name on the Hub; a .json, .jsonl, .csv or .parquet file (compressed
            ones too), or several as `part-*.jsonl`; a folder that `save_to_disk` wrote, or one with such files; or examples in
            memory, which are returned as they are.
        config: of a data set on the Hub, if it has several.
        split: which part of it, "train" for files.
        streaming: read while it is used, without a copy on disk.

    Returns:
        A `datasets.Dataset`, an `IterableDataset` if streaming, or what was passed.

    Raises:
        ImportError: without the `datasets` package.
        OSError: if it does not exist, or can't be reached.
        TypeError: for an iterator, a generator say, which can be read once only.
        ValueError: if there is no such split, or it can't be read.
    """
    require_datasets()
    from datasets import config as of_datasets
    from datasets import load_dataset, load_from_disk

    if isinstance(source, Iterator):
        raise TypeError(
            f"expected a data set that can be read several times, got a {type(source).__name__}: pass a list of its rows, or "
            "datasets.IterableDataset.from_generator with the function that makes it"
        )
    if not isinstance(source, str | Path):
        return one_split(source, split)
    path = Path(source)
    kind = file_kind(path)
    # A name may hold what stands for other characters in a pattern.
    pattern = glob.escape(str(path)) if path.exists() else str(path)
    if kind and not glob.glob(pattern):
        raise FileNotFoundError(f"no data file {str(path)!r}: a name with the ending {path.suffix} is taken for a file")
    if not kind and path.is_file():
        raise ValueError(
            f"can't tell what {str(path)!r} holds: expected a file ending in {', '.join(sorted(FILE_KINDS))}"
        )
    if kind and config is not None:
        raise ValueError(f"{str(path)!r} is a file, which has no configurations, got {config!r}: leave that out")
    check_json_files(map(Path, glob.glob(pattern) if kind else path.rglob("*") if path.is_dir() else []))
    with reading_data(source), copying(of_datasets.HF_DATASETS_CACHE):
        if kind:
            return load_dataset(kind, data_files=pattern, split=split, streaming=streaming)
        if path.is_dir() and any(
            (path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")
        ):
            saved = one_split(load_from_disk(str(path)), split)
            return saved.to_iterable_dataset() if streaming else saved
        return load_dataset(str(source), config, split=split, streaming=streaming)


def file_kind(path: Path) -> str | None:
    """The loader for a file of this name; `None` if it is the name of no data file."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None


def one_split(data: Any, split: str) -> Any:
    """The named part of a data set that has several; any other as it is."""
    if not isinstance(data, dict):
        return data
    if split not in data:
        raise ValueError(f"the data set has no split {split!r}: it has {', '.join(data)}")
    return data[split]


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
