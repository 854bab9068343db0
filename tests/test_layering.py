"""Imports point one way, the pure modules are pure, and models/ can travel to the Hub: read off the source's AST."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "hf_pardraft"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE

# What each room may import of ours: rooms, or single modules of them. A room may always import itself.
ARROWS = {
    "models": set(),
    "outputs": set(),
    "generation": {"models", "outputs"},
    "training": {"models", "outputs"},
    "evaluation": {"generation.settings", "models"},
    "hub": {"models", "outputs"},
    "auto": {"models", "hub.recognise", "outputs"},
    "command_end": set(),
    "loading": {"auto", "command_end", "models"},
    "commands": {"loading"},
    "convert_commands": {"hub", "loading"},
    "ngram_commands": {"loading", "generation", "outputs"},
    "hub_commands": {"demo", "hub", "loading", "models", "outputs"},
    "regenerate_commands": {"loading", "training"},
    "train_commands": {"loading", "models", "training", "outputs"},
    "eval_arguments": {"eval_commands", "eval_models", "eval_plan", "tune_commands"},
    "eval_facts": {"commands", "eval_models", "eval_plan", "generation", "models"},
    "eval_commands": {
        "eval_facts",
        "eval_models",
        "eval_plan",
        "evaluation",
        "generation",
        "loading",
        "models",
        "outputs",
    },
    "tune_commands": {"eval_commands", "eval_plan", "evaluation", "generation", "hub.staging", "models", "outputs"},
    "eval_models": {"loading", "models"},
    "eval_plan": {"eval_models", "evaluation", "generation", "loading"},
    "demo": {"evaluation", "hub", "loading", "models"},
}
# What users bring: files, data sets, options and secrets. These import nothing, and every room but models/ may import them.
GROUND = {"redaction", "user_data", "user_files", "user_options"}
# The entry points, which may import everything.
FREE = {"__init__", "__main__", "cli"}
PURE = {
    "evaluation.cost_model",
    "generation.continuity",
    "generation.prefix_search",
    "generation.tree",
    "generation.verify",
    "training.loss_inputs",
    "training.losses",
    "training.masks",
    "training.sums",
    "training.weights",
}
# What tensors in, tensors out may need besides torch: nothing that reads, prints, logs or keeps time.
PURE_STDLIB = {"collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"}
# transformers does not install without safetensors.
HUB_SAFE_PACKAGES = {"torch", "transformers", "safetensors"}


@dataclass(frozen=True)
class Import:
    """One import statement: `module` is absolute (`hf_pardraft.models.drafting`); `dots` is 0 unless it was relative."""

    module: str
    names: tuple[str, ...]
    dots: int
    line: int

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """All imports in `source`, those inside functions too; `module` is its dotted name below the package."""
    parents = [PACKAGE, *module.split(".")]
    if not is_package:
        parents = parents[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), 0, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            absolute = ".".join([*base, *filter(None, [node.module])])
            found.append(Import(absolute, tuple(alias.name for alias in node.names), node.level, node.lineno))
    return found


def is_within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def wrong_arrows(module: str, imports: list[Import]) -> list[str]:
    """Imports that point against [`ARROWS`]."""
    room = module.split(".")[0]
    if room in FREE:
        return []
    if room not in ARROWS.keys() | GROUND:
        return [f"{module}: no arrows are known for {room}: add it to design.md and to ARROWS"]
    wrong, allowed = [], ARROWS.get(room, set()) | (set() if room in GROUND | {"models"} else GROUND) | {room}
    for found in (i for i in imports if i.top == PACKAGE):
        below = found.module.removeprefix(PACKAGE).lstrip(".")
        # `from .. import auto` names modules, `from ..auto import AutoDrafter` names what is in one.
        reached = [below] if below else list(found.names) or [PACKAGE]
        wrong += [
            f"{module}:{found.line}: {room} must not import {place}"
            for place in reached
            if not is_within(place, allowed)
        ]
    return wrong


def impurities(module: str, imports: list[Import]) -> list[str]:
    """Imports of a pure module besides torch, other pure modules and harmless parts of the standard library."""
    if module not in PURE:
        return []
    allowed = {"torch", *PURE_STDLIB} | {f"{PACKAGE}.{name}" for name in PURE}
    return [f"{module}:{i.line}: pure, must not import {i.module}" for i in imports if not is_within(i.module, allowed)]


def hub_unsafe(module: str, imports: list[Import]) -> list[str]:
    """Imports of models/ that would not survive `save_pretrained` and a load where this package is not installed."""
    if not module.startswith("models"):
        return []
    wrong = [f"{module}: models/ must be flat"] if module.count(".") > 1 else []
    for found in imports:
        is_sibling = found.dots == 1 and found.module.startswith(f"{PACKAGE}.models.") and found.module.count(".") == 2
        is_installed = found.dots == 0 and (found.top in HUB_SAFE_PACKAGES or found.top in sys.stdlib_module_names)
        if not (is_sibling or is_installed):
            wrong.append(
                f"{module}:{found.line}: only torch, transformers and `from .sibling import name` are Hub-safe"
            )
    return wrong


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    imports = imports_of(source, module, is_package)
    return wrong_arrows(module, imports) + impurities(module, imports) + hub_unsafe(module, imports)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_import_follows_the_design(path):
    is_package = path.name == "__init__.py" and path.parent != SOURCE
    assert violations(path.read_text(encoding="utf-8"), module_name(path), is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.modeling_x", "from ..generation.tree import TokenTree"),
        ("models.modeling_x", "from . import drafting"),
        ("models.modeling_x", "from .. import auto"),
        ("models.modeling_x", "from hf_pardraft.models.drafting import DraftState"),
        ("models.modeling_x", "import hf_pardraft"),
        ("models.modeling_x", "from .sub.layers import Layer"),
        ("models.sub.layers", "import torch"),
        ("models.modeling_x", "import numpy as np"),
        ("models.modeling_x", "def f():\n    from rich.console import Console"),
        ("generation.decode", "from ..auto import AutoDrafter"),
        ("generation.decode", "from hf_pardraft.training.losses.terms import decay"),
        ("generation.decode", "from .. import training"),
        ("training.trainer", "from ..generation.decode import decode"),
        ("evaluation.benchmark", "def f():\n    from ..generation import tree"),
        ("auto", "from .hub.push import push"),
        ("auto", "from . import generation"),
        ("generation.tree", "import logging"),
        ("generation.tree", "from .cache import TreeCache"),
        ("generation.verify", "from transformers import PreTrainedModel"),
        ("training.losses", "from ..models.drafting import DraftState"),
        ("training.masks", "import time"),
        ("elsewhere.thing", "import torch"),
        ("models.modeling_x", "from ..user_files import read_text"),
        ("user_files", "from .auto import AutoDrafter"),
    ],
)
def test_the_checker_finds_a_bad_import(module, source):
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "models.modeling_x",
            "import math\nimport torch\nfrom transformers import Cache\nfrom .drafting import DraftState",
        ),
        ("generation.decode", "from ..models.drafting import DraftState\nfrom .tree import TokenTree\nimport logging"),
        ("generation.tree", "from dataclasses import dataclass\nimport torch.nn.functional as F"),
        ("generation.verify", "from .tree import TokenTree"),
        ("evaluation.benchmark", "import time\nfrom ..models.drafting import ParallelDrafter"),
        ("auto", "from .hub.recognise import drafter_class_for\nfrom .models.modeling_pard import PardDrafter"),
        ("cli", "from .training.trainer import DraftTrainer\nfrom .demo import show"),
        ("__init__", "from .generation.hooks import install"),
    ],
)
def test_the_checker_lets_a_good_import_pass(module, source):
    assert violations(source, module) == []


def test_imports_of_a_package_are_resolved_from_inside_it():
    assert (
        imports_of("from .hooks import install", "generation", is_package=True)[0].module
        == f"{PACKAGE}.generation.hooks"
    )
    assert imports_of("from .hooks import install", "generation.decode")[0].module == f"{PACKAGE}.generation.hooks"
    assert imports_of("from .auto import AutoDrafter", "__init__")[0].module == f"{PACKAGE}.auto"
