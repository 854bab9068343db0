"""One raw example, a conversation, a prompt with its completion, or plain text, as `input_ids` and `labels`."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...user_input.files import parse_json
from .chat import encode_chat, without_end
from .encoding import encode_completion, encode_text

# By the columns that a row must have, the first that fits.
KINDS = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
# The names of ShareGPT's speakers.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


def example_kind(columns: Any) -> str:
    """Which kind of examples these columns make.

    Raises:
        ValueError: if none that is known.
    """
    for kind, needed in KINDS.items():
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

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """The row's tokens and labels; none of a row that lacks what the others have (null, in a file)."""
        if lacks_something(row, self.kind):
            return {"input_ids": [], "labels": []}
        example = self.encode(row)
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
        if isinstance(prompt, list) or isinstance(completion, list):
            prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
            return self.chat(row, prompt + completion, num_given=len(prompt))
        prompt, completion = expect_text(prompt, "prompt"), expect_text(completion, "completion")
        return encode_completion(self.tokenizer, prompt, completion)

    def chat(self, row: dict[str, Any], messages: Any, num_given: int = 0) -> dict[str, list[int]]:
        if isinstance(messages, list):
            messages = [without_nones(message) for message in messages]
        return encode_chat(self.tokenizer, messages, *template_inputs(row, self.template_kwargs), num_given)


def lacks_something(row: dict[str, Any], kind: str) -> bool:
    """Whether a column that makes the kind has nothing in this row. Messages of a completion need no prompt."""
    needed = [name for name in KINDS[kind] if name != "prompt" or not isinstance(row.get("completion"), list)]
    return any(row.get(name) is None for name in needed)


def template_inputs(row: dict[str, Any], template_kwargs: dict[str, Any]) -> tuple[list | None, dict[str, Any]]:
    """What a chat template gets besides messages: a row's `tools` (perhaps as JSON), and `template_kwargs` with the row's own
    on top."""
    tools = row.get("tools")
    tools = without_nones(parse_json(tools, "the column tools") if isinstance(tools, str) and tools else tools)
    own = without_nones(row.get("chat_template_kwargs") or {})
    if not isinstance(own, dict):
        raise ValueError(
            f"expected a mapping in column 'chat_template_kwargs', got {type(own).__name__}: {str(own)[:100]}"
        )
    return tools or None, template_kwargs | own


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


def without_nones(value: Any) -> Any:
    """A value without the `None`s that Arrow puts where other rows have a key and this one has not."""
    if isinstance(value, dict):
        return {key: without_nones(part) for key, part in value.items() if part is not None}
    return [without_nones(part) for part in value] if isinstance(value, list) else value


def check_kind(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """The row.

    Raises:
        ValueError: if it lacks a column that others have.
    """
    missing = [name for name in KINDS[kind] if name not in row]
    if missing:
        raise ValueError(f"the first example has a column {missing[0]!r}, and another has only {', '.join(row)}")
    return row
