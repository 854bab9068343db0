"""Text with spans that are learned, as `input_ids` and `labels`. The tokens before a span are those that a prompt would have."""

from transformers import PreTrainedTokenizerBase

from .documents import IGNORED

Span = tuple[int, int]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` for a tokenizer that does not say which characters a token stands for, and a `TypeError` for none."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"expected the target's tokenizer as processing_class, got a {type(tokenizer).__name__}: load it with AutoTokenizer"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"preparing text needs a fast tokenizer, which knows the characters of each token, got a "
            f"{type(tokenizer).__name__}: load one with AutoTokenizer, or pass columns input_ids and labels"
        )


def encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], add_special_tokens: bool = False
) -> dict[str, list[int]]:
    """Tokens of a text, and labels for those inside some spans of it.

    At inference the target reads the text before a span as tokens of its own, and goes on from there. A text in which a token
    reaches over the start of a span is therefore tokenised in pieces.

    Args:
        tokenizer: a fast one.
        text: what to tokenise.
        spans: first character and the one after the last, ascending. Tokens that reach out of them have no label.
        add_special_tokens: whether the tokenizer adds what it adds to a text.

    Returns:
        `input_ids` and `labels`, of one length.
    """
    options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, **options)
    input_ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    starts = {start for start, _ in spans if 0 < start < len(text)}
    if any(first < start < end for start in starts for first, end in offsets):
        input_ids, offsets = _in_pieces(tokenizer, text, sorted(starts), add_special_tokens, options)
    labels = [IGNORED] * len(input_ids)
    span = 0
    for token, (first, end) in enumerate(offsets):
        while span < len(spans) and spans[span][1] <= first:
            span += 1
        if span < len(spans) and spans[span][0] <= first < end <= spans[span][1]:
            labels[token] = input_ids[token]
    return {"input_ids": input_ids, "labels": labels}


def _in_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: list[int], add_special_tokens: bool, options: dict
) -> tuple[list[int], list[Span]]:
    input_ids, offsets = [], []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece_ids, piece_offsets = _piece(tokenizer, text[start:end], start > 0, options)
        input_ids += piece_ids
        offsets += [(first + start, end + start) for first, end in piece_offsets]
    if add_special_tokens:
        before, after = _added_around(tokenizer)
        input_ids = [*before, *input_ids, *after]
        offsets = [*[(0, 0)] * len(before), *offsets, *[(0, 0)] * len(after)]
    return input_ids, offsets


# What stands before a piece while it is tokenised: the first that shares no token with it.
GUARDS = ("\n", "0", "|", "a")


def _piece(
    tokenizer: PreTrainedTokenizerBase, text: str, is_after_text: bool, options: dict
) -> tuple[list[int], list[Span]]:
    """Tokens of a part of a text. Some tokenizers see a blank before each text, which a part in the middle doesn't have."""
    guards = GUARDS if is_after_text and tokenizer.tokenize("a", add_special_tokens=False) != ["a"] else ()
    for guard in guards:
        encoded = tokenizer(guard + text, add_special_tokens=False, **options)
        place = next((i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > len(guard)), None)
        if place is not None and encoded["offset_mapping"][place][0] == len(guard):
            offsets = [(first - len(guard), end - len(guard)) for first, end in encoded["offset_mapping"]]
            return list(encoded["input_ids"][place:]), offsets[place:]
    encoded = tokenizer(text, add_special_tokens=False, **options)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def _added_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before and after a text by itself."""
    encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
    own = [place for place, is_added in enumerate(encoded["special_tokens_mask"]) if not is_added]
    return list(encoded["input_ids"][: own[0]]), list(encoded["input_ids"][own[-1] + 1 :])


def ending_in_eos(tokenizer: PreTrainedTokenizerBase, example: dict[str, list[int]]) -> dict[str, list[int]]:
    """The example with the token that ends a text after it, to be learned."""
    eos = tokenizer.eos_token_id
    if eos is None:
        return example
    input_ids, labels = example["input_ids"], example["labels"]
    if input_ids and input_ids[-1] == eos:
        return {"input_ids": input_ids, "labels": [*labels[:-1], eos]}
    return {"input_ids": [*input_ids, eos], "labels": [*labels, eos]}


def encode_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> dict[str, list[int]]:
    """A prompt, and what the target writes after it, to be learned, with the token that ends it."""
    span = (len(prompt), len(prompt) + len(completion))
    return ending_in_eos(tokenizer, encode_spans(tokenizer, prompt + completion, [span], add_special_tokens=True))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, list[int]]:
    """A text, all of it to be learned, with the token that ends it."""
    return ending_in_eos(tokenizer, encode_spans(tokenizer, text, [(0, len(text))], add_special_tokens=True))
