"""Two processes train as one."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from hf_pardraft import DraftTrainer, DraftTrainingArguments
from processes import in_processes
from tiny_models import random_prompt, tiny_drafter, tiny_target

DEPTH = 4
# Heads inside the drafter and borrowed ones, denominators that are known before and such that are not.
CASES = [
    ("pard", "subtask_cross_entropy+0.3*first_error+forward_kl"),
    ("pard2", "0.1*cat_cross_entropy+cat_kl"),
    ("dflash", "cross_entropy+0.3*first_error+4*chain_reward"),
    ("dflare", "dpace+2*streak"),
    ("dart", "annealed_kl"),
]


def texts(count: int, first_seed: int = 0) -> Dataset:
    """Texts of different lengths, of which different parts are learned."""
    examples = []
    for seed in range(first_seed, first_seed + count):
        ids = random_prompt(9 + 3 * (seed % 4), seed)[0].tolist()
        prompt = 2 + seed % 5
        examples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return Dataset.from_list(examples)


def train_cases(folder: Path, batch_size: int, accumulation: int = 2) -> dict[str, dict]:
    """Two steps over eight texts for each case: losses, evaluation loss, weights."""
    target = tiny_target("qwen3", initializer_range=0.15).double()
    results = {}
    for kind, objective in CASES:
        arguments = DraftTrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            draft_tokens=DEPTH,
            tau_prompts=0,
            num_anchors=100,
            objective=objective,
            loss_gamma=3.0,
            loss_chunk_rows=20,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        drafter = tiny_drafter(kind, target, depth=DEPTH).double()
        # Seven are not divided evenly, so the last batch of several processes repeats one.
        trainer = DraftTrainer(
            drafter, target=target, args=arguments, train_dataset=texts(8), eval_dataset=texts(7, first_seed=20)
        )
        trainer.train()
        results[kind] = {
            "processes": trainer.accelerator.num_processes,
            "eval_loss": trainer.evaluate()["eval_loss"],
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": {name: weight.detach() for name, weight in drafter.named_parameters()},
        }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one process makes of the cases, and what two do."""
    folder = tmp_path_factory.mktemp("processes")
    two = in_processes(lambda rank: train_cases(folder / str(rank), 2))
    return train_cases(folder, 4), two[0]


@pytest.mark.parametrize("kind", [kind for kind, _ in CASES])
def test_two_processes_train_as_one(kind, results):
    one, two = (result[kind] for result in results)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-6, atol=1e-7)
