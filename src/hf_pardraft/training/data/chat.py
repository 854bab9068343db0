"""Conversations as `input_ids` and `labels`: what the assistant wrote is learned, as the chat template shows it, with its end."""

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ...pairing.chat_format import apply_chat_template, as_template_reads, explaining_template
from ...user_input.conversations import are_messages
from .documents import IGNORED
from .encoding import Span, encode_spans, ending_in_eos

Message = dict[str, Any]
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
# What a message may say outside its content.
SAID_ELSEWHERE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages and how a tokenizer's chat template renders them.

    Attributes:
        tokenizer: with a chat template.
        messages: dicts with `role`, `content` and what else the template knows.
        tools: as `apply_chat_template` takes them.
        template_kwargs: what else the template takes, such as `enable_thinking`.
    """

    tokenizer: PreTrainedTokenizerBase
    messages: list[Message]
    tools: list | None
    template_kwargs: dict[str, Any]

    @property
    def template(self) -> str:
        """The chat template that renders them: one of the tokenizer's, or what `template_kwargs` bring."""
        return self.tokenizer.get_chat_template(self.template_kwargs.get("chat_template"), tools=self.tools)

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as a text; a `ValueError` if the template refuses it, or fails."""
        return apply_chat_template(
            self.tokenizer,
            messages,
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )

    def marked(self, text: str) -> list[Span]:
        """What of the rendered conversation stands in the template's `{% generation %}` blocks; none if it is another text."""
        options = {**self.tokenizer.special_tokens_map, **self.template_kwargs, "chat_template": self.template}
        messages = as_template_reads(self.tokenizer, self.messages, self.template)
        with explaining_template():
            options |= {"tools": self.tools, "return_assistant_tokens_mask": True}
            (rendered,), (spans,) = render_jinja_template([messages], **options)
        return list(spans) if rendered == text else []

    def can_render(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        """As [`render`], but `None` for a part of a conversation that the template has no form for."""
        if not messages:
            return None
        try:
            return self.render(messages, add_generation_prompt)
        except ValueError:
            return None


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list | None = None,
    template_kwargs: dict[str, Any] | None = None,
    num_given: int = 0,
) -> dict[str, list[int]]:
    """A conversation through the chat template; every turn of the assistant is learned, its end-of-turn token included.

    Templates that mark the assistant's text with `{% generation %}` decide for themselves. Of others each turn is found by
    rendering: it begins where the conversation before it, with the generation prompt, ends. What the template leaves out of
    earlier turns (their thinking) is not in the text, and so is not learned.

    Args:
        tokenizer: a fast one, with a chat template.
        messages: `role`, `content` and what else the template knows.
        tools, template_kwargs: see [`Conversation`].
        num_given: how many of the first messages are a prompt, and not learned whoever wrote them.

    Returns:
        `input_ids` and `labels`.

    Raises:
        ValueError: if these are no messages, or the template refuses them.
    """
    check_messages(messages)
    chat = Conversation(tokenizer, messages, tools, template_kwargs or {})
    text = chat.render(messages)
    spans = spans_of_generation_blocks(chat, text) if num_given == 0 and marks_generation(chat) else []
    example = encode_spans(tokenizer, text, spans or assistant_spans(chat, text, num_given))
    example["labels"] = without_space_after_the_end(tokenizer, example)
    is_learned = len(messages) > num_given and messages[-1]["role"] == "assistant"
    if is_learned and has_no_end(chat, text, example):
        return ending_in_eos(tokenizer, example)
    return example


def check_messages(messages: Any) -> None:
    """Raise a `ValueError` unless these are messages."""
    if not are_messages(messages):
        raise ValueError(f"expected a list of messages, dicts with role and content, got {str(messages)[:200]}")


def marks_generation(chat: Conversation) -> bool:
    return bool(GENERATION_BLOCK.search(chat.template))


def spans_of_generation_blocks(chat: Conversation, text: str) -> list[Span]:
    """Where in the rendered conversation stands what the template marks, and each turn's end if the marks leave it out."""
    marked = chat.marked(text)
    ends = {end_of_turn(chat, index, text) for index in assistant_turns(chat.messages, 0)} if marked else set()
    spans: list[Span] = []
    for start, end_of_content in sorted(marked):
        follows = [common_end(chat, text[end_of_content:], end, "") for end in ends]
        span = start, end_of_content + max((len(end) for end in follows if end.strip()), default=0)
        if span[0] < span[1] and (not spans or spans[-1][1] <= span[0]):
            spans.append(span)
    return spans


def assistant_turns(messages: list[Message], num_given: int) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= num_given]


def assistant_spans(chat: Conversation, text: str, num_given: int) -> list[Span]:
    """Where in the rendered conversation the assistant's turns stand, ascending and apart."""
    spans: list[Span] = []
    for index in assistant_turns(chat.messages, num_given):
        span = _turn_span(chat, text, index)
        if span is not None and span[0] < span[1] and (not spans or spans[-1][1] <= span[0]):
            spans.append(span)
    return spans


def _turn_span(chat: Conversation, text: str, index: int) -> Span | None:
    prompt = chat.can_render(chat.messages[:index], add_generation_prompt=True)
    so_far = chat.can_render(chat.messages[: index + 1])
    follows_prompt = prompt is not None and text.startswith(prompt)
    if follows_prompt and so_far is not None and text.startswith(so_far) and len(prompt) <= len(so_far):
        return len(prompt), len(so_far)
    # The template shows the turn otherwise once others follow: look for its content, and the end after it.
    given, stands_at = what_is_given(chat, text, index)
    prompted = stands_at + len(given) if given and text.startswith(given, stands_at) else None
    content = content_span(chat, text, chat.messages, index)
    if content is None:
        return None if prompted is None else up_to_the_end_of_text(chat, text, index, prompted)
    start, end_of_content = content
    if follows_prompt and len(prompt) <= start:
        start = len(prompt)
    elif prompted is not None and prompted <= start:
        start = prompted
    ends = [end_of_turn(chat, index, text, left_out=left_out) for left_out in (SAID_ELSEWHERE, ())]
    return start, end_of_content + max(len(common_end(chat, text[end_of_content:], end, given)) for end in ends)


