"""The data sets that a trainer is given, prepared as its arguments say for a drafter and its target."""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...pairing.remembered import tokenizer_of
from ...user_input.conversations import template_inputs
from ...user_input.data import one_split
from ...user_input.models import context_length
from ..arguments import DraftTrainingArguments
from ..layouts import layout_of
from .dataset import prepare_data

# Rows that are looked at to see how a chat template renders a data set.
ROWS_OF_A_MODE = 32


def prepare_all(
    drafter: PreTrainedModel,
    target: PreTrainedModel | None,
    args: DraftTrainingArguments,
    kwargs: dict[str, Any],
    reads_raw_rows: bool = False,
) -> dict[str, Any]:
    """The arguments of a `Trainer` with `train_dataset` and `eval_dataset`, perhaps a dict of several, prepared."""
    prepared = dict(kwargs)
    options = {"reads_raw_rows": reads_raw_rows}
    prepare = partial(prepare_for_training, drafter, target, args, kwargs.get("processing_class"), **options)
    if kwargs.get("train_dataset") is not None:
        prepared["train_dataset"] = prepare(one_split(kwargs["train_dataset"], "train"))
    evaluated = kwargs.get("eval_dataset")
    if isinstance(evaluated, dict):
        prepared["eval_dataset"] = {name: prepare(data) for name, data in evaluated.items()}
    elif evaluated is not None:
        prepared["eval_dataset"] = prepare(evaluated)
    return prepared


def prepare_for_training(
    drafter: PreTrainedModel,
    target: PreTrainedModel | None,
    args: DraftTrainingArguments,
    processing_class: Any,
    data: Any,
    reads_raw_rows: bool = False,
) -> Any:
    """A data set as [`prepare_data`] makes it with the training arguments, for what the target can read.

    Args:
        drafter, target, args, processing_class: of the trainer.
        data: the data set.
        reads_raw_rows: whether a collator of the caller's own reads torch's data sets, whatever their rows hold.
    """
    tokenizer = tokenizer_of(processing_class)
    data = data if reads_raw_rows else raw_rows(data)
    with args.main_process_first(desc="preparing a data set"):
        return prepare_data(
            data,
            tokenizer,
            max_length=args.max_length,
            packing=args.packing,
            template_kwargs=args.chat_template_kwargs,
            layout=layout_of(drafter),
            num_proc=args.dataset_num_proc,
            vocab_size=drafter.config.vocab_size or None,
            context=None if target is None else context_length(target.config),
        )


def raw_rows(data: Any) -> Any:
    """The rows of one of torch's data sets (what `random_split` gives, say) if they are raw, to be prepared as a list's are; any
    other data as they are. A stream is not looked at, since its first row may come once only."""
    if not isinstance(data, torch.utils.data.Dataset) or isinstance(data, torch.utils.data.IterableDataset):
        return data
    first = next(iter(data), None)
    if isinstance(first, Mapping) and "input_ids" in first:
        return data
    return [data[number] for number in range(len(data))]


def chat_arguments(data: Any, args: DraftTrainingArguments) -> dict[str, Any] | None:
    """What a chat template got besides the messages of raw training data; `None` if the data are no conversations, or their
    first rows have been given several things."""
    if data is None or isinstance(data, str | Path):
        return None
    rows = [row for row in islice(one_split(data, "train"), ROWS_OF_A_MODE) if isinstance(row, dict)]
    if not rows or not all(is_conversation(row) for row in rows):
        return None
    found = [template_inputs(row, args.chat_template_kwargs or {})[1] for row in rows]
    return found[0] if all(given == found[0] for given in found) else None


def is_conversation(row: dict[str, Any]) -> bool:
    """Whether a chat template renders this row."""
    talks = any(name in row for name in ("messages", "conversations")) or isinstance(row.get("prompt"), list)
    return talks and "input_ids" not in row
