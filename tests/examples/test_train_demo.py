"""The script that makes the demo family runs, every stage of it, at toy size."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter

DRAFTERS = ("pard", "dflash", "dflare", "dart")
SCRIPT = Path(__file__).parents[2] / "examples" / "train_demo.py"


def test_the_quick_family_is_complete_and_a_second_run_skips_what_is_done(tmp_path):
    folder = tmp_path / "family"
    command = [sys.executable, str(SCRIPT), "--output", str(folder), "--quick"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompt = tokenizer("def main():\n", return_tensors="pt")
    expected = target.generate(**prompt, do_sample=False, max_new_tokens=8)
    for kind in DRAFTERS:
        drafter = AutoDrafter.from_pretrained(folder / kind, dtype=torch.float32)
        out = target.generate(**prompt, do_sample=False, max_new_tokens=8, assistant_model=drafter)
        assert torch.equal(out, expected)
    report = json.loads((folder / "family.json").read_text())
    assert all(report[stage]["seconds"] > 0 for stage in ("tokenizer", "library", "target", "text", *DRAFTERS))
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert again.stdout.count("done before") == 4 + len(DRAFTERS)
