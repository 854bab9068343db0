"""The drafters in drafters/ are what a Hub repository of each would hold, and fit into a clone."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from hf_pardraft import AutoDrafter
from hf_pardraft.checkpoints.saving import write_code

ROOT = Path(__file__).parent.parent
FOLDERS = sorted((ROOT / "drafters").glob("SmolLM2-135M-Instruct-*"))
LAYERS = {"pard": 2, "dflash": 2, "dflare": 2, "dart": 1}


def test_all_kinds_are_there_and_small():
    assert [folder.name.rpartition("-")[2] for folder in FOLDERS] == ["DART", "DFlare", "DFlash", "PARD"]
    size = sum(path.stat().st_size for folder in FOLDERS for path in folder.rglob("*") if path.is_file())
    assert size <= 120 * 2**20


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_is_loaded_as_it_was_measured(folder, tmp_path):
    drafter = AutoDrafter.from_pretrained(folder)
    kind = folder.name.rpartition("-")[2]
    assert drafter.config.drafter_kind == kind.lower()
    assert drafter.dtype == torch.bfloat16
    assert drafter.config.num_hidden_layers == LAYERS[kind.lower()]
    assert len(drafter.draft_token_ids) == 8192
    assert drafter.config.target_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # Figures of other weights would be somebody else's.
    result = json.loads((ROOT / "benchmarks" / "results" / "smollm2.json").read_text())
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights.startswith(result["drafters"][kind]["weights"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert "Not recorded" not in card
    assert "| plain |" in card
    assert json.loads((folder / "config.json").read_text())["auto_map"]
    # The code that travels with it is the package's, file by file.
    write_code(drafter, tmp_path)
    own, expected = (
        {path.relative_to(top): path.read_text(encoding="utf-8") for path in top.rglob("*.py")}
        for top in (folder, tmp_path)
    )
    assert own == expected
