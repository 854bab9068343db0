"""The settings of a training run: a recipe, published or one's own, and what the command line says instead."""

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ..checkpoints.config_checks import check_fresh_fields
from ..pairing.fresh import num_masks_for
from ..user_input.files import parse_json, quoted, read_text
from .adapters import AdapterOptions, check_adapter
from .arguments import EVERY, DraftTrainingArguments

RECIPES = Path(__file__).parent / "recipes"
KINDS = ("pard", "pard2", "dflash", "dflare", "dart")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RunOptions:
    """What is trained for which target, on what, and where it goes."""

    recipe: str | None = option(None, "Published settings to start from (see below), or a YAML file of your own.")
    target: str | None = option(None, "The model to draft for: a folder or a Hub repository. Required.")
    dataset: str | None = option(
        None,
        "What to train on: a .jsonl, .json, .parquet or .csv file, a folder, or a data set's name on the Hub. Required.",
    )
    output: str | None = option(None, "Folder for checkpoints, the drafter and its evaluation. Required.")
    dataset_config: str | None = option(None, "Of a data set on the Hub that has several.")
    dataset_split: str = option("train", "Of the data set.")
    eval_dataset: str | None = option(None, "What to evaluate on; by default a part of the data set, held out.")
    eval_split: str = option("train", "Of the evaluation set.")
    eval_size: int = option(32, "How many examples are held out, and a tenth of all at most; 0: no evaluation.")
    target_dtype: str = option("auto", "Of the target's weights: auto, float32, bfloat16, ...")
    trust_remote_code: bool = option(False, "Run the code that comes with the target. No drafter's code is run.")


@dataclass
class DrafterOptions:
    """Which drafter is made; what is left out is as the drafter's own default has it."""

    drafter: str | None = option(None, "A drafter to go on with, rather than a fresh one.")
    kind: str | None = option(None, f"Of a fresh drafter: {', '.join(KINDS)}.")
    base: str | None = option(None, "pard, pard2: the causal LM to adapt, with the target's tokenizer.")
    num_layers: int | None = option(None, "dflash, dflare: its depth.")
    block_size: int | None = option(None, "dflash, dflare: tokens a block, the anchor counted.")
    draft_length: int | None = option(
        None, "dart: masks behind a prefix, as config.json counts them. Say draft_tokens, the tokens that they draft."
    )
    mask_token_id: list[int] | None = field(
        default=None,
        metadata={
            "help": "pard, pard2, dflash, dflare: an unused token; by default one is found. pard, pard2: several, one for each "
            "of the draft_tokens - 1 masks."
        },
    )
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "dflash, dflare: the target's layers whose output it reads."}
    )
    tapped_hidden_states: list[int] | None = field(
        default=None, metadata={"help": "dart: indices of the target's hidden states that it reads."}
    )
    target_layers: list[int] | None = field(default=None, metadata={"help": "pard2: the same."})
    target_scale: float | None = option(None, "pard2: what the projected states are multiplied with.")
    drafter_config: str | None = option(None, 'dflash, dflare, dart: other fields of its config, as {"fusion": "fc"}.')


# Which of them a fresh drafter of each kind takes.
DRAFTER_OPTIONS = {
    "pard": {"base", "mask_token_id"},
    "pard2": {"base", "mask_token_id", "target_layers", "target_scale"},
    "dflash": {"num_layers", "block_size", "mask_token_id", "target_layer_ids", "drafter_config"},
    "dflare": {"num_layers", "block_size", "mask_token_id", "target_layer_ids", "drafter_config"},
    "dart": {"draft_length", "tapped_hidden_states", "drafter_config"},
}


# All that are no arguments of the Trainer.
OWN_SETTINGS = (RunOptions, DrafterOptions, AdapterOptions)


@dataclass(frozen=True)
class TrainingRun:
    """A run's settings: where from, which drafter, which part of it, and how."""

    options: RunOptions
    drafter: DrafterOptions
    adapter: AdapterOptions
    arguments: dict[str, Any]
    given: dict[str, Any]

    def training_arguments(self) -> DraftTrainingArguments:
        """The settings of the Trainer; raises a `ValueError` for those that can't be, an `ImportError` without their package."""
        try:
            return DraftTrainingArguments(output_dir=self.options.output, **self.arguments)
        except PackageNotFoundError as error:
            # Its own text is made of another's.
            needed = " ".join(str(error.name).split())
            raise ImportError(f"{needed} Install it, or leave out the setting that asks for it") from error
        except (ImportError, OSError, ValueError):
            raise
        # What the Trainer's own settings do with a value that they don't expect.
        except Exception as error:
            raise ValueError(
                f"a setting has a value that it can't have ({type(error).__name__}: {error}): pardraft train --help-all explains "
                "all of them"
            ) from error


