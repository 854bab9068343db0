"""The memory benchmark runs, and chunks need less."""

import json

import loss_memory
from in_process import run_main


def test_chunks_need_less_memory_for_the_same_loss(tmp_path):
    sizes = ["--rows", "256", "--hidden", "8", "--vocab", "60000", "--chunks", "16"]
    sizes += ["--objectives", "forward_kl"]
    assert run_main(loss_memory.main, *sizes, "--out", tmp_path / "table.json").code == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["rows_per_chunk"] for row in rows] == [16, 256]
    chunked, whole = rows
    assert chunked["peak_mib"] < whole["all_logits_mib"] < whole["peak_mib"]
    assert (chunked["loss"], chunked["gradient_norm"]) == (whole["loss"], whole["gradient_norm"])
