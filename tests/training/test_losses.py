"""Losses equal float64 loops written from the papers, values and gradients."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft.training.losses import block_cross_entropy, gamma_after_epochs, linear_gamma, position_weights

FIXTURES = Path(__file__).parent.parent / "fixtures" / "loss_block"
GAMMA_FIXTURES = FIXTURES.parent / "loss_gamma"
SETTINGS = json.loads((FIXTURES / "expected.json").read_text())["settings"]
REDUCTIONS = {"weight_sum": "ce.weight_sum", "paper": "ce.literal_mean_active"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["id"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_block_cross_entropy_equals_the_fixture(setting, reduction):
    inputs, gradients = load_file(FIXTURES / "inputs.safetensors"), load_file(FIXTURES / "grads.safetensors")
    logits = inputs["logits"].clone().requires_grad_()
    # Slot 0 of the fixture is the anchor, which no loss sees.
    loss = block_cross_entropy(
        logits[:, 1:],
        inputs["labels"][:, 1:],
        inputs[f"valid.{setting['mask']}"][:, 1:],
        setting["gamma"],
        reduction,
    )
    assert loss.item() == pytest.approx(setting["values"][REDUCTIONS[reduction]], abs=1e-9)
    loss.backward()
    expected = gradients.get(f"{setting['id']}.{REDUCTIONS[reduction]}", torch.zeros_like(logits))
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-9)


def test_weights_decay_from_one():
    assert position_weights(3, None).tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(position_weights(3, 2.0), torch.exp(-torch.tensor([0.0, 0.5, 1.0]).double()))


def test_gamma_grows_with_the_steps_as_the_paper_says():
    published = json.loads((GAMMA_FIXTURES / "expected.json").read_text())
    for row in published["rows"]:
        gamma = linear_gamma(row["s"], row["S"], row["gamma0"], row["gamma_max"])
        assert gamma == pytest.approx(row["gamma"], abs=1e-9)
        weights = position_weights(published["K"] - 1, gamma)
        torch.testing.assert_close(weights, torch.tensor(row["w"], dtype=torch.float64), rtol=0, atol=1e-9)


def test_gamma_grows_with_the_epochs_as_the_published_trainer_lets_it():
    for row in json.loads((GAMMA_FIXTURES / "epoch_schedule.json").read_text()):
        assert gamma_after_epochs(row["epoch"], row["gamma_init"], row["step"]) == pytest.approx(row["gamma"], abs=1e-9)


@pytest.mark.parametrize("gamma", [0.0, -1.0])
def test_a_gamma_that_is_not_positive_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be positive"):
        position_weights(3, gamma)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction must be one of"):
        block_cross_entropy(
            torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=int), torch.ones(1, 1, dtype=bool), None, "mean"
        )
