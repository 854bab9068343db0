"""What the commands `pardraft ngram build`, `convert` and `info` do; cli/app.py only reads their arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ngram.model import NgramModel
from ..ngram.sources import texts_of_dataset, texts_of_files
from ..ngram.store import check_no_store
from ..user_input.models import load_tokenizer, naming


@dataclass
class NgramBuild:
    """What `pardraft ngram build` is asked to count: text files or a data set."""

    output: Path
    tokenizer: str
    text_files: list[Path]
    separator: str | None
    dataset: str | None
    config: str | None
    split: str
    column: str
    add_end_token: bool
    trust_remote_code: bool = False


def build_ngram(request: NgramBuild, vocab_size: int | None, overwrite: bool = False, **options: Any) -> dict[str, Any]:
    """Build a model and describe it; `options` are those of [`NgramModel.from_token_stream`].

    Raises:
        FileExistsError: if there is a model already, unless it may be replaced (`overwrite`).
        ValueError: unless there are either text files or a data set, with something in them.
    """
    check_no_store(request.output, overwrite)
    if bool(request.text_files) == bool(request.dataset):
        raise ValueError("expected text to count, from either --text-file or --dataset: pass one of them")
    tokenizer = load_tokenizer(request.tokenizer, request.trust_remote_code)
    if request.dataset:
        texts = texts_of_dataset(request.dataset, request.config, request.split, request.column)
    else:
        # As typed in a shell, where a line break can't be.
        separator = request.separator and request.separator.replace("\\n", "\n")
        texts = texts_of_files(request.text_files, separator)
    model = NgramModel.from_texts(
        texts,
        tokenizer,
        add_end_token=request.add_end_token,
        vocab_size=vocab_size,
        save_directory=request.output,
        **options,
    )
    return model.describe()


def convert_ngram(
    trie: Path, output: Path, tokenizer: str, overwrite: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Convert a trie file of the DART reference and describe the model; see [`build_ngram`]."""
    check_no_store(output, overwrite)
    loaded = load_tokenizer(tokenizer, trust_remote_code)
    return NgramModel.from_dart_trie(trie, tokenizer=loaded, save_directory=output).describe()


def describe_ngram(model: str, tokenizer: str | None, verify: bool, trust_remote_code: bool = False) -> dict[str, Any]:
    """Load a model, check it, and describe it."""
    with naming(model):
        loaded = NgramModel.from_pretrained(model, verify=True if verify else None)
    if tokenizer is not None:
        loaded.check_tokenizer(load_tokenizer(tokenizer, trust_remote_code))
    return loaded.describe()
