"""What drafters of true shapes would bring if they were right as often as they are said to be.

    python benchmarks/simulate.py --target Qwen/Qwen3-8B --random-weights --prompts random:128 \\
        --drafter new:dflash,num_layers=5 --simulate-acceptance tau=4.5

Takes the options of `pardraft eval`, tells the same and writes the same files, marked as simulated. Besides:

--simulate-acceptance   How often drafters are right: the share of drafts accepted after those before them, or the share of rounds
                        that accept the first, second, ... draft, or a file with these, or tau=NUMBER.
--simulate-runner-up    Share of simulated wrong drafts whose second choice is right.
--drafter               Also new:dflash, new:dflare, new:dart or new:pard,like=SMALL_LM, which are untrained, with fields after
                        commas (new:dflash,num_layers=5).
"""

from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from acceptance_profile import AcceptanceProfile, read_profile
from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.checkpoints.config_checks import check_fresh_fields
from hf_pardraft.cli.app import main as end_as_command
from hf_pardraft.cli.app import quieten
from hf_pardraft.cli.eval import ManyValues, read_plan
from hf_pardraft.evaluation.entries import Entry, drafter_entries
from hf_pardraft.evaluation.models import load_fitting_drafter, load_target
from hf_pardraft.evaluation.plan import EvaluationPlan, read_values
from hf_pardraft.evaluation.report import Report
from hf_pardraft.evaluation.workbench import Workbench, check_settings, encoding_for, ending_tokens, evaluate, lay_out
from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.user_input.models import load_config
from result_files import public_command
from simulation import Simulation, depth_of, write_script

NEW = "new:"
NEW_KINDS = {"dflash": DFlashDrafter, "dflare": DFlareDrafter, "dart": DartDrafter}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class NewDrafter:
    """An untrained drafter.

    Attributes:
        kind: "pard", "dflash", "dflare" or "dart".
        like: of a PARD drafter, folder or Hub repository of the model whose shape it has.
        fields: for `for_target`.
    """

    kind: str
    like: str | None
    fields: dict[str, Any]


def read_new_drafter(spec: str) -> NewDrafter:
    """Understand `KIND,field=value,...`."""
    kind, *fields = spec.split(",")
    values = read_values(fields)
    known = (*NEW_KINDS, "pard")
    if kind not in known:
        raise ValueError(
            f"no new drafter of the kind {kind!r}: expected one of {', '.join(known)}, as in new:dflash,num_layers=5"
        )
    check_fresh_fields(values)
    # As it is written: a name may look like a number.
    values.pop("like", None)
    like = next((field.removeprefix("like=") for field in fields if field.startswith("like=")), None)
    if (kind == "pard") != (like is not None):
        raise ValueError(
            "a new PARD drafter needs the shape of a small language model, as in new:pard,like=Qwen/Qwen3-0.6B"
        )
    return NewDrafter(kind, like, values)


def split_new(specs: list[str]) -> tuple[list[str], dict[str, NewDrafter]]:
    """`--drafter` as `pardraft eval` takes it, where a name and a word stand for each new drafter; and these, by name."""
    words, found = [], {}
    for spec in specs:
        name, is_new, rest = spec.partition(NEW)
        if not is_new or (name and not name.endswith("=")):
            words.append(spec)
            continue
        made = read_new_drafter(rest)
        name = name.removesuffix("=") or f"new {made.kind}"
        words.append(f"{name}=untrained {made.kind}")
        found[name] = made
    return words, found


def make_drafter(
    new: NewDrafter, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> ParallelDrafter:
    """An untrained drafter that fits the target, in its dtype."""
    if new.kind == "pard":
        config = load_config(new.like)
        config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        drafter = PardDrafter.from_causal_lm(base, tokenizer=tokenizer, **new.fields)
    else:
        # DART has no mask token, and so no use for a tokenizer.
        fields = new.fields if new.kind == "dart" else {"tokenizer": tokenizer, **new.fields}
        drafter = NEW_KINDS[new.kind].for_target(target, **fields)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def check_depths(drafters: dict[str, ParallelDrafter], plan: EvaluationPlan, profile: AcceptanceProfile) -> None:
    """Raise a `ValueError` if the profile says too little for what is drafted."""
    check_settings(drafters, plan)
    for entry in drafter_entries(drafters, plan.contenders.choices):
        try:
            profile.rates(depth_of(entry))
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from error


def prepare(
    plan: EvaluationPlan, new: dict[str, NewDrafter], profile: AcceptanceProfile, runner_up: float, notes: Console
) -> Workbench:
    """What [`hf_pardraft.evaluation.workbench.prepare`] does, for drafters that may be untrained and are told what to say."""
    encoding = encoding_for(plan)
    sources = plan.contenders.drafters
    trained = {
        name: load_fitting_drafter(source, plan.placement, encoding.vocab_size)
        for name, source in sources.items()
        if name not in new
    }
    check_depths(trained, plan, profile)
    target = load_target(plan.target, plan.placement, plan.random_weights)
    drafters = {
        name: make_drafter(new[name], target, encoding.tokenizer) if name in new else trained[name] for name in sources
    }
    check_depths(drafters, plan, profile)
    for drafter in drafters.values():
        drafter.generation_config.draft_schedule = "fixed"
    # A simulated target has nothing of its own to answer.
    bench = lay_out(replace(plan, first_turn_only=True), encoding, target, drafters, {}, notes)
    simulation = simulation_for(bench, profile, runner_up)
    told = {"simulated": True, "simulation": {"acceptance": str(profile), "runner_up": runner_up}}
    told["command"] = public_command()
    return replace(bench, report=Report({**bench.report.facts, **told}), around=simulation.during)


def simulation_for(bench: Workbench, profile: AcceptanceProfile, runner_up: float) -> Simulation:
    """A simulation whose script is as long as the longest text and a draft."""
    deepest = max((depth_of(entry) for entry in bench.entries if entry.is_parallel), default=0)
    longest = max(prompt.shape[1] for prompt in bench.prompts)
    length = longest + bench.plan.max_new_tokens + max([deepest, *map(block_size, bench.entries)]) + 2
    vocab_size = bench.target.config.get_text_config(decoder=True).vocab_size
    script = write_script(vocab_size, length, ending_tokens(bench.target), bench.plan.conditions[0].seed)
    return Simulation(bench.target, script, profile, runner_up)


def block_size(entry: Entry) -> int:
    """Of transformers' own DFlash loop, which always drafts a whole block."""
    return entry.assistant.config.block_size if "speculation_type" in entry.setting else 0


@app.command(cls=ManyValues, help=__doc__)
@wraps(read_plan)
def simulate(simulate_acceptance: list[str] | None, simulate_runner_up: float, **options: Any) -> None:
    if not simulate_acceptance:
        raise ValueError("say how often drafters are right: pass --simulate-acceptance")
    quieten()
    profile = read_profile(simulate_acceptance)
    baselines = options["baselines"] or []
    if "prompt_lookup" in baselines or any(spec.startswith("assisted") for spec in baselines):
        raise ValueError(
            "a simulation tells drafters what to say, and can't tell that to assisted or prompt_lookup: leave them out"
        )
    words, new = split_new(options.pop("drafter") or [])
    plan = read_plan(drafter=words, **options)
    notes = Console(stderr=True)
    evaluate(prepare(plan, new, profile, simulate_runner_up, notes), Console(), notes)


def main() -> None:
    end_as_command(app)


if __name__ == "__main__":
    main()
