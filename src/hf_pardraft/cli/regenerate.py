"""`pardraft regenerate`: the target writes what a drafter learns from."""

import os
from functools import partial
from typing import Annotated

import typer

from ..user_input.models import load_models, load_tokenizer
from ..user_input.options import checked_device, checked_dtype
from .options import ChatTemplateKwargs, Device, Dtype, TrustRemoteCode, parse_template_kwargs, print_facts


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
    split: Annotated[str | None, typer.Option(help="Of the data set, by default train.")] = None,
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
    chat_template_kwargs: ChatTemplateKwargs = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that a local target writes at once.")] = 8,
    pack_weights: Annotated[
        bool,
        typer.Option(
            help="On a CPU, multiply by packed copies of the target's weights: faster, for as much memory again."
        ),
    ] = True,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at once.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="How often a request that failed is tried again.")] = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Let the target write what a drafter learns from: new answers to the prompts of a data set, or whole dialogues.

    With --self-prompts no data set is needed: an instruct model invents users' messages, too, and answers them. Messages without
    an end, empty, very short, too long, repetitive or known ones, and such with special or control characters are left out.
    """
    # Data sets and the layers below training take a second to import, which no other command has to wait for.
    from ..datagen.checks import check_prompts, check_writer, device_of_this_process
    from ..datagen.local_writer import LocalWriter
    from ..datagen.prompt_writer import PromptSampling
    from ..datagen.regenerate import Shard, check_output
    from ..datagen.regenerate import regenerate as rewrite
    from ..datagen.rewriting import check_sampling, status_of_missing_rows
    from ..datagen.self_prompts import write_dialogues
    from ..datagen.server_writer import ServerWriter
    from ..datagen.user_turns import UserTurns
    from ..user_input.data import load_data

    check_sampling(temperature, top_p, max_tokens)
    check_prompts(dataset, self_prompts, config, split, server)
    check_writer(target, drafter, server, model, shard)
    checked_dtype(dtype)
    checked_device(device)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    sampling["template_kwargs"] = parse_template_kwargs(chat_template_kwargs)
    part = Shard.of_this_process() if shard is None else Shard.parse(shard)
    # A model takes minutes to load, so all else is looked at before.
    check_output(output)
    if self_prompts is None:
        examples = load_data(dataset, config, split or "train")
        write = partial(rewrite, examples, output, target_name=model if server else target, shard=part)
    else:
        limits = (prompt_temperature, prompt_top_p, prompt_max_tokens, more_turns, max_turns)
        prompts = PromptSampling(*limits, systems=tuple(prompt_system or ()))
        UserTurns(load_tokenizer(target, trust_remote_code), sampling["template_kwargs"])
        write = partial(write_dialogues, self_prompts, output, target_name=target, sampling=prompts, shard=part)
    if server:
        key = os.environ.get(api_key_variable)
        writer = ServerWriter(server, model, api_key=key, concurrency=concurrency, retries=retries, **sampling)
    else:
        place = device_of_this_process(device)
        tokenizer, loaded, assistant = load_models(target, drafter, dtype, place, trust_remote_code)
        writer = LocalWriter(loaded, tokenizer, assistant, batch_size=batch_size, pack_weights=pack_weights, **sampling)
    result = write(writer=writer)
    print_facts(result.facts())
    if result.failed:
        raise typer.Exit(status_of_missing_rows())
