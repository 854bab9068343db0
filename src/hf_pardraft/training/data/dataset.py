"""A data set of raw examples as one that can be trained on: tokenised, rid of what teaches nothing, and perhaps packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...pairing.chat_format import has_chat_template
from ...user_input.copies import copies_of
from ...user_input.data import load_data, require_datasets
from ..layouts import DroppedMasks, Layout
from .documents import IGNORED, OPTIONAL, TOKEN_MASKS, has_something_to_learn, labels_of, packed_examples
from .encoding import check_tokenizer
from .formats import (
    COLUMNS_OF_KIND,
    PER_TOKEN,
    ExampleEncoder,
    check_kind,
    check_tokens,
    example_kind,
    has_messages,
    lengths_of,
    with_checked_tokens,
)
from .sources import first_row

logger = logging.get_logger(__name__)

EXAMPLES_PER_PACKING = 1000


def _has_in_columns(*values: Any, names: Sequence[str], teaches: Callable[[dict[str, Any]], bool]) -> bool:
    return teaches(dict(zip(names, values, strict=True)))


def prepare_data(
    data: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
    packing: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    layout: type[Layout] = DroppedMasks,
    num_proc: int | None = None,
    vocab_size: int | None = None,
    context: int | None = None,
) -> Any:
    """A data set of raw examples as one of `input_ids` and `labels`; examples that teach nothing are dropped.

    Rows have `messages` (and perhaps `tools`), `prompt` and `completion` (texts or messages), `text`, or `input_ids` and
    `labels`, which are left as they are. Learned is what the assistant wrote, the completion, or the text, and the token that
    ends it. Rows of `input_ids` may say what is learned as TRL's do, too, with 1 in `completion_mask` and `assistant_masks`; of
    several, labels included, all must agree.

    Args:
        data: what [`load_data`] takes: a `datasets` data set, rows in memory, or where to find them.
        tokenizer: of the target; token ids need none.
        max_length: tokens at which examples are cut off, and the length of packed rows.
        packing: whether to put several examples in a row, with `document_ids`.
        template_kwargs: what the chat template takes besides messages.
        layout: of the drafter's batches, which says how much an example needs so that there is something to draft.
        num_proc: processes to prepare with.
        vocab_size: of the models that will read the tokens; `None` leaves their range unchecked.
        context: how many tokens the target reads at most. Longer examples are cut off there, those of tokens too, unless they
            are packed.

    Returns:
        A `Dataset`, or an `IterableDataset` for an iterable one. Any other kind of data set is returned as it is.

    Raises:
        ValueError: for columns or rows that are none of the above, a tokenizer that is missing, slow or without a chat
            template, for token ids that are none, and if there is nothing to learn in any example.
    """
    require_datasets("preparing training data")
    from datasets import Dataset, IterableDataset

    if isinstance(data, list | tuple):
        return _prepare_rows(list(data), tokenizer, max_length, packing, template_kwargs, layout, vocab_size, context)
    data = load_data(data)
    if not isinstance(data, Dataset | IterableDataset):
        return data
    with copies_of(data):
        return _prepare_data_set(
            data, tokenizer, max_length, packing, template_kwargs or {}, layout, num_proc, vocab_size, context
        )


def _prepare_data_set(
    data: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int | None,
    packing: bool,
    template_kwargs: dict[str, Any],
    layout: type[Layout],
    num_proc: int | None,
    vocab_size: int | None,
    context: int | None,
) -> Any:
    """[`prepare_data`] of one of `datasets`' own."""
    from datasets import IterableDataset

    first = first_row(data)
    columns = data.column_names or list(first)
    kind = example_kind(columns)
    check_something_encodes(kind, tokenizer, first, template_kwargs)
    options = {} if isinstance(data, IterableDataset) else {"num_proc": num_proc}
    if kind != "tokens":
        encode = ExampleEncoder(tokenizer, kind, readable_length(max_length, context), template_kwargs)
        data, columns = tokenized(data, columns, encode, options), ["input_ids", "labels"]
    data = with_checked_tokens(data, columns, vocab_size)
    if kind == "tokens":
        data, columns = from_given_tokens(data, columns, context, options)
    # Of what was encoded here labels say all.
    data = _with_something_to_learn(data, columns if kind == "tokens" else ["labels"], layout, options)
    if packing and "document_ids" not in columns:
        data = packed(data, columns, max_length, options)
    return data


