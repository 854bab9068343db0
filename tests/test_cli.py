"""The `pardraft` command as a user types it."""

import json
import subprocess
import sys

import pytest


def pardraft(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hf_pardraft", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_demo_json_prints_the_table_and_nothing_else(tiny_family):
    done = pardraft("demo", "--family", tiny_family, "--max-new-tokens", 4, "--json")
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)] == ["plain", "PARD", "DFlash"]
    assert done.stderr == ""


def test_generate_writes_the_same_text_with_and_without_a_drafter(tiny_family):
    common = ["generate", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 8]
    plain = pardraft(*common, "def main():")
    drafted = pardraft(*common, "--drafter", tiny_family / "dflash", "--stats", input="def main():")
    assert plain.returncode == drafted.returncode == 0
    assert plain.stdout == drafted.stdout != ""
    assert "a round (tau)" in drafted.stderr


def test_env_names_versions():
    done = pardraft("env")
    assert done.returncode == 0
    assert {"hf-pardraft", "torch", "transformers", "devices"} <= {
        line.split(":")[0] for line in done.stdout.split("\n")
    }


@pytest.mark.parametrize("arguments", [["demo", "--family", "nowhere"], ["generate", "--target", "nowhere", "x"]])
def test_an_error_is_one_line_that_helps(arguments, tmp_path):
    done = pardraft(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
