"""A prompt and its completion: the tokens of the prompt are those of inference, and no text is lost, changed or added."""

import pytest

from hf_pardraft.training.data.encoding import encode_completion, encode_text
from tiny_tokenizers import tiny_blank_first_tokenizer, tiny_chat_tokenizer

PAIRS = [
    ("what is", " the sum"),
    ("what is ", "the sum"),
    ("what is th", "e sum"),
    ("what is the ", " sum"),
    ("two", "three"),
    ("", "the sum is five"),
    ("what is it", ""),
]


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_a_tokenizer_that_begins_texts_with_a_blank_adds_none_to_a_completion(prompt, completion, adds):
    tokenizer = tiny_blank_first_tokenizer(adds)
    example = encode_completion(tokenizer, prompt, completion)
    ids = example["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + completion
    assert ids.count(0) == adds.count("<s>")
    assert ids.count(1) == 1
    assert ids[-1] == example["labels"][-1] == 1
    if prompt:
        first = example["labels"].index(next(label for label in example["labels"] if label != -100))
        given = tokenizer(prompt)["input_ids"]
        # A token that ends the prompt by itself is no part of a longer text.
        assert ids[:first] == [token for token in given if token != 1]
        assert (
            tokenizer.decode(ids[:first] + example["labels"][first:-1], skip_special_tokens=True) == prompt + completion
        )


@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_a_byte_level_tokenizer_goes_on_from_the_tokens_of_the_prompt(prompt, completion):
    tokenizer = tiny_chat_tokenizer("chatml")
    example = encode_completion(tokenizer, prompt, completion)
    given = tokenizer(prompt)["input_ids"]
    assert example["input_ids"][: len(given)] == given
    assert example["labels"] == [-100] * len(given) + example["input_ids"][len(given) :]
    assert tokenizer.decode(example["input_ids"]) == prompt + completion + "<|im_end|>"


def test_without_an_end_of_text_there_is_none_to_learn():
    tokenizer = tiny_chat_tokenizer("chatml")
    tokenizer.eos_token = None
    assert tokenizer.decode(encode_completion(tokenizer, "what is", " it")["labels"][-1:]) == " it"
    assert tokenizer.decode(encode_text(tokenizer, "two and three")["labels"]) == "two and three"