class _RecipeLoader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them that name each other stand for more settings than a machine has memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            found = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"a recipe has no aliases, got *{found.anchor}: write the value out", found.start_mark
            )
        return super().compose_node(parent, index)


class _Parser(HfArgumentParser):
    """Knows the type of every setting, and no default."""

    def __init__(self, *dataclasses_: type) -> None:
        super().__init__(dataclasses_, allow_abbrev=False, add_help=False, prog="pardraft train")
        self.names = {f.name for one in dataclasses_ for f in dataclasses.fields(one) if f.init}
        for action in self._actions:
            action.default = argparse.SUPPRESS
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True
            if action.dest == "report_to":
                # HfArgumentParser takes a text or a list for a text.
                action.nargs = "*"

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message}: pardraft train --help explains the settings")


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """The settings of a recipe, by its name, or of a YAML file.

    Raises:
        ValueError: if there is none of this name, or the file is no mapping.
    """
    path = RECIPES / f"{name_or_path}.yaml" if name_or_path in recipe_names() else Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"no recipe {name_or_path!r}{closest(name_or_path, recipe_names())}: expected {', '.join(recipe_names())}, or a "
            "YAML file"
        )
    try:
        settings = yaml.load(read_text(path), _RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML of a recipe: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is no YAML of a recipe: it nests deeper than can be read") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value`, got {type(settings).__name__}")
    return {str(name).replace("-", "_"): value for name, value in settings.items()}


