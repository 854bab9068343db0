"""Where in a chat template a user's turn begins and ends, for any template: read off what it renders."""

from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from .chat import Conversation, Message, special_tokens, unused_character

# First words that no tokenizer joins in the same way with what stands before them: what the tokens of all have in common is the
# header. Many tokenizers join a blank at its end with a word, but not with a digit.
FIRST_WORDS = ("What", "how", "2", "(", "É", "请")


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
        mark = unused_character("")
        try:
            rendered = self._render([user(mark)], add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a conversation that begins with a user's message: {error}. "
                "Pass prompts as a data set instead"
            ) from error
        if mark not in rendered:
            raise ValueError("the chat template doesn't show what a user says: pass prompts as a data set instead")
        self.end = self._end_of(rendered.split(mark, 1)[1])
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
        try:
            rendered = [self._render([*messages, user(word)]) for word in FIRST_WORDS]
        except TemplateError as error:
            raise ValueError(f"the chat template refuses its conversation: {error}") from error
        tokens = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        differs = (place for place, column in enumerate(zip(*tokens, strict=False)) if len(set(column)) > 1)
        return tokens[0][: next(differs, min(map(len, tokens)))]

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        chat = Conversation(self.tokenizer, messages, None, self.template_kwargs)
        return chat.render(messages, add_generation_prompt)

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
            "none (a base model?): use its instruct version, or pass prompts as a data set"
        ) from error


def marks_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens, which no user types, and their texts."""
    return {index: tokenizer.convert_ids_to_tokens(index) for index in sorted(special_tokens(tokenizer))}
