"""A drafter with a draft vocabulary and the code in its folder: without the package it works and keeps it, with it both serve."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel

from hf_pardraft import AutoDrafter
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
IDS = [1, 2, 5, 9, 17, 20, 33]
# Decodes with each drafter where a loop of transformers' own can, and saves it again.
WITHOUT_PACKAGE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModel, AutoModelForCausalLM
sys.modules["hf_pardraft"] = None
work, found = Path(sys.argv[1]), {}
target = AutoModelForCausalLM.from_pretrained(work / "target")
ids = torch.arange(3, 9)[None]
options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
for kind in sys.argv[2:]:
    drafter = AutoModel.from_pretrained(work / kind, trust_remote_code=True).eval()
    drafter.save_pretrained(work / "again" / kind)
    if kind == "dart":
        continue
    loop = {"speculation_type": "dflash"} if kind in ("dflash", "dflare") else {}
    texts = [target.generate(ids, **options, **each) for each in ({}, {"assistant_model": drafter, **loop})]
    found[kind] = torch.equal(*texts)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    work = tmp_path_factory.mktemp("pushed")
    target = tiny_target("qwen3")
    target.save_pretrained(work / "target")
    for kind in KINDS:
        drafter = tiny_drafter(kind, target)
        drafter.set_draft_vocabulary(IDS)
        drafter.save_pretrained(work / kind)
    return work


def test_without_the_package_it_is_kept_and_the_text_is_the_targets(folders, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folders), *KINDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(["pard", "pard2", "dflash", "dflare"], True)
    for kind in KINDS:
        assert AutoDrafter.from_pretrained(folders / "again" / kind).draft_token_ids.tolist() == IDS


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("kind", KINDS)
def test_beside_the_package_the_code_in_the_folder_proposes_these_tokens_alone(kind, folders):
    target, prompt = tiny_target("qwen3"), random_prompt(5)
    drafter = AutoModel.from_pretrained(folders / kind, trust_remote_code=True).eval()
    drafter.generation_config.record_drafts = True
    options = {"max_new_tokens": 10, "do_sample": False}
    found = target.generate(prompt, assistant_model=drafter, **options)
    assert torch.equal(found, target.generate(prompt, **options))
    assert {token for each in drafter.last_stats.proposals for token in each.tokens} <= {*IDS}
