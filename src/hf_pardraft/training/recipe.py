"""The settings of a training run, read: a recipe, published or one's own, and what the command line says instead."""

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ..pairing.fresh import num_masks_for
from ..user_input.files import parse_json, quoted, read_text
from .adapter_checks import check_adapter
from .arguments import EVERY, DraftTrainingArguments
from .checks import check_run
from .run_options import OWN_SETTINGS, AdapterOptions, DrafterOptions, RunOptions

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class TrainingRun:
    """A run's settings: where from, which drafter, which part of it, and how; and the kind that the recipe would begin with."""

    options: RunOptions
    drafter: DrafterOptions
    adapter: AdapterOptions
    arguments: dict[str, Any]
    given: dict[str, Any]
    recipe_kind: str | None = None

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
    recipe_kind = settings.get("kind")
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
    check_run(options, drafter, recipe_names())
    if drafter.kind == "dart" and "draft_tokens" in given:
        drafter.draft_length = masks_of_dart(drafter, given["draft_tokens"])
    check_adapter(adapter, bool(given.get("keep_adapter")), drafter.kind)
    known = {name for one in OWN_SETTINGS for name in names_of(one)}
    arguments = {name: value for name, value in given.items() if name not in known}
    return TrainingRun(options, drafter, adapter, arguments, given, recipe_kind)


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
