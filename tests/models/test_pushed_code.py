"""What code a pushed drafter carries, and that drafters pushed with earlier code still load: with it, and with the package's."""

import ast
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from compiled_cases import leave_uncompiled
from hf_pardraft import AutoDrafter
from hf_pardraft.models.base import ParallelDrafter
from tiny_models import tiny_drafter, tiny_target

# Five drafters of tests/tiny_models.py with the code that was saved with them before the modules were divided as they are now,
# their target, and the marginal logits that they drafted then.
EARLIER = Path(__file__).parent.parent / "fixtures" / "pushed_drafters.tar.xz"
SCRIPT = Path(__file__).parent / "without_package.py"
KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
EARLIER_NAMES = ["pard-qwen3", "pard2", "dflash", "dflare", "dart"]
# What somebody reads before saying trust_remote_code=True; generate.py, the custom_generate entry point, is counted.
MOST_FILES, MOST_LINES = 10, 1800


@pytest.fixture(scope="module", params=KINDS)
def pushed_code(request, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_drafter(request.param, tiny_target("qwen3")).save_pretrained(folder)
    return sorted(folder.rglob("*.py"))


def test_a_pushed_drafter_carries_little_code(pushed_code):
    lines = sum(len(path.read_text().splitlines()) for path in pushed_code)
    assert len(pushed_code) <= MOST_FILES
    assert lines <= MOST_LINES


def test_it_imports_torch_transformers_and_its_siblings_alone(pushed_code):
    siblings = {path.stem for path in pushed_code}
    for path in pushed_code:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (node.level, node.module in siblings) == (1, True), path
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                tops = {name.split(".")[0] for name in names}
                assert tops <= {"torch", "transformers", "safetensors"} | sys.stdlib_module_names, path


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("earlier")
    with tarfile.open(EARLIER) as archive:
        archive.extractall(work, filter="data")
    return work


def test_drafters_pushed_with_earlier_code_load_with_it_where_the_package_is_not(earlier):
    environment = {**os.environ, "HF_MODULES_CACHE": str(earlier / "modules")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(earlier)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, drafts = json.loads((earlier / "found.json").read_text()), load_file(earlier / "drafts.safetensors")
    expected = load_file(earlier / "expected.safetensors")
    assert found["importable"] is False
    for name, logits in expected.items():
        assert found[name]["remote"]
        torch.testing.assert_close(drafts[name], logits)
        assert found[name].get("stock", {"same": True})["same"]


def assert_greedy_text(earlier: Path, drafter, **options) -> None:
    """Assert that generate with a drafter writes what the target writes by itself."""
    target = AutoModelForCausalLM.from_pretrained(earlier / "target")
    ids = load_file(earlier / "inputs.safetensors")["ids"]
    greedy = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **greedy)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **greedy, **options), plain)


@pytest.mark.parametrize("name", EARLIER_NAMES)
def test_drafters_pushed_with_earlier_code_load_with_the_packages_and_draft(earlier, name):
    drafter = AutoDrafter.from_pretrained(earlier / name)
    assert_greedy_text(earlier, drafter)
    assert drafter.generation_config.tree_budget == 5
    assert drafter.last_stats.rounds > 0


@pytest.fixture(params=EARLIER_NAMES)
def with_its_own_code(request, earlier, own_modules):
    """A drafter as `AutoModel` loads it before the package is imported: with the code in its folder, which is older."""
    folder = earlier / request.param
    reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModel"]
    drafter = get_class_from_dynamic_module(reference, folder).from_pretrained(folder).eval()
    assert not isinstance(drafter, ParallelDrafter)
    return drafter


STATIC = {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager", mode=None)}


@pytest.mark.parametrize(
    ("settings", "options"),
    [({}, {}), ({}, STATIC), ({"decode_loop": "stock", "tree_budget": 0}, {})],
    ids=["eager", "static", "stock"],
)
def test_drafters_with_earlier_code_of_their_own_are_run_by_the_package(
    earlier, with_its_own_code, settings, options, monkeypatch
):
    drafter = with_its_own_code
    if drafter.config.model_type not in ("dflash", "dart"):
        # Two are enough to see that Dynamo can read such code; it takes seconds.
        leave_uncompiled(monkeypatch)
    for name, value in {"decode_loop": "native", "tree_budget": 5, **settings}.items():
        setattr(drafter.generation_config, name, value)
    assert_greedy_text(earlier, drafter, **options)
    # Noted of the caller's own drafter.
    assert drafter.last_stats.rounds > 0
