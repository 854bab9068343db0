"""What an example may look like: a conversation, a prompt with its completion, plain text, or token ids that are checked."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...user_input.conversations import template_inputs, without_nones
from .chat import encode_chat, without_end
from .documents import IGNORED
from .encoding import encode_completion, encode_text

# The columns that a row of each kind of examples must have; the first kind that fits is meant.
COLUMNS_OF_KIND = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
TOKEN_COLUMNS = ("input_ids", "labels")
# What else an example may have one of for each token.
PER_TOKEN = ("labels", "attention_mask", "document_ids")
# Of token ids that are looked at.
ROWS_AT_ONCE = 1000
# The names of ShareGPT's speakers.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def example_kind(columns: Any) -> str:
    """Which kind of examples these columns make.

    Raises:
        ValueError: if none that is known.
    """
    for kind, needed in COLUMNS_OF_KIND.items():
        if all(name in columns for name in needed):
            return kind
    raise ValueError(
        "expected examples with messages, prompt and completion, text, or input_ids and labels, got columns "
        f"{', '.join(map(str, columns))}: rename the ones that hold them"
    )


@dataclass
class ExampleEncoder:
    """Makes `input_ids` and `labels` of a raw row.

    Attributes:
        tokenizer: of the target.
        kind: of the rows, see [`example_kind`].
        max_length: tokens that are kept, from the beginning; `None` keeps all.
        template_kwargs: what the chat template takes besides messages; a row's own `chat_template_kwargs` come on top.
    """

    tokenizer: PreTrainedTokenizerBase
    kind: str
    max_length: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, row: dict[str, Any], number: int) -> dict[str, list[int]]:
        """The tokens and labels of the `number`-th row (from 0); none of one that lacks what the others have (null, in a file).

        Raises:
            ValueError: if it is none that can be learned from, or the chat template refuses it.
        """
        if lacks_something(row, self.kind):
            return {"input_ids": [], "labels": []}
        try:
            example = self.encode(row)
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from error
        # What is cut off is the end: no label loses what stands before it.
        return {name: example[name][: self.max_length] for name in ("input_ids", "labels")}

    def encode(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """The example, not cut off yet; the end of an answer that was `truncated` is none that the target wrote."""
        example = self.encode_whole(row)
        return without_end(self.tokenizer, example) if row.get("truncated") is True else example

    def encode_whole(self, row: dict[str, Any]) -> dict[str, list[int]]:
        if self.kind == "messages":
            return self.chat(row, row["messages"])
        if self.kind == "conversations":
            return self.chat(row, from_sharegpt(row["conversations"]))
        if self.kind == "text":
            return encode_text(self.tokenizer, expect_text(row["text"], "text"))
        prompt, completion = row["prompt"], row["completion"]
        if has_messages(row):
            prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
            return self.chat(row, prompt + completion, num_given=len(prompt))
        prompt, completion = expect_text(prompt, "prompt"), expect_text(completion, "completion")
        return encode_completion(self.tokenizer, prompt, completion)

    def chat(self, row: dict[str, Any], messages: Any, num_given: int = 0) -> dict[str, list[int]]:
        if isinstance(messages, list):
            messages = [without_nones(message) for message in messages]
        return encode_chat(self.tokenizer, messages, *template_inputs(row, self.template_kwargs), num_given)


def has_messages(row: dict[str, Any]) -> bool:
    """Whether prompt or completion are messages, which a chat template renders."""
    return any(isinstance(row.get(name), list) for name in COLUMNS_OF_KIND["completion"])


def lacks_something(row: dict[str, Any], kind: str) -> bool:
    """Whether a column that makes the kind has nothing in this row. Messages of a completion need no prompt."""
    needed = [name for name in COLUMNS_OF_KIND[kind] if name != "prompt" or not isinstance(row.get("completion"), list)]
    return any(row.get(name) is None for name in needed)


def expect_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text in column {name!r}, got {type(value).__name__}: {str(value)[:100]}")
    return value


def as_messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Messages as they are; a text as one message of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value or [])


def from_sharegpt(turns: Any) -> Any:
    """Messages of `from` and `value`, as ShareGPT has them, as messages of `role` and `content`."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "from" in turn for turn in turns):
        return turns
    return [
        {"role": SPEAKERS.get(turn["from"], turn["from"]), "content": expect_text(turn.get("value"), "value")}
        for turn in turns
    ]


