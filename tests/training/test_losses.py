"""Losses equal float64 loops written from the papers, values and gradients."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft.training.losses.scoring import kl_divergences
from hf_pardraft.training.losses.sums import (
    annealing_weights,
    confidence_weights,
    gamma_after_epochs,
    linear_gamma,
    position_weights,
)
from training.objective_values import objective_value

FIXTURES = Path(__file__).parent.parent / "fixtures" / "loss_block"
GAMMA_FIXTURES = FIXTURES.parent / "loss_gamma"
KL_FIXTURES = FIXTURES.parent / "loss_kl"
KL_SETTINGS = json.loads((KL_FIXTURES / "expected.json").read_text())["settings"]
KL_REDUCTIONS = {"weight_sum": "kl.weight_sum", "paper": "kl.literal_mean_active"}
PARD2 = FIXTURES.parent / "pard2"
PARD2_LOSSES = json.loads((PARD2 / "train_losses.json").read_text())
SETTINGS = json.loads((FIXTURES / "expected.json").read_text())["settings"]
REDUCTIONS = {"weight_sum": "ce.weight_sum", "paper": "ce.literal_mean_active"}


def annealed_kl(logits, target_logits, valid, gamma, reduction="weight_sum"):
    labels = torch.zeros_like(valid).long()
    return objective_value("annealed_kl", logits, labels, valid, target_logits, kl_gamma=gamma, reduction=reduction)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["id"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_block_cross_entropy_equals_the_fixture(setting, reduction):
    inputs, gradients = load_file(FIXTURES / "inputs.safetensors"), load_file(FIXTURES / "grads.safetensors")
    logits = inputs["logits"].clone().requires_grad_()
    # Slot 0 of the fixture is the anchor, which no loss sees.
    labels, valid = inputs["labels"][:, 1:], inputs[f"valid.{setting['mask']}"][:, 1:]
    loss = objective_value("cross_entropy", logits[:, 1:], labels, valid, gamma=setting["gamma"], reduction=reduction)
    assert loss.item() == pytest.approx(setting["values"][REDUCTIONS[reduction]], abs=1e-9)
    loss.backward()
    expected = gradients.get(f"{setting['id']}.{REDUCTIONS[reduction]}", torch.zeros_like(logits))
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("setting", KL_SETTINGS, ids=lambda setting: f"{setting['mask']}-{setting['gamma']}")
@pytest.mark.parametrize("reduction", KL_REDUCTIONS)
def test_annealed_kl_equals_the_fixture(setting, reduction):
    inputs, gradients = load_file(KL_FIXTURES / "inputs.safetensors"), load_file(KL_FIXTURES / "grads.safetensors")
    logits = inputs["logits"].clone().requires_grad_()
    target_logits = inputs["teacher_logits"].clone().requires_grad_()
    valid = inputs[f"valid.{setting['mask']}"]
    loss = annealed_kl(logits, target_logits, valid, setting["gamma"], reduction)
    assert loss.item() == pytest.approx(setting["values"][KL_REDUCTIONS[reduction]], abs=1e-9)
    loss.backward()
    expected = gradients[f"{setting['mask']}.g{setting['gamma']}.{KL_REDUCTIONS[reduction]}"]
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-9)
    assert target_logits.grad is None


def test_annealed_kl_is_each_positions_divergence_and_nothing_where_nothing_is_valid():
    inputs = load_file(KL_FIXTURES / "inputs.safetensors")
    divergences = load_file(KL_FIXTURES / "expected.safetensors")["kl"]
    for block in range(divergences.shape[0]):
        for position in range(divergences.shape[1]):
            valid = torch.zeros_like(inputs["valid.full"])
            valid[block, position] = True
            found = annealed_kl(inputs["logits"], inputs["teacher_logits"], valid, 0.6)
            assert found.item() == pytest.approx(divergences[block, position].item(), abs=1e-9)
    logits = inputs["logits"].clone().requires_grad_()
    for reduction in KL_REDUCTIONS:
        loss = annealed_kl(logits, inputs["teacher_logits"], torch.zeros_like(valid), 0.6, reduction)
        loss.backward()
        assert loss.item() == 0
        assert not logits.grad.any()


@pytest.mark.parametrize("gamma", [0.0, -0.5, 1.5])
def test_an_annealing_coefficient_out_of_range_is_refused(gamma):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        annealing_weights(3, gamma)


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


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan")])
def test_a_gamma_that_is_not_positive_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be positive"):
        position_weights(3, gamma)


def test_an_unknown_reduction_is_refused():
    for name in ("cross_entropy", "annealed_kl", "chain_reward", "streak"):
        logits, labels = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=int)
        with pytest.raises(ValueError, match="reduction must be one of"):
            objective_value(name, logits, labels, torch.ones(1, 1, dtype=bool), logits, reduction="mean")


def pard2_positions(layout: str) -> dict[str, torch.Tensor]:
    """The reference's positions: what each must predict, the target's logits for it, and the weight of its loss."""
    inputs = load_file(PARD2 / "train_inputs.safetensors")
    name = "train_expected" if layout == "layout" else "train_cod_expected"
    expected = load_file(PARD2 / f"{name}.safetensors")
    batch, length = inputs["tokens"].shape
    kept = expected.get("retained", torch.arange(4 * length))
    block, index = ((kept // length).expand(batch, -1), (kept % length).expand(batch, -1))
    weights = confidence_weights(inputs["teacher_gold_prob"], block, index, num_tokens=4)
    # The reference keeps a row's label and weight one place further on; the last row loses its loss.
    end = torch.full((batch, 1), -100)
    labels = torch.cat([expected["labels"][:, 1:], end], dim=1)
    return {
        "logits": expected["student_logits"],
        "teacher": expected["teacher_hidden"] @ inputs["target_head.weight"].T,
        "labels": labels,
        "weights": weights * (labels != -100),
        "expected_weights": torch.cat([expected["prev_prob"][:, 1:], 0.0 * end], dim=1),
    }


@pytest.mark.parametrize("layout", ["layout", "cod"])
def test_confidence_weights_equal_the_reference(layout):
    rows = pard2_positions(layout)
    assert ((rows["weights"] > 0) & (rows["weights"] < 1)).sum() >= 10
    torch.testing.assert_close(rows["weights"], rows["expected_weights"], rtol=2e-4, atol=1e-8)


@pytest.mark.parametrize("setting", PARD2_LOSSES["layout"])
@pytest.mark.parametrize("layout", ["layout", "cod"])
def test_pard2_losses_and_gradients_equal_the_reference(layout, setting):
    rows, values = pard2_positions(layout), PARD2_LOSSES[layout][setting]
    logits = rows["logits"].clone().requires_grad_()
    names = ("cat_cross_entropy", "cat_kl") if values["prev_prob_loss"] else ("cross_entropy", "forward_kl")
    labels, valid = rows["labels"], rows["labels"] != -100
    options = {"confidences": rows["weights"], "temperature": values["kd_temperature"]}
    cross_entropy, distillation = (
        objective_value(name, logits, labels, valid, rows["teacher"], **options) for name in names
    )
    loss = values["ce_alpha"] * cross_entropy + values["kd_alpha"] * distillation
    for found, name in ((cross_entropy, "ce"), (distillation, "kd"), (loss, "total")):
        assert found.item() == pytest.approx(values[name], rel=2e-4)
    loss.backward()
    gradients = load_file(PARD2 / "train_grads.safetensors")
    if f"{layout}.{setting}" in gradients:
        torch.testing.assert_close(logits.grad, gradients[f"{layout}.{setting}"], rtol=2e-4, atol=1e-6)
    else:
        assert layout == "cod"


def test_confidence_weights_equal_a_loop():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    block = torch.randint(0, 5, (2, 20), generator=generator)
    index = torch.randint(0, 7, (2, 20), generator=generator)
    found = confidence_weights(probabilities, block, index, num_tokens=5)
    for row in range(2):
        for j, p, weight in zip(block[row].tolist(), index[row].tolist(), found[row].tolist(), strict=True):
            expected = 1.0
            for token in range(p - j + 1, p + 1):
                expected *= probabilities[row, token].item() if token >= 0 else 1.0
            assert weight == pytest.approx(expected, abs=1e-12)


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="temperature must be positive"):
        kl_divergences(torch.zeros(1, 2), torch.zeros(1, 2), 0.0)