def up_to_the_end_of_text(chat: Conversation, text: str, index: int, start: int) -> Span | None:
    """From where the prompt of an answer ends to the tokenizer's end of text, if that comes before the next message."""
    is_last = index + 1 == len(chat.messages)
    following = (len(text), 0) if is_last else content_span(chat, text, chat.messages, index + 1)
    eos = chat.tokenizer.eos_token
    place = -1 if following is None or not eos else text.find(eos, start, following[0])
    return None if place < 0 else (start, place + len(eos))


def what_is_given(chat: Conversation, text: str, index: int) -> tuple[str, int]:
    """What a prompt has between the content of the message before the answer `index` and that answer, and where in the
    conversation that content ends: the template may show the prompt otherwise once the answer is there."""
    before = content_span(chat, text, chat.messages, index - 1) if index else None
    return ("", 0) if before is None else (end_of_turn(chat, index - 1, text, add_generation_prompt=True), before[1])


def content_span(chat: Conversation, text: str, messages: list[Message], index: int) -> Span | None:
    """Where stands what one message says, from what changes if it is replaced; `None` if nothing does."""
    mark, says_more = unused_character(text), any(name in messages[index] for name in SAID_ELSEWHERE)
    # Not all templates have a form for a conversation without its tool call.
    for left_out in [SAID_ELSEWHERE, ()] if says_more else [()]:
        replaced = chat.can_render(with_content(messages, index, mark, left_out))
        if replaced is None or mark not in replaced:
            continue
        before, after = replaced.split(mark, 1)
        start = len(common_prefix(text, before))
        if text.endswith(after) and start <= len(text) - len(after):
            return start, len(text) - len(after)
    return None


def end_of_turn(
    chat: Conversation, index: int, text: str, add_generation_prompt: bool = False, left_out: tuple[str, ...] = ()
) -> str:
    """What the template writes after the content of a message that is the last one, `left_out` what else it says."""
    mark = unused_character(text)
    messages = with_content(chat.messages[: index + 1], index, mark, left_out)
    replaced = chat.can_render(messages, add_generation_prompt)
    return "" if replaced is None or mark not in replaced else replaced.split(mark, 1)[1]


def common_end(chat: Conversation, text: str, end: str, given: str) -> str:
    """How far a text begins as a last turn ends, up to a special token if not all the way: what follows is another turn's.

    Some templates end the last turn with another token than those before it. Then the turn ends as the message before it
    does, with what `given` begins with.
    """
    common = common_prefix(text, end)
    if common == end:
        return end
    special = [token for token in chat.tokenizer.convert_ids_to_tokens(sorted(special_tokens(chat.tokenizer))) if token]
    shared = common[: max((common.rfind(token) + len(token) for token in special if token in common), default=0)]
    others = [token for token in special if text.startswith(token) and given.startswith(token)]
    return shared or max(others, key=len, default="")


def common_prefix(one: str, other: str) -> str:
    """What both begin with."""
    length = min(len(one), len(other))
    # Halving is quicker than a walk over characters, and conversations are long.
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def with_content(messages: list[Message], index: int, content: str, left_out: tuple[str, ...] = ()) -> list[Message]:
    is_text = not isinstance(messages[index].get("content"), list)
    kept = {name: value for name, value in messages[index].items() if name not in left_out}
    changed = {**kept, "content": content if is_text else [{"type": "text", "text": content}]}
    return [*messages[:index], changed, *messages[index + 1 :]]


def unused_character(text: str) -> str:
    """One that the text does not have, from those that nobody types (Unicode's private use area)."""
    return next(mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in text)


def without_space_after_the_end(tokenizer: PreTrainedTokenizerBase, example: dict[str, list[int]]) -> list[int]:
    """Labels without those of blanks between an end-of-turn token and the end of a turn: the target stops at that token."""
    labels, special = list(example["labels"]), special_tokens(tokenizer)
    for place in reversed(range(len(labels))):
        is_last = labels[place] != IGNORED and (place + 1 == len(labels) or labels[place + 1] == IGNORED)
        if not is_last:
            continue
        blank = place
        while blank >= 0 and labels[blank] not in special and is_blank(tokenizer, labels[blank]):
            blank -= 1
        if blank >= 0 and labels[blank] in special:
            labels[blank + 1 : place + 1] = [IGNORED] * (place - blank)
    return labels


def without_end(tokenizer: PreTrainedTokenizerBase, example: dict[str, list[int]]) -> dict[str, list[int]]:
    """The example up to its last answer, without the special tokens and blanks that end it."""
    labels, special = example["labels"], special_tokens(tokenizer)
    length = len(labels)
    while length and (
        labels[length - 1] in special or labels[length - 1] == IGNORED or is_blank(tokenizer, labels[length - 1])
    ):
        length -= 1
    return {name: values[:length] for name, values in example.items()}


def is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return token != IGNORED and not tokenizer.decode([token]).strip()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def has_no_end(chat: Conversation, text: str, example: dict[str, list[int]]) -> bool:
    """Whether the template lets the last turn end without a token that says so."""
    if not example["input_ids"] or example["input_ids"][-1] in special_tokens(chat.tokenizer):
        return False
    return not end_of_turn(chat, len(chat.messages) - 1, text).strip()
