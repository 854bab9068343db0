"""DraftTrainer: it learns, it leaves the target alone, and a run that was cut off goes on as if nothing had happened."""

import pytest
import torch
from datasets import Dataset

from hf_pardraft import AutoDrafter, DraftTrainer, DraftTrainingArguments
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "pard2", "dflash")


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def text(target):
    """What the target writes, greedily, after eight prompts."""
    rows = []
    for seed in range(8):
        prompt = random_prompt(4, seed)
        row = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=28)[0]
        rows.append({"input_ids": row.tolist(), "labels": [-100] * 4 + row[4:].tolist()})
    return Dataset.from_list(rows)


def trainer_for(kind, target, text, folder, **settings):
    arguments = DraftTrainingArguments(
        folder,
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "draft_tokens": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "loss_gamma": 4.0,
            **settings,
        },
    )
    return DraftTrainer(
        tiny_drafter(kind, target), target=target, args=arguments, train_dataset=text, eval_dataset=text
    )


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_the_targets_text_raises_acceptance(kind, target, text, tmp_path):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    prompt = torch.tensor([text[0]["input_ids"][:4]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 28}
    expected = target.generate(prompt, **options)
    trainer = trainer_for(kind, target, text, tmp_path, max_steps=60, logging_steps=20)
    untrained = target.generate(prompt, assistant_model=trainer.drafter.eval(), **options)
    tau_before = trainer.drafter.last_stats.tau
    trainer.train()
    trained = target.generate(prompt, assistant_model=trainer.drafter.eval(), **options)
    assert torch.equal(untrained, expected)
    assert torch.equal(trained, expected)
    assert trainer.drafter.last_stats.tau > tau_before + 1
    assert losses(trainer)[-1] < losses(trainer)[0] / 2
    assert all(torch.equal(target.state_dict()[name], weight) for name, weight in before.items())
    assert all(parameter.grad is None for parameter in target.parameters())
    scores = trainer.evaluate()
    assert scores["eval_accuracy_1"] > 0.8
    assert scores["eval_expected_tau"] > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(kind, target, text, tmp_path):
    unbroken = trainer_for(kind, target, text, tmp_path / "unbroken")
    unbroken.train()
    first = trainer_for(kind, target, text, tmp_path / "cut", max_steps=3, save_strategy="steps", save_steps=3)
    first.train()
    second = trainer_for(kind, target, text, tmp_path / "cut")
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert losses(first)[:3] == losses(unbroken)[:3]
    assert losses(second)[-3:] == losses(unbroken)[-3:]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_a_drafter_that_remembers_its_target(kind, target, text, tmp_path):
    trainer = trainer_for(kind, target, text, tmp_path / "run", max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "drafter")
    before = trainer.drafter.state_dict()
    loaded = AutoDrafter.from_pretrained(tmp_path / "drafter")
    assert type(loaded) is type(trainer.drafter)
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())
    assert loaded.config.target_model_type == "qwen3"
    assert loaded.draft_depth == 4


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_batches_train_like_one_batch(kind, target, text, tmp_path):
    """Equal batches, so the mean of their means is the mean."""
    same = Dataset.from_list([text[0]] * 4)
    weights = []
    for accumulation, batch in ((1, 4), (2, 2)):
        trainer = trainer_for(
            kind,
            target,
            same,
            tmp_path / str(batch),
            max_steps=2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        weights.append(torch.cat([parameter.flatten() for parameter in trainer.drafter.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_a_drafter_that_taps_needs_its_target(target, text, tmp_path):
    with pytest.raises(ValueError, match="pass target="):
        DraftTrainer(tiny_drafter("dflash", target), args=DraftTrainingArguments(tmp_path, use_cpu=True))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("draft_tokens", 0), ("cod_retention", 0.0), ("cod_min_retention", 1.5), ("num_anchors", 0), ("loss_gamma", -1.0)],
)
def test_settings_out_of_range_are_refused(tmp_path, setting, value):
    with pytest.raises(ValueError, match=setting):
        DraftTrainingArguments(tmp_path, use_cpu=True, **{setting: value})


def test_pard2_learns_its_projection_and_the_best_checkpoint_brings_it_back(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    # The greatest loss is the first, so that the best checkpoint is not the last.
    trainer = trainer_for(
        "pard2", target, text, tmp_path, load_best_model_at_end=True, greater_is_better=True, **settings
    )
    torch.nn.init.zeros_(trainer.drafter.target_proj.weight)
    trainer.train()
    assert trainer.drafter.config.target_fingerprint is not None
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = AutoDrafter.from_pretrained(trainer.state.best_model_checkpoint)
    assert best.target_proj.weight.abs().max() > 0
    assert torch.equal(trainer.drafter.target_proj.weight, best.target_proj.weight)


def test_without_features_pard2_trains_as_a_pard_drafter(target, text, tmp_path):
    trainer = trainer_for("pard2", target, text, tmp_path, max_steps=2)
    trainer.drafter.generation_config.use_target_features = False
    before = trainer.drafter.target_proj.weight.clone()
    trainer.train()
    assert torch.equal(trainer.drafter.target_proj.weight, before)
