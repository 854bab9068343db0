"""Users' messages that the target writes: asked to go on right after its chat template's user header, it invents them.

Not all are worth an answer: see [`refusal`].
"""

import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria

from .local_writer import LocalWriter
from .refilled_batch import Item
from .rewriting import SEED_BITS, Answer, check_sampling
from .user_turns import UserTurns, marks_of

CUT_OFF = "cut off"
# Fewer tokens ask for nothing: "Hello!", "ok", ".".
MIN_TOKENS = 4
# Runs of tokens that are counted, and the share of them that must differ.
RUN_LENGTH = 4
MIN_DISTINCT = 0.5
# In shorter texts a repeated run means little.
MIN_REPEATING_TOKENS = 16
# Categories of Unicode: control characters, halves of surrogate pairs, characters of private use.
UNTYPED_CATEGORIES = {"Cc", "Cs", "Co"}
TYPED_CONTROLS = set("\n\r\t")
# Stands for bytes that are no text.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class PromptSampling:
    """How users' messages are sampled.

    Attributes:
        temperature, top_p: of the law that they are sampled from.
        max_tokens: a message that is not at its end by then is not used.
        more_turns: the probability that a user goes on after an answer.
        max_turns: most messages of a user in a dialogue.
        systems: system messages that steer what users ask about first, one after another; an empty one is none. Answers don't
            see them: that system messages draw other prompts out of a model is the paper's way to code and mathematics.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256
    more_turns: float = 0.25
    max_turns: int = 4
    systems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.max_tokens)
        if not self.temperature:
            raise ValueError("expected a temperature of prompts above 0, got 0: all prompts would be the same one")
        if not 0 <= self.more_turns <= 1 or self.max_turns < 1:
            raise ValueError(
                f"expected more_turns in [0, 1] and max_turns >= 1, got {self.more_turns} and {self.max_turns}"
            )

    def settings(self) -> dict[str, Any]:
        """What first messages depend on, by the names of the command's options."""
        names = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return {f"prompt_{name}": value for name, value in names.items()} | {"prompt_system": list(self.systems)}


@dataclass(frozen=True)
class UserTurn:
    """A message of a user that is to be written; a [`PromptWriter`] takes it as a [`LocalWriter`] takes a row.

    Attributes:
        index: of the prompt or the dialogue.
        messages: what was said before.
        salt: tells apart the seeds of first messages, of later ones, and of answers.
    """

    index: int
    messages: list[dict[str, Any]]
    salt: str
    prompt_text: str | None = None

    def seed(self, seed: int) -> int:
        return zlib.crc32(f"{seed} {self.index} {len(self.messages)} {self.salt}".encode()) & SEED_BITS


@dataclass(frozen=True)
class SelfPrompt(Answer):
    """What a user says, and why it is not used; `None` if it is."""

    refused: str | None = None


class PromptWriter(LocalWriter):
    """Writes users' messages with the target of another writer, up to a token, or a text, that ends them.

    Args:
        writer: of the answers.
        sampling: of the messages.

    Raises:
        ValueError: if the chat template does not show where a user's message begins, or refuses a system message.
    """

    def __init__(self, writer: LocalWriter, sampling: PromptSampling) -> None:
        super().__init__(
            writer.target,
            writer.tokenizer,
            writer.drafter,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            batch_size=writer.batch_size,
            seed=writer.seed,
            template_kwargs=writer.template_kwargs,
            pack_weights=writer.pack_weights,
        )
        self.turns = UserTurns(writer.tokenizer, writer.template_kwargs)
        self.openings = [[{"role": "system", "content": text}] if text else [] for text in sampling.systems or ("",)]
        for messages in self.openings:
            self.turns.header_ids(messages)
        self.marks = marks_of(writer.tokenizer)
        self.good_ends = self.end_ids | ({self.turns.end.token} - {None})
        # No message goes on after a special token, whichever it is.
        self.end_ids = self.good_ends | set(self.marks)

    def first_turn(self, number: int) -> UserTurn:
        """That of the prompt of this number."""
        return UserTurn(number, self.openings[number % len(self.openings)], "prompt")

    def ask(self, turns: Iterable[UserTurn]) -> Iterator[tuple[UserTurn, SelfPrompt]]:
        """What a user says in each of some turns, in the order in which they get done.

        Raises:
            ValueError: if a conversation leaves no room for a user's message.
        """
        batch, waiting = self.new_batch(), [self.item(turn) for turn in turns]
        while waiting or batch.items:
            batch.refill(waiting)
            yield from self.written(batch)

    def answer_of(self, ids: list[int], prompt: list[int]) -> SelfPrompt:
        """The message up to what ends it."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        text, ending = self.decode(ids[:end]), self.turns.end.text
        is_whole = end is not None and ids[end] in self.good_ends
        if ending is not None and ending in text:
            text, is_whole = text.split(ending, 1)[0], True
        if not is_whole:
            return SelfPrompt(text.strip(), is_whole=False, refused=CUT_OFF if end is None else "special tokens")
        text = text.strip()
        written = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return SelfPrompt(text, refused=refusal(text, written, list(self.marks.values())))

    def _chat_ids(self, rewrite: UserTurn) -> list[int]:
        return self.turns.header_ids(rewrite.messages)

    def is_ended(self, item: Item) -> bool:
        ending = self.turns.end.text
        return super().is_ended(item) or (ending is not None and ending in self.decode(item.written))

    def _sampling(self, items: list[Item]) -> dict[str, Any]:
        options = super()._sampling(items)
        if self.drafter is not None and self.turns.end.text is not None:
            options |= {"stop_strings": [self.turns.end.text], "tokenizer": self.tokenizer}
        return options

    def _item_criteria(self) -> StoppingCriteriaList:
        ending = self.turns.end.text
        return StoppingCriteriaList([] if ending is None else [StopStringCriteria(self.tokenizer, [ending])])


def refusal(text: str, ids: list[int], marks: list[str]) -> str | None:
    """Why a prompt is not used, in a word or two; `None` if it is.

    Args:
        text: of the prompt.
        ids: its tokens.
        marks: texts of the tokenizer's special tokens. Written out letter by letter they would be read as these tokens.
    """
    if not text.strip():
        return "empty"
    if any(mark in text for mark in marks):
        return "special tokens"
    if any(is_untyped(character) for character in text):
        return "control characters"
    if len(ids) < MIN_TOKENS or not any(character.isalnum() for character in text):
        return "too short"
    if is_repetitive(ids):
        return "repetitive"
    return None


def is_untyped(character: str) -> bool:
    """Whether nobody types this."""
    if character in TYPED_CONTROLS:
        return False
    return character == REPLACEMENT or unicodedata.category(character) in UNTYPED_CATEGORIES


def is_repetitive(ids: list[int]) -> bool:
    """Whether more than half of the runs of four tokens have been there before."""
    runs = [tuple(ids[start : start + RUN_LENGTH]) for start in range(len(ids) - RUN_LENGTH + 1)]
    return len(ids) >= MIN_REPEATING_TOKENS and len(set(runs)) < MIN_DISTINCT * len(runs)


def gist(text: str) -> str:
    """What two prompts have in common that differ in capitals, blanks and punctuation alone."""
    words = "".join(character if character.isalnum() else " " for character in text.casefold()).split()
    return " ".join(words) or text
