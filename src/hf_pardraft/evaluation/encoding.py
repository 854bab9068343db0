"""Questions as token ids: with the target's chat template where it has one, and with its own answers between turns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..pairing.chat_format import apply_chat_template
from ..user_input.models import context_length
from .prompts import Question

Answer = Callable[[torch.LongTensor], list[int]]


@dataclass(frozen=True)
class Chat:
    """How a conversation is written down.

    Attributes:
        use_template: whether with the tokenizer's chat template; without, texts follow each other.
        template_arguments: for the template, such as `enable_thinking`.
    """

    use_template: bool
    template_arguments: dict[str, Any] = field(default_factory=dict)


def encode(question: Question, tokenizer: PreTrainedTokenizerBase, chat: Chat) -> torch.LongTensor:
    """The question, ready to be answered: token ids of `(1, length)`."""
    if not chat.use_template:
        return tokenizer(question.completion, return_tensors="pt").input_ids
    encoded = apply_chat_template(
        tokenizer,
        [dict(message) for message in question.messages],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **(chat.template_arguments | question.template_arguments),
    )
    return encoded["input_ids"]


def encode_all(
    questions: list[Question],
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    answer: Answer | None,
    room: int | None,
) -> tuple[list[torch.LongTensor], int]:
    """The prompts of all questions: one for the first turn and, if they are to be had, one for each later turn.

    A later turn follows the target's own answers to the earlier ones, so that all contenders read the same.

    Args:
        questions: what to ask.
        tokenizer: the target's.
        chat: how to write it down.
        answer: gives the new token ids after a prompt; `None` leaves later turns out.
        room: tokens that a prompt may have; `None` for any number.

    Returns:
        The prompts, `(1, length)` each, and how many were left out because they are empty or longer than `room`.
    """
    prompts, num_left_out = [], 0
    for question in questions:
        while True:
            prompt = encode(question, tokenizer, chat)
            if prompt.shape[1] == 0 or (room is not None and prompt.shape[1] > room):
                num_left_out += 1
                break
            prompts.append(prompt)
            if answer is None or not question.later_turns:
                break
            question = answered(question, tokenizer.decode(answer(prompt), skip_special_tokens=True))
    return prompts, num_left_out


def answered(question: Question, answer: str) -> Question:
    """The next turn of a question."""
    turn, *later = question.later_turns
    messages = (*question.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": turn})
    completion = f"{question.completion}\n\n{answer}\n\n{turn}"
    return Question(messages, completion, tuple(later), question.template_arguments)


def room_for_prompts(config: PreTrainedConfig, max_new_tokens: int) -> int | None:
    """How long a prompt may be, so that the text fits into the target's context; `None` if that has no end.

    Raises:
        ValueError: if there is no room.
    """
    context = context_length(config)
    if context is None:
        return None
    if context <= max_new_tokens:
        raise ValueError(
            f"{max_new_tokens} new tokens leave no room for a prompt, since the target's context is {context} tokens: ask for "
            f"at most {context - 1}"
        )
    return context - max_new_tokens


def random_prompts(count: int, length: int, vocab_size: int, avoid: set[int]) -> list[torch.LongTensor]:
    """Prompts of `(1, length)` random tokens, the same every time, without the tokens to `avoid`."""
    allowed = torch.tensor([token for token in range(vocab_size) if token not in avoid])
    generator = torch.Generator().manual_seed(0)
    return [allowed[torch.randint(len(allowed), (1, length), generator=generator)] for _ in range(count)]
