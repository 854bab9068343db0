"""What `pardraft eval` is asked to do, understood and checked before a model is loaded."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..generation.settings import DraftSettings
from ..user_input.files import check_file_to_write
from ..user_input.models import check_generation_settings
from ..user_input.options import check_temperature, checked_device, checked_dtype
from .acceptance_profile import AcceptanceProfile, read_profile
from .models import DrafterSource, Placement, read_drafters, read_value, read_values
from .plots import check_matplotlib
from .prompt_sources import load_questions, read_source
from .prompts import Question

RANDOM_PROMPTS = "random"
RANDOM_LENGTH = 128
BASELINES = "assisted=SMALL_LM, prompt_lookup or stock_dflash"
# What is measured with, or has an option of its own.
NOT_SETTINGS = {"depth", "time_rounds", "record_drafts", "tuned_drafting"}


@dataclass
class EvalRequest:
    """What `pardraft eval` is asked to do; the options of the same names explain each.

    `None` for a file or folder leaves that output out.
    """

    target: str
    prompts: str
    drafters: list[str] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    tree_budgets: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    limit: int | None = 80
    repeats: int = 2
    seed: int = 0
    chat_template: bool = True
    chat_arguments: list[str] = field(default_factory=list)
    first_turn_only: bool = False
    tokenizer: str | None = None
    placement: Placement = field(default_factory=Placement)
    random_weights: bool = False
    simulate_acceptance: list[str] = field(default_factory=list)
    simulate_runner_up: float = 0.0
    json: Path | None = None
    markdown: Path | None = None
    plots: Path | None = None
    generate_arguments: list[str] = field(default_factory=list)
    compiled: bool = False
    tune: bool = False
    output: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A request that was understood: everything that can be known before a model is loaded."""

    questions: list[Question] | None
    random_length: int
    prompts_name: str
    drafters: dict[str, DrafterSource]
    choices: dict[str, list[Any]]
    small_models: list[str]
    chat_arguments: dict[str, Any]
    profile: AcceptanceProfile | None
    generate_arguments: dict[str, Any]


def make_plan(request: EvalRequest) -> Plan:
    """Understand a request, and read its prompts.

    Raises:
        ImportError, OSError, ValueError: if it can't be met.
    """
    check_numbers(request)
    check_outputs(request)
    profile = read_profile(request.simulate_acceptance) if request.simulate_acceptance else None
    drafters = read_drafters(request.drafters)
    small_models = read_baselines(request.baselines)
    if not drafters and not request.baselines:
        raise ValueError("nothing to compare with plain generate: pass --drafter or --baselines")
    unfit = [name for name, source in drafters.items() if source.kind is not None] if profile is None else []
    if unfit:
        raise ValueError(f"{', '.join(unfit)}: an untrained drafter says nothing of use: add --simulate-acceptance")
    if profile is None and request.simulate_runner_up:
        raise ValueError("second choices are part of a simulation: pass --simulate-acceptance, too")
    if profile is not None and (small_models or "prompt_lookup" in request.baselines):
        raise ValueError(
            "a simulation tells drafters what to say, and can't tell that to assisted or prompt_lookup: leave them out"
        )
    choices = read_choices(request)
    name, _, length = request.prompts.partition(":")
    chat_arguments = read_values(request.chat_arguments)
    generate_arguments = read_generate_arguments(request.generate_arguments)
    if name == RANDOM_PROMPTS and not Path(request.prompts).exists():
        if length and not (length.isdigit() and int(length)):
            raise ValueError(f"expected random:LENGTH, got {request.prompts!r}")
        length = int(length or RANDOM_LENGTH)
        prompts_name = f"random tokens, {length} a prompt"
        return Plan(
            None, length, prompts_name, drafters, choices, small_models, chat_arguments, profile, generate_arguments
        )
    source = read_source(request.prompts)
    questions = load_questions(source, request.limit)
    return Plan(questions, 0, source.name, drafters, choices, small_models, chat_arguments, profile, generate_arguments)


