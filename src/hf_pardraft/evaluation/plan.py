"""What `pardraft eval` is asked to do, understood and checked before a model is loaded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMode

from ..checkpoints.atomic_files import check_folder_to_write
from ..generation.settings import SETTING_NAMES
from ..pairing.remembered import own_name
from ..user_input.files import check_file_to_write, quoted
from ..user_input.models import check_generation_settings
from ..user_input.options import check_temperature
from .calls import Condition
from .encoding import Chat
from .entries import PLAIN
from .models import DrafterSource, Placement
from .plots import check_matplotlib
from .prompt_sources import load_questions, read_source
from .prompts import Question

RANDOM_PROMPTS = "random"
RANDOM_LENGTH = 128
BASELINES = "assisted=SMALL_LM, prompt_lookup or stock_dflash"
# Settings that are measured with, and not measured.
MEASURED_WITH = {"time_rounds", "record_drafts"}


@dataclass(frozen=True)
class Contenders:
    """What is compared with plain `generate`.

    Attributes:
        drafters: where each is from, by name.
        baselines: transformers' own ways, as they are typed.
        settings, tree_budgets, depths: the values to try of generation settings, by name, and of these two.
        compiled: whether to measure compiled rounds besides eager ones.

    Raises:
        ValueError: if there is nothing to compare, or a setting is given twice.
    """

    drafters: dict[str, DrafterSource]
    baselines: list[str] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    tree_budgets: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    compiled: bool = False

    def __post_init__(self) -> None:
        if not self.drafters and not self.baselines:
            raise ValueError("nothing to compare with plain generate: pass --drafter or --baselines")
        for name, values in self._own_options().items():
            if values and name in self.settings:
                raise ValueError(f"{name} was given twice: as a setting and by its own option")

    def _own_options(self) -> dict[str, list[int]]:
        return {"tree_budget": self.tree_budgets, "num_assistant_tokens": self.depths}

    @property
    def choices(self) -> dict[str, list[Any]]:
        """The values to try of each setting, by its name in a generation config."""
        return {**self.settings, **{name: values for name, values in self._own_options().items() if values}}

    @property
    def small_models(self) -> list[str]:
        """The small language models among the baselines."""
        return [spec.partition("=")[2] for spec in self.baselines if spec.startswith("assisted=")]


@dataclass(frozen=True)
class Prompts:
    """What texts begin with.

    Attributes:
        name: what the results call them.
        limit: how many at most.
        questions: to be asked; `None` for random tokens.
        random_length: of a prompt of random tokens.
    """

    name: str
    limit: int
    questions: list[Question] | None = None
    random_length: int = 0


@dataclass(frozen=True)
class Outputs:
    """What is written where; `None` leaves it out.

    Attributes:
        json, markdown: files for all that was found, and for tables.
        plots: a folder.
    """

    json: Path | None = None
    markdown: Path | None = None
    plots: Path | None = None

    def check(self) -> None:
        """Find out before hours of work whether the results can be written.

        Raises:
            ImportError, OSError, ValueError: if they can't.
        """
        if self.plots:
            check_matplotlib()
        for path in (self.json, self.markdown):
            check_file_to_write(path)
        if self.json is not None and self.markdown is not None and self.json.resolve() == self.markdown.resolve():
            raise ValueError(f"expected two files for --json and --markdown, got {self.json} for both: name another")
        if self.plots is not None:
            check_folder_to_write(self.plots)


@dataclass(frozen=True)
class EvaluationPlan:
    """A request that was understood.

    Attributes:
        target: a folder or Hub repository.
        placement: of all models.
        contenders: what is compared.
        prompts: what is continued.
        conditions: under which all of that is measured, one after the other. They differ in batch size and temperature.
        outputs: what is written.
        chat: whether and how to use the chat template, where there is one.
        tokenizer: by default the target's.
        first_turn_only: whether to leave later turns out.
        random_weights: whether to read the target's configuration only.
    """

    target: str
    placement: Placement
    contenders: Contenders
    prompts: Prompts
    conditions: list[Condition]
    outputs: Outputs
    chat: Chat
    tokenizer: str | None = None
    first_turn_only: bool = False
    random_weights: bool = False

    @property
    def max_new_tokens(self) -> int:
        return self.conditions[0].max_new_tokens


def read_drafters(specs: list[str]) -> dict[str, DrafterSource]:
    """Understand `--drafter`: a folder or repository, and `name=` before it.

    Raises:
        ValueError: for a name that comes twice, or is that of plain `generate`.
    """
    sources = {}
    for spec in specs:
        source = read_drafter(spec)
        if source.name == PLAIN:
            raise ValueError(
                f"{PLAIN} is what plain generate is called: name the drafter, as in --drafter other={spec}"
            )
        if source.name in sources:
            raise ValueError(f"two drafters are called {source.name!r}: name one of them, as in --drafter other={spec}")
        sources[source.name] = source
    return sources


def read_drafter(spec: str) -> DrafterSource:
    name, has_name, source = spec.partition("=")
    if not has_name or Path(spec).exists():
        name, source = own_name(spec), spec
    return DrafterSource(name, source)


def read_baselines(specs: list[str]) -> list[str]:
    """Understand `--baselines`.

    Raises:
        ValueError: if there is another baseline than these.
    """
    for spec in specs:
        name, _, value = spec.partition("=")
        if not (name == "assisted" and value) and spec not in ("prompt_lookup", "stock_dflash"):
            raise ValueError(f"no baseline {spec!r}: expected {BASELINES}")
    return specs


def read_settings_to_try(pairs: list[str]) -> dict[str, list[Any]]:
    """Understand `--setting`.

    Raises:
        ValueError: if there is no such setting.
    """
    known = sorted(SETTING_NAMES - MEASURED_WITH)
    choices: dict[str, list[Any]] = {}
    for pair in pairs:
        name, has_values, values = pair.partition("=")
        if not has_values or name not in known:
            raise ValueError(
                f"no setting {pair!r}: expected name=value or name=value,value with one of {', '.join(known)}"
            )
        choices.setdefault(name, []).extend(map(read_value, values.split(",")))
    return choices


def read_prompts(spec: str, limit: int) -> Prompts:
    """Understand `--prompts`, and read them.

    Raises:
        ImportError, OSError, ValueError: if they can't be had.
    """
    name, _, length = spec.partition(":")
    if name == RANDOM_PROMPTS and not Path(spec).exists():
        if length and not (length.isdigit() and int(length)):
            raise ValueError(f"expected random:LENGTH, got {spec!r}")
        length = int(length or RANDOM_LENGTH)
        return Prompts(f"random tokens, {length} a prompt", limit, random_length=length)
    source = read_source(spec)
    return Prompts(source.name, limit, load_questions(source, limit))


def read_conditions(
    batch_sizes: list[int], temperatures: list[float], generate_arguments: list[str], **common: Any
) -> list[Condition]:
    """Every temperature with every batch size.

    Args:
        batch_sizes, temperatures: to try.
        generate_arguments: as they are typed.
        common: what all conditions have in common, see [`Condition`].

    Raises:
        ValueError: for numbers that make no sense, and for arguments that `generate` does not take.
    """
    for name, values, least in (("batch sizes", batch_sizes, 1), ("temperatures", temperatures, 0)):
        if not values or not all(least <= value < float("inf") for value in values):
            raise ValueError(f"{name} must be {least} or more, got {', '.join(map(str, values)) or 'none'}")
    if not 0 < common["top_p"] <= 1:
        raise ValueError(f"expected top_p as a share, above 0 and up to 1, got {common['top_p']}")
    for temperature in temperatures:
        check_temperature(temperature)
    arguments = read_generate_arguments(generate_arguments)
    return [
        Condition(batch_size, temperature, generate_arguments=arguments, **common)
        for temperature in dict.fromkeys(temperatures)
        for batch_size in dict.fromkeys(batch_sizes)
    ]


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
        mode = GenerationConfig(**values).get_generation_mode()
    # Values that it has no type for fail in it anyhow.
    except Exception as error:
        raise ValueError(
            f"--generate-argument is nothing that generate takes ({type(error).__name__}: {error})"
        ) from error
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"--generate-argument asks for {mode.value}: expected greedy decoding or sampling, as drafters have it"
        )
    return values


def read_values(pairs: list[str]) -> dict[str, Any]:
    """`name=value` texts as a dict; values are JSON where they can be, and texts otherwise.

    Raises:
        ValueError: if one is no pair.
    """
    values = {}
    for pair in pairs:
        name, has_value, text = pair.partition("=")
        if not has_value or not name:
            raise ValueError(f"expected name=value, got {pair!r}")
        values[name] = read_value(text)
    return values


def read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"expected a value, got JSON nested without end: {quoted(text)}") from error
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
