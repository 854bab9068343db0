"""The benchmark of training steps: two checkouts in turns, and rows that take the place of older ones."""

import json

import pytest
import torch

import training_step
from hf_pardraft.training.layouts.attention import IN_RUNS
from in_process import run_main
from tiny_models import tiny_target


@pytest.mark.parametrize("kind", training_step.KINDS)
def test_a_step_scores_and_learns(kind, monkeypatch):
    monkeypatch.setattr(
        training_step, "smollm2_shape", lambda num_layers=4: tiny_target("llama", num_hidden_layers=num_layers)
    )
    case = {"drafter": kind, "dtype": "bfloat16", "length": 24, "anchors": 5, "objective": None}
    step, drafter = training_step.step_of(case)
    first = step()
    assert first["loss"] == step()["loss"]
    assert first["positions"] > 0
    assert any(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())
    assert drafter.config._attn_implementation != IN_RUNS


class FakeWorker:
    """Takes steps of two seconds before, and of one now, whose gradients are a little different."""

    def __init__(self, source, case):
        self.is_before, self.file = source.name == "before", case["gradients"]

    def ask(self, line):
        if not line:
            torch.save(torch.tensor([3.0, 4.0]) if self.is_before else torch.tensor([3.0, 4.0 + 5e-4]), self.file)
            return {"peak_mib": 200 if self.is_before else 150}
        seconds = 1.0 if self.is_before else 0.5
        return {"forward": seconds, "backward": seconds, "loss": 10.0, "positions": 7}


def test_ratios_are_now_over_before_and_a_case_has_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(training_step, "Worker", FakeWorker)
    file = tmp_path / "steps.json"
    for turns in ("2", "3"):
        words = ["--before", str(tmp_path / "before"), "--drafters", "DART", "--turns", turns, "--output", str(file)]
        assert run_main(training_step.main, *words).code == 0
    found = json.loads(file.read_text())
    assert str(tmp_path) not in found["command"]
    assert [row["dtype"] for row in found["rows"]] == ["float32", "bfloat16"]
    for row in found["rows"]:
        assert (row["time_ratio"], row["memory_ratio"]) == (0.5, 0.75)
        assert row["gradient_difference"] == pytest.approx(1e-4, rel=1e-2)
        assert row["positions"] == 7
