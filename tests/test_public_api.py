"""The names that other people type: what the package exports, with its arguments, and every command with its options."""

import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

import hf_pardraft
from hf_pardraft.cli.app import app
from hf_pardraft.models.base import ParallelDrafter

# Renew it on purpose only (python tests/test_public_api.py): a name or an option that goes breaks somebody's script.
RECORDED = Path(__file__).parent / "fixtures" / "public_api.json"


def arguments_of(function) -> list[str]:
    """Names of the arguments, `=` after those that may be left out."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return [f"{stars.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '='}" for p in parameters]


def call_of(cls: type) -> list[str]:
    """What the class takes when it is called, without what it has from transformers."""
    theirs = next((base for base in cls.__mro__ if base.__module__.startswith("transformers.")), object)
    known = {*arguments_of(theirs)} if theirs is not object else set()
    return [name for name in arguments_of(cls) if name not in known]


def described(member) -> list[str] | str:
    function = getattr(member, "__func__", member)
    if isinstance(function, property):
        return "property"
    return arguments_of(function) if function.__module__.startswith("hf_pardraft") else "as in transformers"


LOADED = ["from_pretrained", "save_pretrained", "push_to_hub"]
SHARED = [
    "generate",
    "forward",
    "draft_depth",
    "tapped_hidden_states",
    "check_target",
    "note_target",
    "set_draft_vocabulary",
]
DRAFTER = [*LOADED, *SHARED]
# What the documentation calls besides the names themselves. What else a class has is the package's own matter.
MEMBERS = {
    "AutoDrafter": ["from_pretrained"],
    "DFlareConfig": ["from_pretrained", "save_pretrained"],
    "DFlareDrafter": [*DRAFTER, "for_target"],
    "DFlashConfig": ["from_pretrained", "save_pretrained"],
    "DFlashDrafter": [*DRAFTER, "for_target"],
    "DartConfig": ["from_pretrained", "save_pretrained"],
    "DartDrafter": [*DRAFTER, "for_target"],
    "DecodeStats": ["tau", "per_position_acceptance"],
    "DraftTrainer": ["train", "compute_loss", "save_model", "evaluate", "log"],
    "DraftTrainingArguments": [],
    "NgramModel": [
        *LOADED,
        "from_token_stream",
        "from_texts",
        "from_dart_trie",
        "to",
        "order",
        "vocab_size",
        "describe",
    ],
    "ParallelCandidateGenerator": ["get_candidates", "update_candidate_strategy"],
    "PardConfig": ["from_pretrained", "save_pretrained", "mask_token_ids"],
    "PardDrafter": [*DRAFTER, "from_causal_lm"],
}


def python_names() -> dict:
    classes = {name: getattr(hf_pardraft, name) for name in hf_pardraft.__all__}
    return {
        name: {"": call_of(cls)} | {member: described(inspect.getattr_static(cls, member)) for member in MEMBERS[name]}
        for name, cls in classes.items()
    }


def commands_of(command, path=()) -> dict:
    """Every command below `command`, with its options and arguments."""
    below = getattr(command, "commands", None)
    if below is not None:
        return {
            name: options for key in sorted(below) for name, options in commands_of(below[key], (*path, key)).items()
        }
    return {" ".join(path): sorted(opt for parameter in command.params for opt in parameter.opts)}


def public_api() -> dict:
    return {"python": python_names(), "commands": commands_of(typer.main.get_command(app))}


def test_all_names_and_arguments_are_still_there():
    assert python_names() == json.loads(RECORDED.read_text())["python"]


@pytest.mark.parametrize("name", ["generation_config", "last_stats", "ngram"])
def test_a_type_checker_allows_what_the_documents_do_with_a_drafter(name):
    # Without a type, `last_stats = None` is taken for what is never anything else.
    assert get_type_hints(ParallelDrafter)[name] is Any


def test_all_commands_and_options_are_still_there():
    recorded = json.loads(RECORDED.read_text())["commands"]
    now = public_api()["commands"]
    assert {name: sorted({*options} - {*now.get(name, [])}) for name, options in recorded.items()} == {
        name: [] for name in recorded
    }


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(public_api(), indent=1) + "\n")