def tokenized(data: Any, columns: list[str], encode: ExampleEncoder, options: dict[str, Any]) -> Any:
    """Raw rows as rows of tokens and labels, in place of their `columns`; `options` are those of `map`."""
    options = {**options, **described("Tokenizing", data)}
    return data.map(encode, with_indices=True, remove_columns=columns, features=token_features(), **options)


def packed(data: Any, columns: list[str], max_length: int | None, options: dict[str, Any]) -> Any:
    """Rows of tokens, several of them in one of at most `max_length`, with `document_ids`. Arguments as in [`tokenized`]."""
    pack = partial(packed_examples, max_length=max_length)
    options = {**options, **described("Packing", data)}
    data = with_labels(data, columns)
    return data.map(pack, batched=True, batch_size=EXAMPLES_PER_PACKING, remove_columns=columns, **options)


def from_given_tokens(
    data: Any, columns: list[str], context: int | None, options: dict[str, Any]
) -> tuple[Any, list[str]]:
    """Rows that came as token ids, cut off where the target's context ends unless they are packed, and with `labels` in place
    of masks that say what is learned.

    Args:
        data: the rows.
        columns: that they have.
        context: how many tokens the target reads at most.
        options: of `map`.

    Returns:
        The rows, and the columns that they have now.
    """
    if context is not None and "document_ids" not in columns:
        data = within_context(data, columns, context)
    masks = [name for name in TOKEN_MASKS if name in columns]
    if masks:
        data = data.map(_labelled, remove_columns=masks, **options, **described("Reading masks", data))
        columns = [*(name for name in columns if name not in (*masks, "labels")), "labels"]
    return data, columns


def readable_length(max_length: int | None, context: int | None) -> int | None:
    """Where texts are cut off: at `max_length`, or where the target's context ends, if that is before."""
    if context is None or (max_length is not None and max_length <= context):
        return max_length
    if max_length is not None:
        logger.warning_once(
            f"the target reads {context} tokens: texts are cut off there, and not at max_length={max_length}"
        )
    return context


def within_context(data: Any, columns: list[str], context: int) -> Any:
    """Rows of tokens, cut off where the target's context ends."""
    from datasets import Dataset

    per_token = [name for name in ("input_ids", *PER_TOKEN, *TOKEN_MASKS) if name in columns]
    cut = partial(cut_off, names=per_token, length=context)
    if not isinstance(data, Dataset):
        return data.map(cut)
    num_longer = sum(length > context for length in lengths_of(data, "input_ids"))
    if not num_longer:
        return data
    logger.warning(
        "%d of %d examples are longer than the %d tokens that the target reads, and are cut off there",
        num_longer,
        len(data),
        context,
    )
    return data.map(cut, **described("Cutting", data))


def cut_off(row: dict[str, Any], names: list[str], length: int) -> dict[str, Any]:
    return {name: row[name][:length] for name in names if row[name] is not None}


