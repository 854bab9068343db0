"""Where training data comes from: the Hub, files, a folder that `datasets` saved, or rows in memory."""

import glob
import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...user_input.data import check_json_files, reading_data

logger = logging.getLogger(__name__)

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}


def require_datasets() -> None:
    """Raise an `ImportError` that says what to install if `datasets` is missing."""
    if importlib.util.find_spec("datasets") is None:
        raise ImportError('preparing training data needs the datasets package: pip install "hf-pardraft[train]"')


def load_data(source: Any, config: str | None = None, split: str = "train", streaming: bool = False) -> Any:
    """A data set from wherever it is.

    Args:
        source: a data set's name on the Hub; a .json, .jsonl, .csv or .parquet file (compressed
            ones too), or several as `part-*.jsonl`; a folder that
            `save_to_disk` wrote, or one with such files; or rows in memory, which are returned as they are.
        config: of a data set on the Hub, if it has several.
        split: which part of it, "train" for files.
        streaming: read while training, without a copy on disk.

    Returns:
        A `datasets.Dataset`, an `IterableDataset` if streaming, or what was passed.

    Raises:
        ImportError: without the `datasets` package.
        OSError: if it does not exist, or can't be reached.
        ValueError: if there is no such split, or it can't be read.
    """
    require_datasets()
    from datasets import load_dataset, load_from_disk

    if not isinstance(source, str | Path):
        return one_split(source, split)
    path = Path(source)
    kind = file_kind(path)
    if kind and not glob.glob(str(path)):
        raise FileNotFoundError(f"no data file {str(path)!r}: a name with the ending {path.suffix} is taken for a file")
    if kind and config is not None:
        raise ValueError(f"{str(path)!r} is a file, which has no configurations, got {config!r}: leave that out")
    check_json_files(map(Path, glob.glob(str(path)) if kind else path.rglob("*") if path.is_dir() else []))
    with reading_data(source):
        if kind:
            return load_dataset(kind, data_files=str(path), split=split, streaming=streaming)
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


def first_row(data: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first example.

    Raises:
        ValueError: if there is none, or it is no dict.
    """
    row = next(iter(data), None)
    if row is None:
        raise ValueError("the data set is empty: expected at least one example")
    if not isinstance(row, dict):
        raise ValueError(f"expected examples that are dicts of columns, got {type(row).__name__}")
    return row


def split_off(data: Any, count: int, seed: int, is_asked_for: bool = False) -> tuple[Any, Any]:
    """The data without some examples, and these: `count`, or a tenth of all if that is less; `None` if that is none.

    Args:
        data: a data set.
        count: how many are wanted.
        seed: of the choice.
        is_asked_for: whether somebody chose `count`, who is to know if it is not what they get.

    Raises:
        ValueError: if it is asked for, and there are not as many examples.
    """
    if is_asked_for and count >= len(data):
        raise ValueError(
            f"eval_size is {count}, and the data set has {len(data)} examples, of which some are to be learned: ask for fewer (a "
            "tenth at most is held out), or pass an --eval-dataset"
        )
    if is_asked_for and count > len(data) // 10:
        logger.warning("held out %d of %d examples rather than %d: a tenth at most", len(data) // 10, len(data), count)
    count = min(count, len(data) // 10)
    if count == 0:
        return data, None
    parts = data.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]
