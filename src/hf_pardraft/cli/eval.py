"""`pardraft eval`: drafters measured beside plain generate."""

from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from .options import Device, Dtype, Target

SIMULATION = (
    "simulated acceptance and untrained drafters (new:...) are no measurement, and no part of this command any more: run the "
    "project's benchmarks/simulate.py, which takes the same options"
)


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


def read_plan(
    target: Target,
    prompts: Annotated[
        str,
        typer.Option(
            help="humaneval, gsm8k, math500, mbpp, mt_bench, spec_bench, alpaca, aime or livecodebench; a file (JSON Lines, or "
            "text with a prompt per line); benchmark=FILE for a benchmark's rows in a file; or random:LENGTH for random tokens."
        ),
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="A drafter, likewise; name=DRAFTER names its rows."),
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
    limit: Annotated[
        int, typer.Option(min=1, help="Questions at most, taken from all over; each turn of one is a prompt.")
    ] = 80,
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
    dtype: Dtype = "auto",
    device: Device = "auto",
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
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write tables to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw into this folder; needs matplotlib.")] = None,
    simulate_acceptance: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    simulate_runner_up: Annotated[float, typer.Option(min=0, max=1, hidden=True)] = 0.0,
) -> Any:
    """Measure drafters beside plain generate. Options with something to try take several values: --batch-size 1 4 8."""
    # What evaluates is imported by no other command.
    from ..evaluation import plan
    from ..evaluation.encoding import Chat
    from ..evaluation.models import Placement

    if simulate_acceptance or simulate_runner_up or any(map(is_untrained, drafter or [])):
        raise ValueError(SIMULATION)
    common = {"max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p, "repeats": repeats, "seed": seed}
    conditions = plan.read_conditions(batch_size, temperature, generate_argument or [], **common)
    placement = Placement(dtype, device, trust_remote_code)
    outputs = plan.Outputs(json, markdown, plots)
    outputs.check()
    contenders = plan.Contenders(
        plan.read_drafters(drafter or []),
        plan.read_baselines(baselines or []),
        plan.read_settings_to_try(setting or []),
        tree_budget or [],
        depth or [],
        compiled,
    )
    return plan.EvaluationPlan(
        target=target,
        placement=placement,
        contenders=contenders,
        conditions=conditions,
        outputs=outputs,
        chat=Chat(not no_chat_template, plan.read_values(chat_argument or [])),
        tokenizer=tokenizer,
        first_turn_only=first_turn_only,
        random_weights=random_weights,
        prompts=plan.read_prompts(prompts, limit),
    )


def is_untrained(spec: str) -> bool:
    """Whether `--drafter` asks for a drafter that is made for a simulation."""
    return spec.startswith("new:") or spec.partition("=")[2].startswith("new:")


# The options are those of a plan, and what is done with it is the command's: benchmarks/simulate.py does something else.
@wraps(read_plan)
def evaluate(**options: Any) -> None:
    from ..evaluation import workbench

    plan, notes = read_plan(**options), Console(stderr=True)
    workbench.evaluate(workbench.prepare(plan, notes), Console(), notes)
