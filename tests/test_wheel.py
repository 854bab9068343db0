"""A built wheel holds the package with its family, recipes and cards, and nothing else, and asks for no less than it needs."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

pytest.importorskip("setuptools", minversion="77.0.3")
ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
LOAD = """
import hf_pardraft
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.training.recipe import recipe_names
print(hf_pardraft.__file__, *sorted(load_family(SHIPPED_FAMILY).drafters), *recipe_names())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_it_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    packaged = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name and ".egg-info/" not in name}
    assert {name for name in names if ".dist-info/" not in name} == packaged
    assert sum(each.compress_size for each in wheel.infolist()) < 12.5e6


def test_it_runs_where_it_is_installed(wheel, tmp_path):
    wheel.extractall(tmp_path)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{LOAD}"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()
    assert Path(shown[0]).is_relative_to(tmp_path)
    assert shown[1:] == ["DART", "DFlare", "DFlash", "PARD", "dart", "dflare", "left_to_right", "pard"]


def lowest(specifiers: SpecifierSet) -> str:
    """The version from which on something is taken."""
    return next(each.version for each in specifiers if each.operator == ">=")


def test_no_lower_bound_is_below_that_of_the_oldest_transformers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {canonicalize_name(each.name): each for each in map(Requirement, project["dependencies"])}
    theirs = metadata("transformers")
    if Version(theirs["Version"]) != Version(lowest(ours["transformers"].specifier)):
        pytest.skip("what a newer transformers asks for says nothing of the oldest")
    assert lowest(SpecifierSet(project["requires-python"])) in SpecifierSet(theirs["Requires-Python"])
    for asked in map(Requirement, theirs.get_all("Requires-Dist")):
        name = canonicalize_name(asked.name)
        used = asked.marker is None or any(
            asked.marker.evaluate({"extra": extra}) for extra in ("chat-template", "torch")
        )
        if name in ours and used:
            assert lowest(ours[name].specifier) in asked.specifier, name


def test_no_transformers_is_asked_for_that_has_another_name_for_past_key_values():
    """Since 5.24 it is `cache`, and a call with a drafter would find none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    ours = [each.specifier for each in map(Requirement, asked) if each.name == "transformers"]
    assert [("5.23.0" in each, "5.24.0" in each) for each in ours] == [(True, False)] * 2
