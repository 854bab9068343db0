"""The `pardraft` command: arguments only, no logic."""

import os
import sys
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from ..demo.family import SHIPPED_FAMILY
from ..demo.show import DemoOptions, demo_json, show_demo
from .convert import LAYOUT_NAMES, convert_drafter
from .errors import DEBUG_VARIABLE, finish
from .eval_arguments import ManyValues, evaluate_drafters
from .generate import Completion, complete, describe_environment, read_prompt
from .hub import CardRequest, PushRequest, push_folder, write_card
from .ngram import NgramBuild, build_ngram, convert_ngram, describe_ngram

# Commands that hand their settings on, so that each is described in one place.
ANY_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
ngram = typer.Typer(no_args_is_help=True, help="Continuity models for token trees: how often tokens follow each other.")
app.add_typer(ngram, name="ngram")
app.command(name="eval", cls=ManyValues)(evaluate_drafters)
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code that comes with the target. No drafter's code is run."),
]
TrustTokenizerCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that comes with the tokenizer.")
]
TextFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Read the prompt from this file.")]


@app.callback()
def pardraft(
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the traceback of an error, as {DEBUG_VARIABLE}=1 does.")
    ] = False,
) -> None:
    """Parallel drafters for speculative decoding: the same text, sooner."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    # Loading bars and notes on generation settings would drown the text.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@app.command()
def demo(
    prompt_file: TextFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 96,
    family: Annotated[
        Path, typer.Option(help="Folder with a target and its drafters.", show_default="the one shipped")
    ] = SHIPPED_FAMILY,
    tree_budget: Annotated[
        int, typer.Option(min=0, help="Nodes of the token trees to compare with chains; 0: chains alone.")
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts to decode at once.")] = 1,
    compiled: Annotated[bool, typer.Option("--compiled", help="Compare with compiled rounds, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table only, as JSON.")] = False,
) -> None:
    """Complete Python code with a tiny target and its drafters, and compare them with plain generate."""
    options = DemoOptions(family, prompt_file, max_new_tokens, tree_budget, batch_size, compiled)
    if as_json:
        print(demo_json(options))
    else:
        show_demo(options, Console())


@app.command()
def generate(
    target: Annotated[str, typer.Option(help="The model whose text it is: a folder or a Hub repository.")],
    drafter: Annotated[str | None, typer.Option(help="Its drafter, likewise. Without one: plain generate.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; standard input by default.")] = None,
    prompt_file: TextFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    stats: Annotated[bool, typer.Option("--stats", help="Say on standard error how drafting went.")] = False,
) -> None:
    """Complete a prompt, with a drafter or without."""
    text = read_prompt(prompt, prompt_file)
    summary = complete(Completion(target, drafter, text, max_new_tokens, temperature, dtype, device, trust_remote_code))
    if stats and summary:
        print(summary, file=sys.stderr)


@app.command()
def regenerate(
    output: Annotated[str, typer.Option(help="A .jsonl file; a run that was cut off goes on where it was.")],
    dataset: Annotated[
        str | None, typer.Argument(help="On the Hub, a folder, or a .jsonl, .json, .csv or .parquet file.")
    ] = None,
    self_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead of a data set: write this many dialogues, prompts included. The target goes on after its chat "
            "template's user header. A later run with a larger number adds to them.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The model that writes: a folder or a Hub repository.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Its drafter, to write sooner.")] = None,
    server: Annotated[
        str | None, typer.Option(help="Instead of a target: an OpenAI-compatible server, http://localhost:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the target on the server.")] = None,
    api_key_variable: Annotated[
        str, typer.Option(help="Environment variable with the server's key, if it asks for one.")
    ] = "OPENAI_API_KEY",
    config: Annotated[str | None, typer.Option(help="Of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Of the data set.")] = "train",
    shard: Annotated[
        str | None,
        typer.Option(help="Part of the rows, as number/count (0/4). By default what torchrun or accelerate say."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the law to sample from.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 2048,
    prompt_temperature: Annotated[float, typer.Option(min=0.0, help="Of self-prompts.")] = 1.0,
    prompt_top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of self-prompts.")] = 0.95,
    prompt_max_tokens: Annotated[
        int, typer.Option(min=1, help="A self-prompt that is not at its end by then is not used.")
    ] = 256,
    more_turns: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that a self-prompting user goes on after an answer.")
    ] = 0.25,
    max_turns: Annotated[int, typer.Option(min=1, help="Most self-prompts of a dialogue.")] = 4,
    prompt_system: Annotated[
        list[str] | None,
        typer.Option(
            help="System message that steers what self-prompting users ask about; answers don't see it. May be repeated: "
            'prompts take them in turn. "" stands for none.',
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help='JSON for the chat template, such as {"enable_thinking": false}.')
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that a local target writes at once.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at once.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="How often a request that failed is tried again.")] = 5,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Let the target write what a drafter learns from: new answers to the prompts of a data set, or whole dialogues.

    With --self-prompts no data set is needed: an instruct model invents users' messages, too, and answers them. Messages without
    an end, empty, very short, repetitive or known ones, and such with special or control characters are left out.
    """
    # Data sets and the training room take a second to import, which no other command has to wait for.
    from .regenerate import RegenerateRequest, describe_regeneration, regenerate_dataset

    request = RegenerateRequest(
        dataset=dataset,
        output=output,
        self_prompts=self_prompts,
        target=target,
        drafter=drafter,
        server=server,
        model=model,
        api_key_variable=api_key_variable,
        config=config,
        split=split,
        shard=shard,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        prompt_temperature=prompt_temperature,
        prompt_top_p=prompt_top_p,
        prompt_max_tokens=prompt_max_tokens,
        more_turns=more_turns,
        max_turns=max_turns,
        prompt_system=prompt_system or [],
        seed=seed,
        chat_template_kwargs=chat_template_kwargs,
        batch_size=batch_size,
        concurrency=concurrency,
        retries=retries,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    result = regenerate_dataset(request)
    print_facts(describe_regeneration(result))
    if result.failed:
        raise typer.Exit(1)


@app.command(context_settings=ANY_SETTINGS, add_help_option=False)
def train(
    context: typer.Context,
    show_help: Annotated[bool, typer.Option("--help", help="Explain the settings.")] = False,
    show_all: Annotated[bool, typer.Option("--help-all", help="Explain all settings.")] = False,
) -> None:
    """Train a drafter by a recipe, evaluate it and save it."""
    # Training pulls in accelerate and the Trainer, which other commands have no use for.
    from ..training.recipe_help import help_text
    from .train import train_drafter

    if show_help or show_all or not context.args:
        print(help_text(everything=show_all))
        return
    print_facts(train_drafter(context.args))


@app.command(context_settings=ANY_SETTINGS)
def cache_features(
    context: typer.Context,
    folder: Annotated[str, typer.Option("--output", help="Folder for the states.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    batch_size: Annotated[int, typer.Option(min=1, help="TokenBuffer that the target reads at once.")] = 8,
) -> None:
    """Store the target's hidden states, for `pardraft train --features-folder`; all other settings are those of train."""
    from .train import FeatureOptions, cache_target_features

    print_facts(cache_target_features(context.args, FeatureOptions(folder, dtype, batch_size)))


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="The drafter: a folder or a Hub repository, in any layout that is read.")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder for the converted drafter.")],
    to: Annotated[str, typer.Option(help=f"The layout to write: {', '.join(LAYOUT_NAMES)}.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is there.")] = False,
    revision: Annotated[str | None, typer.Option(help="Of the repository: a branch, tag or commit.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Of the source, with the drafter.")] = None,
    target: Annotated[str | None, typer.Option(help="Its target's name, where its config does not say it.")] = None,
) -> None:
    """Convert a drafter into another layout, bit by bit: for vLLM, SGLang, other packages, or this one."""
    options = {"revision": revision, "subfolder": subfolder, "target": target}
    print_facts(convert_drafter(source, destination, to, overwrite, **options))


@ngram.command("build")
def ngram_build(
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
    column: Annotated[str, typer.Option(help="Of the data set, with the text.")] = "text",
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
    source = (output, tokenizer, text_file or [], separator, dataset, config, split, column, add_end_token)
    request = NgramBuild(*source, trust_remote_code)
    options = {"order": order, "min_count": min_count, "max_memory": max_memory, "num_proc": num_proc}
    print_facts(build_ngram(request, progress=True, vocab_size=vocab_size, overwrite=overwrite, **options))


@ngram.command("convert")
def ngram_convert(
    trie: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Trie file of the DART reference.")],
    output: Annotated[Path, typer.Argument(help="Folder for the model.")],
    tokenizer: Annotated[str, typer.Option(help="That the trie was built with: a folder or a Hub repository.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model in the folder.")] = False,
    trust_remote_code: TrustTokenizerCode = False,
) -> None:
    """Convert an n-gram trie of the DART reference."""
    print_facts(convert_ngram(trie, output, tokenizer, overwrite, trust_remote_code))


@ngram.command("info")
def ngram_info(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository.")],
    tokenizer: Annotated[str | None, typer.Option(help="Check that the model was built with this one.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare all bytes with their checksums.")] = False,
    trust_remote_code: TrustTokenizerCode = False,
) -> None:
    """Say what an n-gram model holds, and check it."""
    print_facts(describe_ngram(model, tokenizer, verify, trust_remote_code))


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of the drafter.")],
    results: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Measured results: the JSON of pardraft eval.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Name of a row of the results that is this drafter's; may be repeated.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Markdown: how and on what it was trained.")
    ] = None,
    usage: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Markdown: how to use it, if not as by default.")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Repository that it is published in.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The target's repository.")] = None,
    license: Annotated[str | None, typer.Option(help="Identifier of its licence, such as apache-2.0.")] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Repository of a data set that it was trained on; may be repeated.")
    ] = None,
    language: Annotated[list[str] | None, typer.Option(help="ISO code; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of README.md in the folder.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from the template, and drop the card that is there.")
    ] = False,
) -> None:
    """Write or renew a drafter's model card, say with measured results, and say what it still lacks."""
    sources = [folder, results, row or [], recipe, usage]
    print_facts(
        write_card(CardRequest(*sources, repo, base_model, license, dataset or [], language or [], output, fresh))
    )


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of the drafter.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, as user/name; made if it does not exist.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded, and upload nothing.")] = False,
    allow_unmeasured: Annotated[
        bool, typer.Option("--allow-unmeasured", help="Even if the card has no measured numbers.")
    ] = False,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who can see a new repository.", show_default="the account's"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if it does not exist.", show_default="main")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Access token.", show_default="the one of hf auth login")] = None,
    commit_message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
) -> None:
    """Publish a drafter's folder on the Hub: it must load, and its card have measured numbers."""
    conditions = [dry_run, allow_unmeasured, private, revision, token, commit_message, create_pr]
    print_facts(push_folder(PushRequest(folder, repo, *conditions)))


@app.command()
def env() -> None:
    """Print versions and devices, for a bug report."""
    print_facts(describe_environment())


def print_facts(facts: dict[str, object]) -> None:
    for name, value in facts.items():
        print(f"{name}: {value}")


def main() -> None:
    """Entry point: an error is one line, without a traceback unless that is asked for."""
    try:
        app()
    # The one place where all of them end; a bug says there that it is one.
    except Exception as error:  # noqa: BLE001
        sys.exit(finish(error))
