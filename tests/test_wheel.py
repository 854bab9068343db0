"""What is installed from a built wheel: the package with its family, recipes and cards, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
