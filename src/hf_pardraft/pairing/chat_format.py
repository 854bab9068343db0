"""How the chats that a drafter learned from were rendered, and how to see from a prompt's last tokens whether it is one of them.

Chat modes differ in what stands between the user's last word and the answer's first: with Qwen3, `enable_thinking=False` puts an
empty block of thoughts there. That is what `generate` can see, which gets token ids and no template.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

# Two questions that begin and end with different tokens: what their prompts' ends share is the template's.
QUESTIONS = tuple([{"role": "user", "content": text}] for text in ("What is a prime number?", "def add(a, b)"))
# A text that no template has of its own, nor changes: of Unicode's private use area.
PROBE = "\ue000"

# By template: whether it reads lists of parts alone.
_parts_only: dict[str, bool] = {}


def has_chat_template(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> bool:
    """Whether chats can be rendered: with a template of the tokenizer's, or with one that `template_kwargs` bring."""
    return bool(tokenizer.chat_template or template_kwargs.get("chat_template"))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A hash of a tokenizer's chat template (of all of them, where it has several); `None` without one."""
    template = tokenizer.chat_template
    return None if not template else hashlib.sha256(repr(template).encode()).hexdigest()


def describe_chats(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a drafter's config remembers of the chats that it learned from.

    Args:
        tokenizer: the target's, with a chat template.
        template_kwargs: what `apply_chat_template` was given besides the messages.

    Returns:
        `template_hash`, `template_kwargs`, and how prompts end: `prompt_end` as text and `prompt_end_ids` as token ids.
    """
    end = prompt_end(tokenizer, template_kwargs)
    ids = prompt_end_ids(tokenizer, template_kwargs, end)
    return {
        "template_hash": template_hash(tokenizer),
        "template_kwargs": dict(template_kwargs),
        "prompt_end": end,
        "prompt_end_ids": ids,
    }


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> str:
    """A conversation as a text, up to where its answer begins; see [`apply_chat_template`]."""
    options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    return apply_chat_template(tokenizer, messages, **options)


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> Any:
    """`tokenizer.apply_chat_template`, with texts in the form that the template reads.

    Templates of models that see images, too, may read a message's content as a list of parts alone, and show nothing of a text.

    Raises:
        ValueError: if the template refuses the conversation, or fails.
    """
    with explaining_template():
        template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        return tokenizer.apply_chat_template(as_template_reads(tokenizer, messages, template), **options)


def as_template_reads(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Messages, with texts in the form that a chat template reads; see [`apply_chat_template`]."""
    return [in_parts(message) for message in messages] if reads_parts_only(tokenizer, template) else messages


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content, if it is a text, is a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def reads_parts_only(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a chat template shows what a user says in a list of parts, and not as a text."""
    if template not in _parts_only:
        says = {"role": "user", "content": PROBE}
        as_text, as_parts = (shows_probe(tokenizer, message, template) for message in (says, in_parts(says)))
        _parts_only[template] = as_parts and not as_text
    return _parts_only[template]


def shows_probe(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], template: str) -> bool:
    """Whether a chat template has a form for a conversation of this message, in which [`PROBE`] stands."""
    try:
        with explaining_template():
            return PROBE in tokenizer.apply_chat_template([message], chat_template=template, tokenize=False)
    except ValueError:
        return False


@contextmanager
def explaining_template() -> Iterator[None]:
    """Tell what goes wrong in a chat template as a `ValueError`.

    A template is a program that came with the tokenizer. It may refuse a conversation, and fail in any way.
    """
    try:
        yield
    except Exception as error:
        refusal = str(error) if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {error}"
        raise ValueError(f"the chat template refuses this conversation: {refusal}") from error


def prompt_end(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> str:
    """What the template puts after the user's last message to make the model answer; may be empty."""
    with_end = render(tokenizer, QUESTIONS[0], template_kwargs)
    without = render(tokenizer, QUESTIONS[0], {**template_kwargs, "add_generation_prompt": False})
    return with_end[num_shared(with_end, without) :]


def prompt_end_ids(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], end: str) -> list[int]:
    """The last token ids of every rendered prompt, no more than `end` has: tokens that reach into a message are left out."""
    first, second = (
        tokenizer(render(tokenizer, question, template_kwargs), add_special_tokens=False)["input_ids"]
        for question in QUESTIONS
    )
    length = num_shared(first[::-1], second[::-1])
    length = min(length, len(tokenizer(end, add_special_tokens=False)["input_ids"]))
    return [int(token) for token in first[len(first) - length :]]


def num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many entries at the beginning of two sequences are the same."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def ends_otherwise(input_ids: torch.LongTensor, chats: dict[str, Any]) -> bool:
    """Whether any prompt of `input_ids (batch, length)`, padded on the left, ends in other tokens than those chats do."""
    end = chats["prompt_end_ids"]
    # Without ids (a prompt of embeddings) there is nothing to compare.
    if not end or input_ids.shape[1] == 0:
        return False
    if input_ids.shape[1] < len(end):
        return True
    return not bool((input_ids[:, -len(end) :] == input_ids.new_tensor(end)).all())