def _prepare_rows(rows, tokenizer, max_length, packing, template_kwargs, layout, vocab_size, context) -> Any:
    """Rows in memory, without a detour through Arrow, which wants the same keys in all messages."""
    from datasets import Dataset

    first = first_row(rows)
    kind = example_kind(first)
    check_something_encodes(kind, tokenizer, first, template_kwargs or {})
    if kind == "tokens":
        # Before Arrow takes them, which has errors of its own for lists of several kinds.
        for number, row in enumerate(rows):
            check_tokens(check_kind(row, kind), number, vocab_size)
        options = {"max_length": max_length, "packing": packing, "layout": layout, "context": context}
        return prepare_data(Dataset.from_list(rows), vocab_size=vocab_size, **options)
    encode = ExampleEncoder(tokenizer, kind, readable_length(max_length, context), template_kwargs or {})
    bar = logging.tqdm(rows, desc="Tokenizing", disable=len(rows) < EXAMPLES_PER_PACKING)
    examples = Dataset.from_list(
        [encode(check_kind(row, kind), number) for number, row in enumerate(bar)], features=token_features()
    )
    return prepare_data(examples, max_length=max_length, packing=packing, layout=layout, vocab_size=vocab_size)


def token_features() -> Any:
    """The columns of tokenised examples, which the first of them, if they are empty, don't show."""
    from datasets import Features, List, Value

    return Features({name: List(Value("int64")) for name in ("input_ids", "labels")})


def check_something_encodes(
    kind: str, tokenizer: PreTrainedTokenizerBase | None, first: dict[str, Any], template_kwargs: dict[str, Any]
) -> None:
    """Raise a `ValueError` before any work if the tokenizer can't do what the rows, such as the `first`, need."""
    if kind == "tokens":
        return
    if tokenizer is None:
        raise ValueError(
            f"examples of {' and '.join(COLUMNS_OF_KIND[kind])} need the target's tokenizer: pass processing_class="
        )
    check_tokenizer(tokenizer)
    is_chat = kind in ("messages", "conversations") or has_messages(first)
    if is_chat and not has_chat_template(tokenizer, template_kwargs):
        raise ValueError(
            f"conversations need a chat template, and the tokenizer {tokenizer.name_or_path!r} has none: set "
            "tokenizer.chat_template, bring one in chat_template_kwargs, or pass prompt and completion as texts"
        )


def described(what: str, data: Any) -> dict[str, str]:
    """The text of a progress bar, which only data sets of a known length have."""
    from datasets import Dataset

    return {"desc": what} if isinstance(data, Dataset) else {}


def _labelled(row: dict[str, Any]) -> dict[str, Any]:
    return {"labels": torch.as_tensor(labels_of(row)).tolist()}


def with_labels(data: Any, columns: list[str]) -> Any:
    """The data set with `labels`: without any, all tokens are learned."""
    if "labels" in columns:
        return data
    columns.append("labels")
    return data.map(lambda row: {"labels": row["input_ids"]})


def _with_something_to_learn(data: Any, columns: list[str], layout: type[Layout], options: dict[str, Any]) -> Any:
    from datasets import Dataset

    teaches = partial(has_something_to_learn, run=layout.supervised_run, num_before=layout.tokens_before)
    if not isinstance(data, Dataset):
        return data.filter(WarnOnce(teaches))
    names = [name for name in ("input_ids", "labels", *OPTIONAL) if name in columns]
    keep = partial(_has_in_columns, names=names, teaches=teaches)
    kept = data.filter(keep, input_columns=names, **options, **described("Looking for labels", data))
    dropped = len(data) - len(kept)
    if not len(kept):
        raise ValueError(
            f"none of {len(data)} examples has something to learn: expected labels other than {IGNORED} after a first "
            "token, such as an assistant's answer within max_length"
        )
    if dropped:
        logger.warning(
            "dropped %d of %d examples that have nothing to learn (no answer, or none within max_length)",
            dropped,
            len(data),
        )
    return kept


@dataclass
class WarnOnce:
    """A filter that says when it drops its first example: of an iterable data set, nobody knows how many there will be."""

    keep: Any
    has_warned: bool = False

    def __call__(self, example: dict[str, Any]) -> bool:
        kept = self.keep(example)
        if not kept and not self.has_warned:
            self.has_warned = True
            logger.warning("dropping examples that have nothing to learn (no answer, or none within max_length)")
        return kept
