"""`pardraft ngram`: continuity models, built from text, converted and described."""

from pathlib import Path
from typing import Annotated

import typer

from ..ngram.model import NgramModel
from ..ngram.sources import texts_of_dataset, texts_of_files
from ..ngram.store import check_no_store
from ..user_input.models import load_tokenizer, naming
from .options import TrustTokenizerCode, print_facts

ngram = typer.Typer(no_args_is_help=True, help="Continuity models for token trees: how often tokens follow each other.")


@ngram.command()
def build(
    output: Annotated[Path, typer.Argument(help="Folder for the model.")],
    tokenizer: Annotated[str, typer.Option(help="Of the target: a folder or a Hub repository.")],
    text_file: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Text to count, UTF-8; may be repeated.")
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(help="What stands between documents of a text file; by default a file is one document."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Data set to count: on the Hub, a folder, or a .jsonl, .csv or .parquet file.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Of the data set.")] = "train",
    column: Annotated[
        str | None,
        typer.Option(
            help="Of the data set, with the text, or with conversations, of which the answers are counted; by default text, "
            "messages or completion."
        ),
    ] = None,
    add_end_token: Annotated[bool, typer.Option("--add-end-token", help="Let each document end in eos_token.")] = False,
    order: Annotated[int, typer.Option(min=2, max=5, help="Length of the longest n-grams.")] = 3,
    min_count: Annotated[int, typer.Option(min=1, help="Drop n-grams of two and more tokens seen less often.")] = 1,
    max_memory: Annotated[str, typer.Option(help="To count with; the rest is sorted on disk.")] = "1GB",
    num_proc: Annotated[int, typer.Option(min=1, help="Processes to count with.")] = 1,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="By default the tokenizer's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model in the folder.")] = False,
    trust_remote_code: TrustTokenizerCode = False,
) -> None:
    """Count the n-grams of text files or a data set."""
    check_no_store(output, overwrite)
    if bool(text_file) == bool(dataset):
        raise ValueError("expected text to count, from either --text-file or --dataset: pass one of them")
    loaded = load_tokenizer(tokenizer, trust_remote_code)
    if dataset:
        texts = texts_of_dataset(dataset, config, split, column)
    else:
        # As typed in a shell, where a line break can't be.
        texts = texts_of_files(text_file, separator and separator.replace("\\n", "\n"))
    model = NgramModel.from_texts(
        texts,
        loaded,
        add_end_token=add_end_token,
        order=order,
        min_count=min_count,
        max_memory=max_memory,
        num_proc=num_proc,
        vocab_size=vocab_size,
        save_directory=output,
        progress=True,
    )
    print_facts(model.describe())


@ngram.command()
def convert(
    trie: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Trie file of the DART reference.")],
    output: Annotated[Path, typer.Argument(help="Folder for the model.")],
    tokenizer: Annotated[str, typer.Option(help="That the trie was built with: a folder or a Hub repository.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model in the folder.")] = False,
    trust_remote_code: TrustTokenizerCode = False,
) -> None:
    """Convert an n-gram trie of the DART reference."""
    check_no_store(output, overwrite)
    loaded = load_tokenizer(tokenizer, trust_remote_code)
    print_facts(NgramModel.from_dart_trie(trie, tokenizer=loaded, save_directory=output).describe())


@ngram.command()
def info(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository.")],
    tokenizer: Annotated[str | None, typer.Option(help="Check that the model was built with this one.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with their checksums.")] = False,
    trust_remote_code: TrustTokenizerCode = False,
) -> None:
    """Say what an n-gram model holds, and check it."""
    with naming(model):
        loaded = NgramModel.from_pretrained(model, verify=True if verify else None)
    if tokenizer is not None:
        loaded.check_tokenizer(load_tokenizer(tokenizer, trust_remote_code))
    print_facts(loaded.describe())