def closest(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as a part of a message; empty if nothing is near."""
    found = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check_names(names: Iterable[str], known: set[str], source: str) -> None:
    """Raise a `ValueError` that names the settings that there are not, and what may have been meant."""
    # The Trainer's own name for what --output says.
    unknown = [name for name in names if name not in known or name == "output_dir"]
    if unknown:
        found = ", ".join(name + closest(name, known - {"output_dir"}) for name in unknown)
        raise ValueError(f"unknown setting in {source}: {found}. pardraft train --help-all lists all of them")


def as_words(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line would have them, so that one parser gives all of them their type."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(json.dumps(v) if isinstance(v, dict | bool) else str(v) for v in values)]
    return words


def may_be_none(annotation: Any) -> bool:
    """Whether "none" means None for a setting of this type, and is no text."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation) and str not in typing.get_args(annotation)


def typed(words: list[str], source: str) -> dict[str, Any]:
    """The settings that are given in `words`, in their types.

    Raises:
        ValueError: for one that there is not, or a value that is not of its type.
    """
    hints = {}
    for one in (*OWN_SETTINGS, DraftTrainingArguments):
        hints |= typing.get_type_hints(one)
    words, special = _without_special_words(_split_at_equals(words), hints)
    parser = _Parser(*OWN_SETTINGS, DraftTrainingArguments)
    check_names((word[2:].replace("-", "_") for word in words if word.startswith("--")), _spellings(parser), source)
    found, rest = parser.parse_known_args(words)
    if rest:
        raise ValueError(f"expected settings as --name value in {source}, got {' '.join(rest)}")
    given = {**vars(found), **special}
    if len(given.get("report_to", [])) == 1:
        given["report_to"] = given["report_to"][0]
    return given


def _spellings(parser: _Parser) -> set[str]:
    negated = {f.name for f in dataclasses.fields(DraftTrainingArguments) if f.default is True}
    return parser.names | {f"no_{name}" for name in negated}


def _split_at_equals(words: list[str]) -> list[str]:
    return [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _without_special_words(words: list[str], hints: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The words that the parser can read, and the settings whose value has no type that it knows: none, all."""
    kept, index = [], 0
    special: dict[str, Any] = {}
    while index < len(words):
        name = words[index][2:].replace("-", "_") if words[index].startswith("--") else ""
        value = words[index + 1].lower() if index + 1 < len(words) else ""
        if value == EVERY and name == "num_anchors":
            special[name] = EVERY
            index += 2
        elif value in ("none", "null") and may_be_none(hints.get(name)):
            special[name] = None
            index += 2
        else:
            kept.append(words[index])
            index += 1
    return kept, special


def training_run(words: list[str]) -> TrainingRun:
    """The settings of a run, from the words of a command line: those of its recipe, where it says nothing itself.

    Raises:
        ValueError: for settings that there are not, values that can't be, and what is missing.
    """
    said = typed(words, "the command line")
    recipe = said.get("recipe")
    settings = typed(as_words(read_recipe(recipe)), f"recipe {recipe}") if recipe else {}
    if "recipe" in settings:
        raise ValueError(f"recipe {recipe} names another recipe, {settings['recipe']}: copy its settings instead")
    if "drafter" in said:
        # A recipe's drafter is a fresh one.
        settings = {name: value for name, value in settings.items() if name not in names_of(DrafterOptions)}
    if "draft_length" in said:
        # The other name of the same number.
        settings.pop("draft_tokens", None)
    given = {**settings, **said}
    options, drafter, adapter = (
        one(**{name: value for name, value in given.items() if name in names_of(one)}) for one in OWN_SETTINGS
    )
    check_run(options, drafter)
    if drafter.kind == "dart" and "draft_tokens" in given:
        drafter.draft_length = masks_of_dart(drafter, given["draft_tokens"])
    check_adapter(adapter, bool(given.get("keep_adapter")))
    known = {name for one in OWN_SETTINGS for name in names_of(one)}
    arguments = {name: value for name, value in given.items() if name not in known}
    return TrainingRun(options, drafter, adapter, arguments, given)


def masks_of_dart(drafter: DrafterOptions, draft_tokens: int) -> int:
    """The `draft_length` of a fresh DART drafter that learns to draft so many tokens; a `ValueError` if it is another already."""
    others = config_fields(drafter.drafter_config)
    given = others.get("draft_length") if drafter.draft_length is None else drafter.draft_length
    return num_masks_for(draft_tokens, others.get("shifted", True), given)


def config_fields(text: str | None) -> dict[str, Any]:
    """Fields of a drafter's configuration, given as JSON; a `ValueError` if they are not."""
    fields = parse_json(text or "{}", f"drafter_config {quoted(text)}")
    if not isinstance(fields, dict):
        raise ValueError(f'drafter_config must be a JSON object such as {{"fusion": "fc"}}, got {quoted(text)}')
    return fields


def names_of(one: type) -> set[str]:
    return {f.name for f in dataclasses.fields(one)}


def check_run(options: RunOptions, drafter: DrafterOptions) -> None:
    """Raise a `ValueError` if something is missing, or contradicts the kind of drafter."""
    missing = [f"--{name}" for name in ("target", "dataset", "output") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"expected {', '.join(missing)}: a run needs a target, a data set and a folder for its output")
    if options.eval_size < 0:
        raise ValueError(f"eval_size must be 0 or more, got {options.eval_size}")
    chosen = {name for name, value in vars(drafter).items() if value is not None} - {"drafter", "kind"}
    check_fresh_fields(vars(drafter) | {"mask_token_id": None})
    if drafter.drafter is not None:
        if chosen or drafter.kind:
            also = ", ".join(sorted(chosen | ({"kind"} if drafter.kind else set())))
            raise ValueError(
                f"{also}: settings of a fresh drafter, got --drafter {drafter.drafter} as well: leave one out"
            )
        return
    if drafter.kind not in KINDS:
        raise ValueError(
            f"expected a kind of drafter ({', '.join(KINDS)}), a recipe ({', '.join(recipe_names())}) or a --drafter to go on "
            f"with, got kind {drafter.kind!r}"
        )
    if wrong := chosen - DRAFTER_OPTIONS[drafter.kind]:
        raise ValueError(
            f"a {drafter.kind} drafter takes {', '.join(sorted(DRAFTER_OPTIONS[drafter.kind]))}, got {', '.join(sorted(wrong))}"
        )
    if len(drafter.mask_token_id or []) > 1 and drafter.kind not in ("pard", "pard2"):
        raise ValueError(f"a {drafter.kind} drafter has one mask token, got mask_token_id {drafter.mask_token_id}")
    if drafter.kind in ("pard", "pard2") and drafter.base is None:
        raise ValueError(
            f"a {drafter.kind} drafter is made of a causal LM: pass it as --base, or a --drafter to go on with"
        )