def check_kind(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """The row.

    Raises:
        ValueError: if it lacks a column that others have.
    """
    missing = [name for name in COLUMNS_OF_KIND[kind] if name not in row]
    if missing:
        raise ValueError(f"the first example has a column {missing[0]!r}, and another has only {', '.join(row)}")
    return row


def check_token_ids(ids: Any, name: str, vocab_size: int | None) -> None:
    """Raise a `ValueError` unless these are token ids, `(length,)`.

    Args:
        ids: what an example has.
        name: of its column; only `labels` may have [`IGNORED`].
        vocab_size: of the models that read them, if it is known.
    """
    try:
        found = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} should be a list of token ids, got {str(ids)[:80]} ({error})") from error
    if found.numel() == 0:
        return
    if found.ndim != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} should be a list of whole numbers, token ids, got {str(ids)[:80]}")
    if name == "labels":
        found = found[found != IGNORED]
    wrong = found[(found < 0) | (found >= vocab_size)] if vocab_size is not None else found[found < 0]
    if len(wrong):
        known = "tokens are numbered from 0" if vocab_size is None else f"the vocabulary has {vocab_size} tokens"
        raise ValueError(
            f"{name} holds {wrong[0].item()}, and {known}: encode the texts with the target's own tokenizer"
        )


def check_tokens(row: dict[str, Any], number: int, vocab_size: int | None) -> dict[str, Any]:
    """The row, the `number`-th of its data set (from 0); a `ValueError` if its tokens are not as [`check_token_ids`] wants."""
    for name in TOKEN_COLUMNS:
        if row.get(name) is None and name != "input_ids":
            # Without labels, all tokens are learned.
            continue
        try:
            check_token_ids(row.get(name), name, vocab_size)
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from error
    length = len(row["input_ids"])
    for name in PER_TOKEN:
        if row.get(name) is not None and len(row[name]) != length:
            raise ValueError(f"example {number}: {name} has {len(row[name])} entries, and there are {length} tokens")
    if length and row.get("attention_mask") is not None and not torch.as_tensor(row["attention_mask"]).any():
        raise ValueError(f"example {number}: attention_mask says that it is padding alone: leave it out")
    return row


def with_checked_tokens(data: Any, columns: list[str], vocab_size: int | None) -> Any:
    """A `Dataset` whose tokens were all looked at, or an `IterableDataset` that looks at them when they are read.

    Raises:
        ValueError: see [`check_token_ids`].
    """
    from datasets import Dataset

    if not isinstance(data, Dataset):
        return data.map(partial(check_tokens, vocab_size=vocab_size), with_indices=True)
    names, others = ([name for name in known if name in columns] for known in (TOKEN_COLUMNS, PER_TOKEN))
    batches = data.select_columns([*dict.fromkeys([*names, *others])]).with_format("arrow").iter(ROWS_AT_ONCE)
    for start, table in zip(range(0, len(data), ROWS_AT_ONCE), batches, strict=True):
        are_tokens = all(are_token_ids(table.column(name), vocab_size, name == "labels") for name in names)
        has_masks = "attention_mask" in others
        if not are_tokens or has_masks or not have_one_length([table.column(name) for name in ("input_ids", *others)]):
            # Which example, and what is wrong with it.
            for offset, row in enumerate(table.to_pylist()):
                check_tokens(row, start + offset, vocab_size)
    return data


def have_one_length(columns: list[Any]) -> bool:
    """Whether Arrow columns hold lists of the same lengths, the first's, or nothing; `False` may be wrong."""
    import pyarrow.compute

    lengths, *others = (pyarrow.compute.list_value_length(column) for column in columns)
    # A comparison with null is null, and `all` skips it.
    return all(pyarrow.compute.all(pyarrow.compute.equal(lengths, other)).as_py() is not False for other in others)


def lengths_of(data: Any, name: str) -> list[int]:
    """How long the lists of a `Dataset`'s column are."""
    import pyarrow.compute

    batches = data.select_columns(name).with_format("arrow").iter(ROWS_AT_ONCE)
    return [
        length or 0 for table in batches for length in pyarrow.compute.list_value_length(table.column(name)).to_pylist()
    ]


def are_token_ids(column: Any, vocab_size: int | None, may_be_ignored: bool) -> bool:
    """Whether an Arrow column holds lists of token ids, of labels that [`IGNORED`] is among; `False` may be wrong."""
    import pyarrow
    import pyarrow.compute

    is_list = pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)
    if not is_list or (column.null_count and not may_be_ignored):
        return False
    values = pyarrow.compute.list_flatten(column)
    if not pyarrow.types.is_integer(values.type) or values.null_count:
        return False
    if may_be_ignored:
        values = values.filter(pyarrow.compute.not_equal(values, IGNORED))
    bounds = pyarrow.compute.min_max(values).as_py()
    if bounds["min"] is None:
        return True
    return bounds["min"] >= 0 and (vocab_size is None or bounds["max"] < vocab_size)