def read_generate_arguments(pairs: list[str]) -> dict[str, Any]:
    """Understand `--generate-argument`.

    Raises:
        ValueError: for an argument that a generation config does not have, or that has an option of its own.
    """
    values = read_values(pairs)
    own = {"do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "max_length", "num_assistant_tokens"}
    # What generate returns is what is measured.
    own |= {"return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"}
    wrong = sorted(name for name in values if name in own or name not in vars(GenerationConfig()))
    if wrong:
        raise ValueError(
            f"no generate argument {', '.join(wrong)}: expected one of a GenerationConfig's that has no option of its own here, "
            "as in cache_implementation=static"
        )
    check_generation_settings(values, "--generate-argument")
    try:
        GenerationConfig(**values)
    # Values that it has no type for fail in it anyhow.
    except Exception as error:
        raise ValueError(
            f"--generate-argument is nothing that generate takes ({type(error).__name__}: {error})"
        ) from error
    return values


def check_numbers(request: EvalRequest) -> None:
    """Raise a `ValueError` for numbers that make no sense."""
    for name, values, least in (
        ("batch sizes", request.batch_sizes, 1),
        ("temperatures", request.temperatures, 0),
        ("max_new_tokens", [request.max_new_tokens], 1),
        ("repeats", [request.repeats], 1),
    ):
        if not values or not all(least <= value < float("inf") for value in values):
            raise ValueError(f"{name} must be {least} or more, got {', '.join(map(str, values)) or 'none'}")
    if not 0 < request.top_p <= 1 or not 0 <= request.simulate_runner_up <= 1:
        raise ValueError(f"top_p and second choices are shares, got {request.top_p} and {request.simulate_runner_up}")
    for temperature in request.temperatures:
        check_temperature(temperature)
    checked_dtype(request.placement.dtype)
    checked_device(request.placement.device)
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"expected a limit of 1 prompt or more, got {request.limit}")


def check_outputs(request: EvalRequest) -> None:
    """Find out before hours of work whether the results can be written."""
    if request.plots:
        check_matplotlib()
    for path in (request.json, request.markdown):
        check_file_to_write(path)
    if request.plots is not None and request.plots.exists() and not request.plots.is_dir():
        raise ValueError(f"expected a folder for the plots, and {request.plots} is a file")
    for path in (request.json, request.markdown, request.plots, request.output):
        if path is None:
            continue
        folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"can't write {path}: no permission for {folder}")


def read_baselines(specs: list[str]) -> list[str]:
    """The small language models among the baselines.

    Raises:
        ValueError: if there is another baseline than these.
    """
    small_models = []
    for spec in specs:
        name, _, value = spec.partition("=")
        if name == "assisted" and value:
            small_models.append(value)
        elif spec not in ("prompt_lookup", "stock_dflash"):
            raise ValueError(f"no baseline {spec!r}: expected {BASELINES}")
    return small_models


def read_choices(request: EvalRequest) -> dict[str, list[Any]]:
    """The values to try of each setting.

    Raises:
        ValueError: if there is no such setting.
    """
    known = sorted(DraftSettings.__dataclass_fields__.keys() - NOT_SETTINGS)
    choices: dict[str, list[Any]] = {}
    for pair in request.settings:
        name, has_values, values = pair.partition("=")
        if not has_values or name not in known:
            raise ValueError(
                f"no setting {pair!r}: expected name=value or name=value,value with one of {', '.join(known)}"
            )
        choices[name] = [read_value(value) for value in values.split(",")]
    for name, values in (("tree_budget", request.tree_budgets), ("num_assistant_tokens", request.depths)):
        if values and name in choices:
            raise ValueError(f"{name} was given twice: as a setting and by its own option")
        if values:
            choices[name] = list(values)
    return choices
