"""Losses over blocks equal the fixtures, and float64 loops written from the papers, values and gradients."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft.training.losses.sums import acceptance_weights, confidence_weights, position_weights
from training.objective_values import objective_value

FIXTURES = Path(__file__).parent.parent / "fixtures" / "loss_block"
SETTINGS = json.loads((FIXTURES / "expected.json").read_text())["settings"]
CHAIN_REDUCTIONS = {"weight_sum": "chain.weight_sum", "paper": "chain.literal_mean_active"}


def fixture_block(mask: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = load_file(FIXTURES / "inputs.safetensors")
    # Slot 0 of the fixture is the anchor, which no loss sees.
    return inputs["logits"].clone().requires_grad_(), inputs["labels"][:, 1:], inputs[f"valid.{mask}"][:, 1:]


def assert_gradient(logits, name):
    expected = load_file(FIXTURES / "grads.safetensors").get(name, torch.zeros_like(logits))
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["id"])
def test_the_first_error_loss_equals_the_fixture(setting):
    logits, labels, valid = fixture_block(setting["mask"])
    loss = objective_value("first_error", logits[:, 1:], labels, valid, gamma=setting["gamma"])
    assert loss.item() == pytest.approx(setting["values"]["focal.literal_eps"], abs=1e-9)
    loss.backward()
    assert_gradient(logits, f"{setting['id']}.focal.literal_eps")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["id"])
@pytest.mark.parametrize("reduction", CHAIN_REDUCTIONS)
def test_the_chain_reward_equals_the_fixture(setting, reduction):
    logits, labels, valid = fixture_block(setting["mask"])
    reward = objective_value("chain_reward", logits[:, 1:], labels, valid, reduction=reduction)
    assert reward.item() == pytest.approx(setting["values"][CHAIN_REDUCTIONS[reduction]], abs=1e-9)
    reward.backward()
    assert_gradient(logits, f"{setting['id']}.{CHAIN_REDUCTIONS[reduction]}")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["id"])
def test_the_three_add_up_to_the_papers_objective(setting):
    for reduction, name in (("paper", "total.literal"), ("weight_sum", "total.weight_sum")):
        for number, total in enumerate(setting["totals"]):
            logits, labels, valid = fixture_block(setting["mask"])
            terms = {"cross_entropy": 1, "first_error": total["alpha_f"], "chain_reward": -total["alpha_c"]}
            settings = {"gamma": setting["gamma"], "reduction": reduction}
            loss = sum(
                coefficient * objective_value(term, logits[:, 1:], labels, valid, **settings)
                for term, coefficient in terms.items()
            )
            assert loss.item() == pytest.approx(total[name], abs=1e-9)
            if number == 0:
                loss.backward()
                assert_gradient(logits, f"{setting['id']}.{name}.af{total['alpha_f']}.ac{total['alpha_c']}")


class Loops:
    """The equations over plain floats. `log_p[n][k]` and so on, with k from 0."""

    def __init__(self, logits, target_logits, labels, valid):
        self.blocks, self.positions, _ = logits.shape
        self.log_p = [[] for _ in range(self.blocks)]
        self.right = [[] for _ in range(self.blocks)]
        self.kl = [[] for _ in range(self.blocks)]
        self.valid = valid.tolist()
        for n in range(self.blocks):
            for k in range(self.positions):
                draft, target = (self.log_softmax(x[n, k].tolist()) for x in (logits, target_logits))
                label = int(labels[n, k]) if self.valid[n][k] else 0
                self.log_p[n].append(draft[label])
                self.right[n].append(draft.index(max(draft)) == label)
                self.kl[n].append(sum(math.exp(t) * (t - d) for t, d in zip(target, draft, strict=True)))

    @staticmethod
    def log_softmax(row):
        top = max(row)
        norm = top + math.log(sum(math.exp(x - top) for x in row))
        return [x - norm for x in row]

    def places(self):
        return [(n, k) for n in range(self.blocks) for k in range(self.positions) if self.valid[n][k]]

    def active(self):
        return sum(any(row) for row in self.valid)

    def mean(self, value, weight, reduction):
        total = sum(weight(n, k) * value(n, k) for n, k in self.places())
        divisor = sum(weight(n, k) for n, k in self.places()) if reduction == "weight_sum" else self.active()
        return total / divisor if divisor else 0.0

    def rho(self, n, k, factor=None):
        result = 1.0
        for j in range(k + 1):
            if self.valid[n][j]:
                result *= math.exp(self.log_p[n][j]) if factor is None else factor(n, j)
        return result

    def decay(self, gamma):
        return lambda n, k: 1.0 if gamma is None else math.exp(-k / gamma)

    def cross_entropy(self, gamma, reduction):
        return self.mean(lambda n, k: -self.log_p[n][k], self.decay(gamma), reduction)

    def annealed_kl(self, gamma, reduction):
        return self.mean(lambda n, k: self.kl[n][k], lambda n, k: gamma**k, reduction)

    def first_error(self, gamma):
        total = weight_sum = 0.0
        for n in range(self.blocks):
            wrong = [k for k in range(self.positions) if self.valid[n][k] and not self.right[n][k]]
            if wrong:
                total -= self.decay(gamma)(n, wrong[0]) * self.log_p[n][wrong[0]]
                weight_sum += self.decay(gamma)(n, wrong[0])
        return total / (weight_sum + 1e-6)

    def chain(self, reduction):
        total = sum(self.rho(n, k) for n, k in self.places())
        divisor = len(self.places()) if reduction == "weight_sum" else self.active() * self.positions
        return total / divisor if divisor else 0.0

    def streak(self, reduction):
        total = sum(self.rho(n, k) for n, k in self.places())
        divisor = len(self.places()) if reduction == "weight_sum" else self.active()
        return total / divisor if divisor else 0.0

    def subtasks(self, gamma):
        means, average = [], sum(self.decay(gamma)(0, k) for k in range(self.positions)) / self.positions
        for k in range(self.positions):
            rows = [
                -self.log_p[n][k] * self.decay(gamma)(n, k) / average for n in range(self.blocks) if self.valid[n][k]
            ]
            means += [sum(rows) / len(rows)] if rows else []
        return sum(means) / len(means) if means else 0.0

    def acceptance_weight(self, n, k, alpha):
        smoothed = lambda n, j: (1 - alpha) * math.exp(self.log_p[n][j]) + alpha  # noqa: E731
        return sum(self.rho(n, j, smoothed) for j in range(k, self.positions) if self.valid[n][j])

    def acceptance(self, alpha, reduction):
        return self.mean(lambda n, k: -self.log_p[n][k], lambda n, k: self.acceptance_weight(n, k, alpha), reduction)


def random_case(seed, blocks=5, positions=4, scale=2.0):
    """Holes, a block with nothing valid, labels out of the vocabulary where nothing is valid."""
    generator = torch.Generator().manual_seed(seed)
    logits, target = scale * torch.randn(2, blocks, positions, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (blocks, positions), generator=generator)
    # Some right ones, so that the first error is not always the first position.
    favoured = torch.rand(blocks, positions, generator=generator) < 0.6
    logits = logits.scatter_add(2, labels[:, :, None], 6.0 * favoured[:, :, None].double())
    valid = torch.rand(blocks, positions, generator=generator) < 0.75
    valid[blocks // 2] = False
    return logits, target, labels.masked_fill(~valid, -100), valid


CASES = [
    *[{"seed": seed} for seed in range(4)],
    {"seed": 4, "positions": 1},
    {"seed": 5, "blocks": 1},
    {"seed": 6, "scale": 300.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("reduction", ["weight_sum", "paper"])
@pytest.mark.parametrize("gamma", [None, 1.7])
def test_every_loss_equals_its_loop(case, reduction, gamma):
    logits, target, labels, valid = random_case(**case)
    loops = Loops(logits, target, labels, valid)
    expected = {
        "cross_entropy": loops.cross_entropy(gamma, reduction),
        "first_error": loops.first_error(gamma),
        "chain_reward": loops.chain(reduction),
        "streak": loops.streak(reduction),
        "subtask_cross_entropy": loops.subtasks(gamma),
        "annealed_kl": loops.annealed_kl(0.6, reduction),
        "dpace": loops.acceptance(0.3, reduction),
    }
    settings = {"gamma": gamma, "kl_gamma": 0.6, "dpace_alpha": 0.3, "reduction": reduction}
    for name, value in expected.items():
        found = objective_value(name, logits, labels, valid, target, **settings)
        assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-9), name


NAMES = ("cross_entropy", "first_error", "chain_reward", "streak", "subtask_cross_entropy", "annealed_kl", "dpace")


def value_of(name, logits, target, labels, valid, **options):
    reduction = "paper" if name == "streak" else "weight_sum"
    return objective_value(name, logits, labels, valid, target, gamma=2.0, reduction=reduction, **options)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_central_differences(name):
    logits, target, labels, valid = random_case(9, blocks=3, positions=3)
    # The first error and D-PACE's weights are constants, which differences would not know.
    if name == "dpace":
        weights = acceptance_weights(label_rows(logits, labels, valid), valid)
        function = lambda x: weighted_ce(x, labels, valid, weights)  # noqa: E731
    else:
        function = lambda x: value_of(name, x, target, labels, valid)  # noqa: E731
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(value_of(name, logits, target, labels, valid), logits)
    step = 1e-5
    for n, k, v in torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(7)).tolist():
        shift = torch.zeros_like(logits)
        shift[n, k, v] = step
        difference = (function(logits + shift) - function(logits - shift)).item() / (2 * step)
        assert gradient[n, k, v].item() == pytest.approx(difference, abs=1e-7)


def label_rows(logits, labels, valid):
    return logits.log_softmax(-1).gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]


def weighted_ce(logits, labels, valid, weights):
    return -(label_rows(logits, labels, valid) * weights * valid).sum() / (weights * valid).sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_and_empty_batches_give_numbers(name, dtype):
    logits, target, labels, valid = random_case(2, scale=1e4)
    for case_valid in (valid, torch.zeros_like(valid)):
        drafted = logits.to(dtype).requires_grad_()
        loss = value_of(name, drafted, target.to(dtype), labels, case_valid)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(drafted.grad).all()
        assert loss.dtype == torch.float32
    assert loss.item() == 0
    assert not drafted.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_at_an_invalid_position_changes_nothing(name):
    """Nobody has scored anything there."""
    logits, target, labels, valid = random_case(3)
    gradients, values = [], []
    for rubbish in (0.0, math.nan, -math.inf):
        drafted = logits.clone().requires_grad_()
        loss = value_of(name, drafted, target, labels, valid, elsewhere=rubbish)
        loss.backward()
        values.append(loss.item())
        gradients.append(drafted.grad)
    assert values[1] == values[2] == values[0]
    for gradient in gradients:
        assert torch.equal(gradient, gradients[0])
        assert not gradient[~valid].any()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_both_models_rule_out_change_nothing(name):
    logits, target, labels, valid = random_case(1)
    gradients, values = [], []
    for columns in (0, 2):
        drafted = torch.nn.functional.pad(logits, (0, columns), value=-math.inf).requires_grad_()
        loss = value_of(name, drafted, torch.nn.functional.pad(target, (0, columns), value=-math.inf), labels, valid)
        loss.backward()
        values.append(loss.item())
        gradients.append(drafted.grad)
    assert values[1] == pytest.approx(values[0], abs=1e-12)
    torch.testing.assert_close(gradients[1][..., :7], gradients[0])
    assert not gradients[1][..., 7:].any()


def test_a_token_that_the_target_rules_out_costs_its_share_of_the_draft():
    draft = torch.zeros(1, 1, 4, dtype=torch.float64)
    target = torch.tensor([[[0.0, 0.0, -math.inf, -math.inf]]], dtype=torch.float64)
    labels, valid = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    assert value_of("annealed_kl", draft, target, labels, valid).item() == pytest.approx(math.log(2))
    # What the target may write and the drafter never proposes is infinitely far off.
    assert value_of("annealed_kl", target, draft, labels, valid).item() == math.inf


def test_dpace_weights_are_the_log_probability_gradients_of_the_accepted_length():
    logits, _, labels, valid = random_case(3)
    log_probs = label_rows(logits, labels, valid).detach().requires_grad_()
    length = (torch.where(valid, log_probs, 0).cumsum(1).exp() * valid).sum()
    (gradient,) = torch.autograd.grad(length, log_probs)
    torch.testing.assert_close(acceptance_weights(log_probs, valid, alpha=0.0), gradient)
    assert not acceptance_weights(log_probs, valid).requires_grad


def test_kl_takes_the_targets_confidence_as_weights():
    logits, target, labels, valid = random_case(1)
    probabilities = torch.rand(1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    index = torch.arange(4).expand(5, 4) + torch.arange(5)[:, None]
    block = torch.arange(4).expand(5, 4)
    weights = confidence_weights(probabilities, block.reshape(1, -1), index.reshape(1, -1), 4).view(5, 4)
    loops = Loops(logits, target, torch.zeros_like(valid).long(), valid)
    expected = loops.mean(lambda n, k: loops.kl[n][k], lambda n, k: weights[n, k].item(), "weight_sum")
    found = objective_value("cat_kl", logits, labels, valid, target, confidences=weights)
    assert found.item() == pytest.approx(expected, abs=1e-9)


def test_gamma_leaves_the_scale_of_the_weight_sum_alone():
    """Rows that are all alike have the same loss, and the same gradient in total, whatever gamma is."""
    totals = []
    for gamma in (None, 0.5, 7.0):
        logits = torch.zeros(3, 5, 8, dtype=torch.float64, requires_grad=True)
        labels = torch.zeros(3, 5, dtype=torch.long)
        loss = objective_value("cross_entropy", logits, labels, torch.ones(3, 5, dtype=torch.bool), gamma=gamma)
        loss.backward()
        totals.append((loss.item(), logits.grad[:, :, 0].sum().item()))
    assert totals[1] == pytest.approx(totals[0])
    assert totals[2] == pytest.approx(totals[0])
    assert position_weights(5, 0.5).sum() < 2


@pytest.mark.parametrize("alpha", [-0.1, 1.0])
def test_a_smoothing_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        acceptance_weights(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), alpha)
