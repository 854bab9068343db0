"""Training examples from files and the Hub: token ids as they are, or a column of text."""

import importlib.util
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_examples(source: str, split: str = "train", config: str | None = None) -> Any:
    """A `datasets.Dataset`: of a file, of a folder that `save_to_disk` wrote, or of a name on the Hub.

    Raises:
        ImportError: without the `datasets` package.
        OSError: if a file does not exist.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ImportError('training data is read with the datasets package: pip install "hf-pardraft[train]"')
    from datasets import load_dataset, load_from_disk

    path = Path(source)
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind is not None:
        if not path.is_file():
            raise FileNotFoundError(f"no data file {source!r}")
        return load_dataset(kind, data_files=str(path), split=split)
    if path.is_dir() and any(
        (path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")
    ):
        saved = load_from_disk(source)
        return saved[split] if isinstance(saved, dict) else saved
    return load_dataset(source, config, split=split)


def tokenised(data: Any, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Any:
    """The same data with `input_ids` and `labels`, which are left alone if they are there; of `text` all is learned.

    Raises:
        ValueError: if there is no such column.
    """
    if "input_ids" in data.column_names:
        return data
    if "text" not in data.column_names:
        raise ValueError(
            f"expected a column input_ids (and labels) or text, got {', '.join(data.column_names)}: rename or tokenise it"
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        ids = (tokenizer(row["text"], verbose=False)["input_ids"] + end)[:max_length]
        return {"input_ids": ids, "labels": ids}

    return data.map(encode, remove_columns=data.column_names)


def split_off(data: Any, count: int, seed: int) -> tuple[Any, Any]:
    """The data without some examples, and these: `count`, or a tenth of all if that is less; `None` if that is none."""
    count = min(count, len(data) // 10)
    if count == 0:
        return data, None
    parts = data.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]
