"""A script whose models live until the interpreter's end says nothing there."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
SCRIPT = """
import builtins

import torch
from tiny_models import tiny_drafter, tiny_target
from hf_pardraft.generation.packing import packing_trials
from hf_pardraft.generation.packing.packed_weights import has_copies

packing_trials.NUM_TRIALS = 0
target = tiny_target("llama", hidden_size=256, intermediate_size=512)
drafter = tiny_drafter("pard", target)
ids = torch.arange(2, 8)[None]
target.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=False, pad_token_id=0)
assert has_copies()
# Taken away after all modules.
builtins.models = target, drafter
"""


def test_nothing_is_said_when_models_outlive_the_modules():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == ended.stderr == ""
