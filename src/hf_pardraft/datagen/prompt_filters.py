"""Which of the prompts that a target invents are worth an answer."""

import unicodedata

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
