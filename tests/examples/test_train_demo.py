"""The script that makes the demo family runs, every stage of it, at toy size."""

import json
import runpy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter

DRAFTERS = ("pard", "dflash", "dflare", "dart")
SCRIPT = Path(__file__).parents[2] / "examples" / "train_demo.py"


def test_the_quick_family_is_complete_and_a_second_run_skips_what_is_done(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "family"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(folder), "--quick"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "done before" not in capsys.readouterr().out
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompt = tokenizer("def main():\n", return_tensors="pt")
    expected = target.generate(**prompt, do_sample=False, max_new_tokens=8)
    for kind in DRAFTERS:
        drafter = AutoDrafter.from_pretrained(folder / kind, dtype=torch.float32)
        out = target.generate(**prompt, do_sample=False, max_new_tokens=8, assistant_model=drafter)
        assert torch.equal(out, expected)
    report = json.loads((folder / "family.json").read_text())
    assert all(report[stage]["seconds"] >= 0 for stage in ("tokenizer", "library", "target", "text", *DRAFTERS))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.count("done before") == 4 + len(DRAFTERS)
