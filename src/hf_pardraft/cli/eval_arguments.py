"""The arguments of `pardraft eval`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperCommand


class ManyValues(TyperCommand):
    """A command without positional arguments, whose repeatable options take several values at once."""

    def parse_args(self, ctx, args):
        """Repeat the option before each further value."""
        repeatable = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        expanded, option = [], None
        for arg in args:
            is_value = not arg.startswith("-") or arg[1:2].isdigit()
            if is_value and option is not None and expanded[-1] != option:
                expanded.append(option)
            elif not is_value:
                name = arg.partition("=")[0]
                option = name if name in repeatable else None
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


def evaluate_drafters(
    target: Annotated[str, typer.Option(help="The model whose text it is: a folder or a Hub repository.")],
    prompts: Annotated[
        str,
        typer.Option(
            help="humaneval, gsm8k, math500, mbpp, mt_bench, spec_bench, alpaca, aime or livecodebench; a file (JSON Lines, or "
            "text with a prompt per line); benchmark=FILE for a benchmark's rows in a file; or random:LENGTH for random tokens."
        ),
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter, likewise; name=DRAFTER names its rows. For simulations also new:dflash, new:dflare, new:dart or "
            "new:pard,like=SMALL_LM, with fields behind commas (new:dflash,num_layers=5)."
        ),
    ] = None,
    baselines: Annotated[
        list[str] | None, typer.Option(help="transformers' own: assisted=SMALL_LM, prompt_lookup, stock_dflash.")
    ] = None,
    tree_budget: Annotated[list[int] | None, typer.Option(help="Nodes of token trees to try; 0 is a chain.")] = None,
    depth: Annotated[list[int] | None, typer.Option(help="Tokens to draft a round, to try.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Other generation settings to try: name=value or name=value,value.")
    ] = None,
    batch_size: Annotated[list[int], typer.Option(help="Prompts to decode at once, to try.")] = [1],  # noqa: B006
    temperature: Annotated[list[float], typer.Option(help="To try; 0 is greedy.")] = [0.0],  # noqa: B006
    top_k: Annotated[int, typer.Option(min=0, help="With a temperature; 0: all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="With a temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 256,
    limit: Annotated[int, typer.Option(min=1, help="Prompts at most, taken from all over.")] = 80,
    repeats: Annotated[int, typer.Option(min=1, help="How often each prompt is timed; the fastest counts.")] = 2,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Leave the tokenizer's chat template out.")
    ] = False,
    chat_argument: Annotated[
        list[str] | None, typer.Option(help="For the chat template, as in enable_thinking=false.")
    ] = None,
    first_turn_only: Annotated[
        bool, typer.Option("--first-turn-only", help="Leave later turns of MT-bench and Spec-Bench out.")
    ] = False,
    tokenizer: Annotated[str | None, typer.Option(help="By default the target's.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the code that comes with the target, or with a small model of --baselines. No drafter's code is run.",
        ),
    ] = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Read the target's configuration only, and draw its weights.")
    ] = False,
    simulate_acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help="Let drafters be right that often: the share of drafts accepted after those before them, or the share of rounds "
            "that accept the first, second, ... draft, or a file with these, or tau=NUMBER. True shapes and costs, invented "
            "quality."
        ),
    ] = None,
    simulate_runner_up: Annotated[
        float, typer.Option(min=0, max=1, help="Share of simulated wrong drafts whose second choice is right.")
    ] = 0.0,
    generate_argument: Annotated[
        list[str] | None,
        typer.Option(help="For every generate call, plain ones too: name=value, as in cache_implementation=static."),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Measure plain generate and drafters with compiled rounds, too (cache_implementation=static).",
        ),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Find the depth and tree budget (of --depth and --tree-budget, or by default of all) that are best at each "
            "--batch-size, and write them into the drafter's generation config, where generate looks them up.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --tune: save the tuned drafter as this folder, and leave the one that was loaded alone."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write tables to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw into this folder; needs matplotlib.")] = None,
) -> None:
    """Measure drafters beside plain generate. Options with something to try take several values: --batch-size 1 4 8."""
    # Only this command has a use for them.
    from ..evaluation.models import Placement
    from ..evaluation.plan import EvalRequest
    from .eval import evaluate
    from .tune import tune_drafter

    request = EvalRequest(
        target,
        prompts,
        drafters=drafter or [],
        baselines=baselines or [],
        tree_budgets=tree_budget or [],
        depths=depth or [],
        settings=setting or [],
        batch_sizes=batch_size,
        temperatures=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        limit=limit,
        repeats=repeats,
        seed=seed,
        chat_template=not no_chat_template,
        chat_arguments=chat_argument or [],
        first_turn_only=first_turn_only,
        tokenizer=tokenizer,
        placement=Placement(dtype, device, trust_remote_code),
        random_weights=random_weights,
        simulate_acceptance=simulate_acceptance or [],
        simulate_runner_up=simulate_runner_up,
        json=json,
        markdown=markdown,
        plots=plots,
        generate_arguments=generate_argument or [],
        compiled=compiled,
        tune=tune,
        output=output,
    )
    (tune_drafter if request.tune else evaluate)(request, Console(), Console(stderr=True))
