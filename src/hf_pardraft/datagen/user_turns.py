"""Where in a chat template a user's turn begins and ends, for any template: read off what it renders."""

import json
import string
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..training.data.chat import Conversation, Message, special_tokens, unused_character

# What users' messages may begin with, to see whether a tokenizer joins a blank before a message with it.
BEGINNINGS = ("What", "how", "hello", "the", *string.ascii_letters)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


@dataclass(frozen=True)
class TurnEnd:
    """What follows a user's message.

    Attributes:
        token: the first special token's id, if there is one.
        text: what stands before that, such as `[/INST]` where it is no token; `None` if nothing does.
    """

    token: int | None = None
    text: str | None = None


class UserTurns:
    """How a tokenizer's chat template frames what users say.

    Args:
        tokenizer: with a chat template.
        template_kwargs: what the template takes besides messages.

    Attributes:
        end: what follows a user's message when an answer is asked for.

    Raises:
        ValueError: if there is no chat template, or it shows no user's message, or nothing before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        check_chat_template(tokenizer, self.template_kwargs)
        header, rest = self._around([])
        self.end = self._end_of(rest)
        self._joins_blanks = header.endswith(" ") and any(self._is_joined(header, word) for word in BEGINNINGS)
        if not self.header_ids([]):
            raise ValueError(
                "the chat template writes nothing before a user's message, so there is nothing to go on from: pass prompts as "
                "a data set instead"
            )

    def header_ids(self, messages: list[Message]) -> list[int]:
        """The tokens of a conversation up to where its next user's message begins.

        Raises:
            ValueError: if the chat template refuses a user's message there.
        """
        header, _ = self._around(messages)
        # A blank that belongs to the first word's token would keep the target from writing that token.
        return self._ids(header.rstrip(" ") if self._joins_blanks else header)

    def _around(self, messages: list[Message]) -> tuple[str, str]:
        """What the template writes before a user's message that follows some messages, and after it."""
        mark = unused_character(json.dumps(messages, ensure_ascii=False, default=str))
        chat = Conversation(self.tokenizer, [*messages, user(mark)], None, self.template_kwargs)
        try:
            rendered = chat.render(chat.messages, add_generation_prompt=True)
        except ValueError as error:
            place = "after these messages" if messages else "to begin with: pass prompts as a data set instead"
            raise ValueError(f"{error} (asked for a user's message {place})") from error
        if mark not in rendered:
            raise ValueError("the chat template doesn't show what a user says: pass prompts as a data set instead")
        header, rest = rendered.split(mark, 1)
        return header, rest

    def _is_joined(self, header: str, word: str) -> bool:
        ids = self._ids(header)
        return self._ids(header + word)[: len(ids)] != ids

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _end_of(self, rest: str) -> TurnEnd:
        """What of the text that follows a user's message is a sign that it has ended."""
        added = {token.content: index for index, token in self.tokenizer.added_tokens_decoder.items()}
        found = [(rest.find(content), -len(content), index) for content, index in added.items() if content.strip()]
        place, _, token = min((one for one in found if one[0] >= 0), default=(len(rest), 0, None))
        # A line break before a text belongs to it: without one, "assistant:" might stand anywhere.
        text = rest[:place].strip(" ").rstrip() if rest[:place].strip() else None
        return TurnEnd(token, text)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless there is a chat template."""
    try:
        tokenizer.get_chat_template(template_kwargs.get("chat_template"))
    except ValueError as error:
        raise ValueError(
            f"self-prompts need a chat template, after whose user header the target goes on, and {tokenizer.name_or_path!r} has "
            "none (a base model?): use its instruct version, pass a chat_template in --chat-template-kwargs, or pass prompts as "
            "a data set"
        ) from error


def marks_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens, which no user types, and their texts."""
    return {index: tokenizer.convert_ids_to_tokens(index) for index in sorted(special_tokens(tokenizer))}
