"""Which tokens stand for "not known yet": the checks on mask token ids, and the choice of free ones."""

import re
import warnings
from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.config_checks import is_whole

# Placeholders such as <|reserved_special_token_7|> or [unused3]; not the words that only contain one of these, say "leopard".
PLACEHOLDER = re.compile(r"[<\[].*(reserved|unused|mask|pard).*[>\]]", re.IGNORECASE)
# Bytes that are in no UTF-8 text, as byte-fallback tokenizers (SentencePiece's) name them.
BYTE_OF_NO_TEXT = re.compile(r"<0x(C0|C1|F[5-9A-F])>", re.IGNORECASE)
ADVICE = "choose an unused id (pairing.mask_token.unused_token_ids finds them), or pass None"


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved beside `model`, if there is one."""
    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False)
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
    """Ids that the tokenizer names but never writes, the best masks first.

    Those called reserved or unused, from the last (Llama 3 has 200 of them). Where there is none, the unknown token, which
    byte-level and byte-fallback tokenizers don't write either. Then the 13 bytes that are in no UTF-8 text, where a byte-fallback
    tokenizer has tokens for all 256 (Llama 2, stories260K).
    """
    vocabulary = tokenizer.get_vocab()
    named = {i for token, i in vocabulary.items() if PLACEHOLDER.fullmatch(token)} - special
    if not named and tokenizer.unk_token_id is not None:
        named = {tokenizer.unk_token_id} - special
    bytes_of_no_text = {i for token, i in vocabulary.items() if BYTE_OF_NO_TEXT.fullmatch(token)} - special
    return sorted(named, reverse=True) + sorted(bytes_of_no_text, reverse=True)


def unused_token_ids(
    config: PreTrainedConfig, count: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[int]:
    """`count` ids that no text has, the best masks first.

    First come the rows of the embedding beyond the tokenizer's last token (Qwen2.5: from 151665), then the tokens that the
    tokenizer itself reserves; see [`reserved_token_ids`].

    Args:
        config: the text config of the model whose embedding is used.
        count: how many are needed: K - 1 for one mask of its own for each of K drafted tokens but the first.
        tokenizer: says which ids are used; without it only the special ids of the config are avoided, with a warning.

    Raises:
        ValueError: if there are fewer.
    """
    special = special_token_ids(config, tokenizer)
    if tokenizer is None:
        free = [i for i in reversed(range(config.vocab_size)) if i not in special]
    else:
        beyond = range(max(tokenizer.get_vocab().values()) + 1, config.vocab_size)
        free = [
            i for i in (*beyond, *reserved_token_ids(tokenizer, special)) if i < config.vocab_size and i not in special
        ]
    if len(free) < count:
        found = (
            f"{len(free)} of {config.vocab_size} tokens are unused ({free})"
            if free
            else f"all {config.vocab_size} tokens are in use"
        )
        raise ValueError(
            f"{found}, and {count} are needed for masks: add tokens to the tokenizer, resize the model's embedding, and pass "
            "their ids as mask_token_id"
        )
    if tokenizer is None:
        warnings.warn(
            f"no tokenizer to tell which tokens are unused: taking {', '.join(map(str, free[:count]))} as mask token. Pass "
            "mask_token_id or tokenizer to be sure",
            UserWarning,
            # Of whoever called for_target or from_causal_lm.
            stacklevel=7,
        )
    return free[:count]


def check_mask_token_id(
    mask_token_id: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise a `ValueError` if the id is none, out of range, or, as far as one can tell, in use."""
    if not is_whole(mask_token_id):
        raise ValueError(f"mask_token_id must be the id of one token here, got {mask_token_id!r}: {ADVICE}")
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(f"mask_token_id must be in [0, {config.vocab_size}), got {mask_token_id}: {ADVICE}")
    special = special_token_ids(config, tokenizer)
    names = {} if tokenizer is None else {i: token for token, i in tokenizer.get_vocab().items()}
    is_ordinary = mask_token_id in names and mask_token_id not in reserved_token_ids(tokenizer, special)
    if mask_token_id in special or is_ordinary:
        name = names.get(mask_token_id, "a special token")
        raise ValueError(f"mask_token_id {mask_token_id} is in use ({name!r}): {ADVICE}")


def check_mask_token_ids(
    mask_token_ids: Sequence[int], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise a `ValueError` unless each mask has an unused id of its own; see [`check_mask_token_id`]."""
    if not mask_token_ids or len(set(mask_token_ids)) < len(mask_token_ids):
        raise ValueError(
            f"a list as mask_token_id gives each mask an id of its own, got {list(mask_token_ids)}: pass at least one, all "
            "different, or a single id for all masks"
        )
    for mask_token_id in mask_token_ids:
        check_mask_token_id(mask_token_id, config, tokenizer)


def choose_mask_token_id(
    config: PreTrainedConfig, mask_token_id: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """Check a mask token id, or pick an unused one; see [`unused_token_ids`].

    Args:
        config: the text config of the model whose embedding is used.
        mask_token_id: an id to check, or `None` to pick one.
        tokenizer: what says which ids are used; without it only the special ids of the config can be avoided.

    Raises:
        ValueError: if the id is out of range or in use, or none is free.
    """
    if mask_token_id is None:
        return unused_token_ids(config, 1, tokenizer)[0]
    check_mask_token_id(mask_token_id, config, tokenizer)
    return mask_token_id
