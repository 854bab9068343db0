"""The memory benchmark runs, and chunks need less."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_memory.py"


def test_chunks_need_less_memory_for_the_same_loss(tmp_path):
    sizes = ["--rows", "256", "--hidden", "8", "--vocab", "60000", "--chunks", "16"]
    sizes += ["--objectives", "forward_kl"]
    command = [sys.executable, str(SCRIPT), *sizes, "--out", str(tmp_path / "table.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["rows_per_chunk"] for row in rows] == [16, 256]
    chunked, whole = rows
    assert chunked["peak_mib"] < whole["all_logits_mib"] < whole["peak_mib"]
    assert (chunked["loss"], chunked["gradient_norm"]) == (whole["loss"], whole["gradient_norm"])
