"""Which token stands for "not known yet": the checks on a mask token id, and the choice of a free one."""

import re
import warnings

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved beside `model`, if there is one."""
    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError):
        return None


def special_token_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids that begin, end or pad a text, for the model or its tokenizer."""
    facts, special = config.to_dict(), set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = facts.get(key)
        special |= set(ids if isinstance(ids, list) else [ids])
    if tokenizer is not None:
        special |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return special - {None}


def reserved_token_ids(tokenizer: PreTrainedTokenizerBase, special: set[int]) -> list[int]:
    """Ids that the tokenizer names but never writes, ascending: those called reserved or unused (Llama 3 has 200 of them).

    Where there is none, the unknown token, which byte-level and byte-fallback tokenizers don't write either.
    """
    names = re.compile("reserved|unused|mask|pard", re.IGNORECASE)
    reserved = sorted(i for token, i in tokenizer.get_vocab().items() if names.search(token) and i not in special)
    if not reserved and tokenizer.unk_token_id not in (None, *special):
        reserved = [tokenizer.unk_token_id]
    return reserved


def check_mask_token_id(
    mask_token_id: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise a `ValueError` if the id is out of range, or, as far as one can tell, in use."""
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(f"mask_token_id must be in [0, {config.vocab_size}), got {mask_token_id}")
    special = special_token_ids(config, tokenizer)
    names = {} if tokenizer is None else {i: token for token, i in tokenizer.get_vocab().items()}
    is_ordinary = mask_token_id in names and mask_token_id not in reserved_token_ids(tokenizer, special)
    if mask_token_id in special or is_ordinary:
        name = names.get(mask_token_id, "a special token")
        raise ValueError(f"mask_token_id {mask_token_id} is in use ({name!r}): choose an unused id, or pass None")


def choose_mask_token_id(
    config: PreTrainedConfig, mask_token_id: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """Check a mask token id, or pick an unused one.

    The first row of the embedding beyond the tokenizer's last token is the best choice (Qwen2.5: 151665), then the last
    token that the tokenizer itself reserves.

    Args:
        config: the text config of the model whose embedding is used.
        mask_token_id: an id to check, or `None` to pick one.
        tokenizer: what says which ids are used; without it only the special ids of the config can be avoided.

    Raises:
        ValueError: if the id is out of range or in use, or none is free.
    """
    if mask_token_id is not None:
        check_mask_token_id(mask_token_id, config, tokenizer)
        return mask_token_id
    special = special_token_ids(config, tokenizer)
    if tokenizer is None:
        chosen = max(set(range(config.vocab_size)) - special)
        warnings.warn(
            f"no tokenizer to tell which tokens are unused: taking {chosen} as the mask token. Pass mask_token_id or "
            "tokenizer to be sure",
            UserWarning,
            stacklevel=3,
        )
        return chosen
    beyond = max(tokenizer.get_vocab().values()) + 1
    if beyond < config.vocab_size:
        return beyond
    candidates = [i for i in reserved_token_ids(tokenizer, special) if i < config.vocab_size]
    if not candidates:
        raise ValueError(
            f"all {config.vocab_size} tokens are in use: add a token to the tokenizer, resize the model's embedding, and "
            "pass its id as mask_token_id"
        )
    return candidates[-1]
