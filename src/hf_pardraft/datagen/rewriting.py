"""A row whose answers are rewritten, turn by turn: what the target reads next, and the row that comes of it."""

import os
import zlib
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..training.data.chat import Conversation, check_messages
from ..training.data.formats import as_messages, from_sharegpt
from ..user_input.conversations import template_inputs, without_nones
from ..user_input.options import check_temperature

SEED_BITS = 0x7FFFFFFF
# Exit status of a command that wrote all it could, and less than it was asked for; cli and making read it.
ROWS_MISSING = 3


class PassingError(ValueError):
    """What kept a row from being written, and may not do so the next time, as a server's trouble; any other error will."""


def status_of_missing_rows() -> int:
    """Exit status of a process that wrote all it could, and less than it was asked for.

    `torchrun` and `accelerate launch` end all processes as soon as one has another than 0, and others are in the middle of work.
    """
    return ROWS_MISSING if int(os.environ.get("WORLD_SIZE", "1")) == 1 else 0


def check_sampling(temperature: float, top_p: float, max_tokens: int) -> None:
    """Raise a `ValueError` for settings that no law can be sampled with."""
    check_temperature(temperature)
    if not 0 < top_p <= 1 or max_tokens < 1:
        raise ValueError(f"expected top_p in (0, 1] and max_tokens >= 1, got {top_p} and {max_tokens}")


@dataclass(frozen=True)
class Answer:
    """What the target wrote.

    Attributes:
        text: without the token that ends it.
        is_whole: whether the target ended it, and not the limit of tokens.
        reasoning: thinking that a server reports apart from the text.
        tool_calls: calls of tools that a server reports apart from the text, as chat templates take them.
    """

    text: str
    is_whole: bool = True
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_message(self) -> dict[str, Any]:
        said_elsewhere = {"reasoning_content": self.reasoning, "tool_calls": self.tool_calls}
        return {"role": "assistant", "content": self.text} | {key: said for key, said in said_elsewhere.items() if said}


def checked_messages(turns: list[Any]) -> list[dict[str, Any]]:
    """The messages, without what Arrow added to them; a `ValueError` if they are none."""
    messages = [without_nones(message) for message in turns]
    check_messages(messages)
    return messages


class Rewrite:
    """One row on its way. Turns of the assistant are rewritten one after another, each after the new ones before it.

    A turn that calls a tool is kept, since the tool's result that follows belongs to it. A conversation that ends with the
    user's turn gets an answer. One in which an answer is cut off, or calls a tool, ends there: nobody knows the result.

    Args:
        index: of the row in its data set.
        row: with `messages`, `conversations`, or `prompt` (a text or messages) and perhaps `completion`.

    Raises:
        ValueError: if there is no answer to write.
    """

    def __init__(self, index: int, row: dict[str, Any]) -> None:
        self.index = index
        self.row = row
        self.prompt_text: str | None = None
        self._given: list[dict[str, Any]] = []
        self._written: list[dict[str, Any]] = []
        self._was_cut = False
        if isinstance(row.get("messages"), list) or isinstance(row.get("conversations"), list):
            turns = row["messages"] if isinstance(row.get("messages"), list) else from_sharegpt(row["conversations"])
            self._ahead = checked_messages(turns)
        elif isinstance(row.get("prompt"), str):
            self.prompt_text, self._ahead = row["prompt"], []
        elif isinstance(row.get("prompt"), list):
            self._given = checked_messages(row["prompt"])
            # What follows a first answer of a completion followed the old one.
            self._ahead = []
        else:
            raise ValueError(
                f"expected messages or a prompt, got columns {', '.join(row)}: in a plain text nobody knows what is an answer"
            )
        lacks_answer = bool(self._ahead) and self._ahead[-1].get("role") in ("user", "tool")
        if lacks_answer or self._given:
            self._ahead.append({"role": "assistant", "content": ""})
        if self.prompt_text is None:
            self._read_on()
            if self.is_done:
                raise ValueError("expected a user's turn with an answer of the assistant after it, got none")

    @property
    def is_done(self) -> bool:
        if self.prompt_text is not None:
            return bool(self._written)
        return not self._ahead

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the target reads next: the conversation so far."""
        return self._given + self._written

    def chat_text(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> str:
        """The conversation so far as a chat template renders it, up to where the next answer begins.

        Raises:
            ValueError: if there is no chat template, or it refuses the conversation.
        """
        tools, template_kwargs = template_inputs(self.row, template_kwargs)
        chat = Conversation(tokenizer, self.messages, tools, template_kwargs)
        return chat.render(chat.messages, add_generation_prompt=True)

    @property
    def num_answers(self) -> int:
        """How many turns of the assistant are there by now."""
        return sum(message["role"] == "assistant" for message in self._written)

    def seed(self, seed: int) -> int:
        """The seed of the next answer, from the row's index and the turn alone."""
        return zlib.crc32(f"{seed} {self.index} {self.num_answers}".encode()) & SEED_BITS

    def add(self, answer: Answer) -> None:
        """Take the next answer."""
        self._written.append(answer.as_message())
        self._was_cut = not answer.is_whole
        if self.prompt_text is None:
            self._ahead = self._ahead[1:] if answer.is_whole and not answer.tool_calls else []
            self._read_on()

    def result(self) -> dict[str, Any]:
        """The row with its new answers, its `index`, and `truncated`: whether the last answer was cut off."""
        marks = {"index": self.index, "truncated": self._was_cut}
        others = {name: value for name, value in self.row.items() if name != "conversations"}
        if self.prompt_text is not None:
            return {**others, **marks, "completion": self._written[0]["content"]}
        if self._given:
            return {**others, **marks, "completion": as_messages(self._written, "assistant")}
        return {**others, **marks, "messages": self._written}

    def _read_on(self) -> None:
        """Take over what stands before the next answer that is to be written."""
        while self._ahead and (self._ahead[0].get("role") != "assistant" or self._ahead[0].get("tool_calls")):
            self._written.append(self._ahead[0])
            self._ahead = self._ahead[1:]
