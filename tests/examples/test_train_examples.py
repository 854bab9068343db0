"""The examples train a drafter, and it is one that AutoDrafter loads."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from hf_pardraft import AutoDrafter

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("pard", "dflash", "dflare", "dart")


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_makes_a_drafter(kind, tiny_family, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": text}) for text in ("def merge(", "class Queue:\n    def put(")))
    script = EXAMPLES / f"train_{kind}.py"
    models = ["--target", tiny_family / "target", *(["--base", tiny_family / "pard"] if kind == "pard" else [])]
    arguments = [*models, "--prompts", prompts, "--max-steps", 2, "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    runpy.run_path(str(script), run_name="__main__")
    assert "tau on what it learned: " in capsys.readouterr().out
    assert type(AutoDrafter.from_pretrained(tmp_path / "out")).__name__.lower().startswith(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_is_short(kind):
    assert len((EXAMPLES / f"train_{kind}.py").read_text().splitlines()) < 40
