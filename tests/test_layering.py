"""Imports point one way, the pure modules are pure, and models/ can travel to the Hub: read off the source's AST."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "hf_pardraft"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE

# What each folder may import of ours: folders, or single modules of them. A folder may always import itself.
ARROWS = {
    "models": set(),
    "likeliest": set(),
    "widest_float": set(),
    "checkpoints": {"models"},
    "pairing": {"checkpoints", "models"},
    "services": {"checkpoints", "hub", "models", "pairing"},
    "auto": {"checkpoints", "models"},
    "by_name": {"auto", "checkpoints", "generation", "models"},
    "user_input": {"auto", "checkpoints", "models"},
    "ngram": {"checkpoints", "pairing", "user_input"},
    "generation": {"checkpoints", "likeliest", "models", "ngram", "pairing", "widest_float"},
    "training": {"checkpoints", "likeliest", "models", "pairing", "user_input", "widest_float"},
    "datagen": {
        "checkpoints",
        "generation.compiled",
        "generation.packing",
        "generation.target_side.probing",
        "generation.target_side.rope",
        "generation.target_side.servable",
        "likeliest",
        "models",
        "training.data",
        "user_input",
    },
    "making": {
        "checkpoints",
        "datagen.rewriting",
        "datagen.user_turns",
        "models",
        "pairing",
        "training.recipe",
        "training.run_folder",
        "user_input",
    },
    "hub": {"checkpoints", "models", "user_input"},
    "evaluation": {
        "checkpoints",
        "generation.settings",
        "models",
        "pairing",
        "user_input",
    },
    "serving": {"models", "user_input"},
    "terminal": {"models", "pairing", "user_input"},
    "demo": {"checkpoints", "evaluation", "hub", "models", "terminal", "user_input"},
}
# The entry points, which may import everything; only they, and one command another, may import cli/.
FREE = {"__init__", "__main__", "cli"}
PURE = {
    "generation.prompt_lookup",
    "generation.scheduling",
    "generation.tree",
    "likeliest",
    "training.data.documents",
    "training.layouts.masks",
    "training.losses.scoring",
    "training.losses.sums",
    "evaluation.utilisation",
    "making.plan",
    "terminal.pace",
    "widest_float",
}
# What tensors or numbers in, and out, may need besides torch: nothing that reads, prints, logs or keeps time.
PURE_STDLIB = {
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "itertools",
    "math",
    "operator",
    "statistics",
    "typing",
}
# transformers does not install without safetensors.
HUB_SAFE_PACKAGES = {"torch", "transformers", "safetensors"}


@dataclass(frozen=True)
class Import:
    """One import statement: `module` is absolute (`hf_pardraft.models.base`); `dots` is 0 unless it was relative."""

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


def places_of(found: Import) -> list[str]:
    """The modules of ours that an import statement names, without the package's own name."""
    if found.top != PACKAGE:
        return []
    below = found.module.removeprefix(PACKAGE).lstrip(".")
    # `from .. import auto` names modules, `from ..auto import AutoDrafter` names what is in one.
    return [below] if below else list(found.names) or [PACKAGE]


def wrong_arrows(module: str, imports: list[Import]) -> list[str]:
    """Imports that point against [`ARROWS`]."""
    folder = module.split(".")[0]
    if folder in FREE:
        return []
    if folder not in ARROWS:
        return [f"{module}: no arrows are known for {folder}: add it to ARROWS and to the documentation"]
    allowed = ARROWS[folder] | {folder}
    return [
        f"{module}:{found.line}: {folder} must not import {place}"
        for found in imports
        for place in places_of(found)
        if not is_within(place, allowed)
    ]


def impurities(module: str, imports: list[Import]) -> list[str]:
    """Imports of a pure module besides torch, other pure modules and harmless parts of the standard library."""
    if not is_within(module, PURE):
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


@pytest.mark.parametrize("folder", ARROWS)
def test_every_arrow_is_needed(folder):
    paths = [*(SOURCE / folder).rglob("*.py"), *SOURCE.glob(f"{folder}.py")]
    reached = [
        place
        for path in paths
        for found in imports_of(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
        for place in places_of(found)
    ]
    assert [place for place in sorted(ARROWS[folder]) if not any(is_within(each, {place}) for each in reached)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.modeling_x", "from ..generation.tree.token_tree import TokenTree"),
        ("models.modeling_x", "from . import drafting"),
        ("models.modeling_x", "from .. import auto"),
        ("models.modeling_x", "from hf_pardraft.models.inputs import DraftState"),
        ("models.modeling_x", "import hf_pardraft"),
        ("models.modeling_x", "from .sub.layers import Layer"),
        ("models.sub.layers", "import torch"),
        ("models.modeling_x", "import numpy as np"),
        ("models.modeling_x", "def f():\n    from rich.console import Console"),
        ("generation.decoder", "from ..auto import AutoDrafter"),
        ("generation.decoder", "from hf_pardraft.training.losses.sums import decay"),
        ("generation.decoder", "from .. import training"),
        ("training.trainer", "from ..generation.decoder import decode"),
        ("evaluation.measurement", "def f():\n    from ..generation import decoder"),
        ("auto", "from .hub.push import push"),
        ("auto", "from . import generation"),
        ("generation.tree.token_tree", "import logging"),
        ("generation.tree.token_tree", "from ..cache import TreeCache"),
        ("generation.tree.verify", "from transformers import PreTrainedModel"),
        ("training.losses.sums", "from ...models.drafting import DraftState"),
        ("training.layouts.masks", "import time"),
        ("elsewhere.thing", "import torch"),
        ("models.modeling_x", "from ..user_input.files import read_text"),
        ("user_input.files", "from ..cli.app import main"),
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
        (
            "generation.decoder",
            "from ..models.drafting import DraftState\nfrom .tree.token_tree import TokenTree\nimport logging",
        ),
        ("generation.tree.token_tree", "from dataclasses import dataclass\nimport torch.nn.functional as F"),
        ("generation.tree.verify", "from .token_tree import TokenTree"),
        ("evaluation.measurement", "import time\nfrom ..models.drafting import ParallelDrafter"),
        ("auto", "from .checkpoints.published import drafter_class_for\nfrom .models.modeling_pard import PardDrafter"),
        ("cli.app", "from ..training.trainer import DraftTrainer\nfrom ..demo import show"),
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
    assert imports_of("from .hooks import install", "generation.decoder")[0].module == f"{PACKAGE}.generation.hooks"
    assert imports_of("from .auto import AutoDrafter", "__init__")[0].module == f"{PACKAGE}.auto"
