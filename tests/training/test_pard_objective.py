"""PARD's own objective is eq. 8 of its paper (arXiv 2504.18583), written here as the loop that it is, with COD and without."""

import pytest
import torch
from datasets import Dataset

from hf_pardraft import DraftTrainer, DraftTrainingArguments
from tiny_models import MASK_TOKEN_ID, random_prompt, tiny_drafter, tiny_target

NUM_TOKENS = 4
LENGTHS = (11, 17, 14)


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter("pard", tiny_target("qwen3"), depth=NUM_TOKENS).double().eval()


def texts(lengths=LENGTHS):
    rows = [random_prompt(length, seed)[0].tolist() for seed, length in enumerate(lengths)]
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])


def trainer_for(drafter, folder, **settings):
    arguments = DraftTrainingArguments(
        folder, draft_tokens=NUM_TOKENS, tau_prompts=0, use_cpu=True, report_to=[], save_strategy="no", **settings
    )
    return DraftTrainer(drafter, args=arguments, train_dataset=texts())


@torch.no_grad()
def cost(drafter, text, i, k):
    """-log P(x_i | x_0, ..., x_{i-k}, m_0, ..., m_{k-2}), one plain forward for each."""
    read = text[: i - k + 1] + [MASK_TOKEN_ID] * (k - 1)
    logits = drafter(input_ids=torch.tensor([read])).logits[0, -1]
    return -logits.log_softmax(-1)[text[i]].item()


def test_without_cod_each_subtask_is_the_mean_of_its_n_minus_k_plus_1_terms(drafter, tmp_path):
    trainer = trainer_for(drafter, tmp_path, cod_retention=1.0)
    for text in texts()["input_ids"]:
        # x_0 to x_N.
        last = len(text) - 1
        subtasks = [
            sum(cost(drafter, text, i, k) for i in range(k, last + 1)) / (last - k + 1)
            for k in range(1, NUM_TOKENS + 1)
        ]
        batch = trainer.data_collator([{"input_ids": text, "labels": text}])
        found = trainer.compute_loss(drafter, batch).item()
        assert found == pytest.approx(sum(subtasks) / NUM_TOKENS, rel=1e-9)


@pytest.mark.parametrize("gamma", [None, 2.0])
def test_subtasks_that_cod_thins_out_weigh_as_much_as_the_first(gamma, drafter, tmp_path):
    trainer = trainer_for(drafter, tmp_path, cod_retention=0.5, cod_min_retention=0.2, loss_gamma=gamma)
    data = texts()
    batch = trainer.data_collator(list(data))
    costs = {k: [] for k in range(1, NUM_TOKENS + 1)}
    for row, text in enumerate(data["input_ids"]):
        supervised = batch["labels"][row] != -100
        for k, place in zip(
            batch["draft_positions"][row][supervised], batch["query_index"][row][supervised], strict=True
        ):
            # A row predicts the token after its place.
            costs[int(k)].append(cost(drafter, text, int(place) + 1, int(k)))
    counts = [len(kept) for kept in costs.values()]
    # N r^(k-1) of each text, and no less than N r_min (eq. 11).
    expected = [
        sum(int((length - 1) * max(0.5 ** (k - 1), 0.2)) for length in LENGTHS) for k in range(1, NUM_TOKENS + 1)
    ]
    assert counts == expected
    weights = [1.0 if gamma is None else torch.tensor(-(k - 1) / gamma).double().exp().item() for k in costs]
    means = [sum(kept) / len(kept) for kept in costs.values()]
    value = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    found = trainer.compute_loss(drafter, batch).item()
    assert found == pytest.approx(value, rel=1e-9)
    # Which a pool of all rows is not.
    pooled = sum(w * sum(kept) for w, kept in zip(weights, costs.values(), strict=True))
    pooled /= sum(w * count for w, count in zip(weights, counts, strict=True))
    assert abs(found - pooled) > 1e-3
    other = trainer_for(
        drafter, tmp_path, cod_retention=0.5, cod_min_retention=0.2, loss_gamma=gamma, objective="cross_entropy"
    )
    assert other.compute_loss(drafter, batch).item() == pytest.approx(pooled, rel=1e-9)


def test_accumulated_batches_average_each_subtask_over_all_of_them(drafter, tmp_path):
    """A step's loss is that of its whole batch, however it is cut, though the cuts have other positions in each subtask."""
    found = []
    for settings in ({"per_device_train_batch_size": 3}, {"per_device_train_batch_size": 1}):
        steps = {"gradient_accumulation_steps": 3 // settings["per_device_train_batch_size"], "max_steps": 1}
        common = {"cod_retention": 0.5, "logging_steps": 1, "learning_rate": 0.0, "disable_tqdm": True}
        trainer = trainer_for(drafter, tmp_path, **settings, **steps, **common)
        trainer.train()
        found.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
        drafter.eval()
    assert found[0] == pytest.approx(found[1], rel=1e-9)
