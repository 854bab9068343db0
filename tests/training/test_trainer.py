"""DraftTrainer: it learns, it leaves the target alone, and a run that was cut off goes on as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from hf_pardraft import AutoDrafter, DartDrafter, DraftTrainer, DraftTrainingArguments
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training.layouts import shared_prefixes
from tiny_models import tiny_drafter
from training.objective_values import objective_value
from training.tiny_training import losses, trainer_for

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")


class StopAt(TrainerCallback):
    """Cuts a run off, which leaves the number of steps that it was planned for as it was."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def note_gammas(trainer) -> list[float]:
    """The gammas of the losses that `trainer` computes from now on."""
    gammas, draft_sums = [], trainer.draft_sums

    def noting(scores, gamma):
        # Denominators alone are taken beforehand.
        gammas.extend([gamma] if scores.log_probs.any() else [])
        return draft_sums(scores, gamma)

    trainer.draft_sums = noting
    return gammas


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_the_targets_text_raises_acceptance(kind, target, text, tmp_path):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    prompt = torch.tensor([text[0]["input_ids"][:4]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 28}
    expected = target.generate(prompt, **options)
    # A law takes longer to learn than its most likely token.
    steps = 200 if kind == "dart" else 60
    trainer = trainer_for(kind, target, text, tmp_path, max_steps=steps, logging_steps=20)
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


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_interrupted_training_leaves_nothing_in_what_the_next_one_logs(kind, target, text, tmp_path):
    settings = {"learning_rate": 0.0, "logging_steps": 2, "max_steps": 2}
    trainer, fresh = (trainer_for(kind, target, text, tmp_path / name, **settings) for name in ("interrupted", "fresh"))
    fresh.train()
    trainer.add_callback(StopAt(1))
    trainer.train()
    trainer.remove_callback(StopAt)
    trainer.train()
    (expected,), (found,) = ([entry for entry in t.state.log_history if "loss" in entry] for t in (fresh, trainer))
    assert found == expected


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
    # Whoever runs a PARD drafter as the plain causal LM that it is wants its cache.
    assert loaded.config.use_cache


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


# Eight examples in batches of four: two steps an epoch.
SCHEDULES = {
    "steps": ({"loss_gamma": 1.0, "loss_gamma_end": 4.0}, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
    "epochs": ({"loss_gamma": 4.5, "loss_gamma_epoch_step": 1.0}, [4.5, 4.5, 5.5, 5.5, 6.5, 6.5, 7.5]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gamma_grows_while_training_and_not_for_evaluation(schedule, target, text, tmp_path):
    settings, expected = SCHEDULES[schedule]
    trainer = trainer_for("dflare", target, text, tmp_path, **settings)
    gammas = note_gammas(trainer)
    trainer.train()
    assert gammas == pytest.approx(expected[:6])
    logged = [entry["loss_gamma"] for entry in trainer.state.log_history if "loss_gamma" in entry]
    assert logged == pytest.approx(expected[:6])
    gammas.clear()
    trainer.evaluate()
    assert gammas == [settings["loss_gamma"]]


@pytest.mark.parametrize("is_stream", [False, True])
def test_gamma_grows_with_the_passes_over_rows_and_over_a_stream_alike(is_stream, target, text, tmp_path):
    data = text.to_iterable_dataset() if is_stream else text
    settings = {"loss_gamma": 4.5, "loss_gamma_epoch_step": 1.0, "max_steps": 5}
    trainer = trainer_for("dflare", target, data, tmp_path, **settings)
    gammas = note_gammas(trainer)
    trainer.train()
    assert gammas == [4.5, 4.5, 5.5, 5.5, 6.5]


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_the_same_weights_are_evaluated_alike_in_every_epoch(kind, target, text, tmp_path):
    """Masks that are dropped, and anchors that are chosen, are others in each epoch of training."""
    settings = {
        "learning_rate": 0.0,
        "eval_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 3,
        "num_anchors": 3,
    }
    trainer = trainer_for(kind, target, text, tmp_path, **settings)
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 3
    assert len({entry["eval_loss"] for entry in evaluated}) == 1
    assert len({entry["eval_accuracy_2"] for entry in evaluated}) == 1
    assert trainer.data_collator.epoch == 2
    assert trainer.eval_collator.epoch == 0
    assert len(set(losses(trainer))) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gamma_grows_with_optimiser_steps_not_with_accumulated_batches(schedule, target, text, tmp_path):
    settings, expected = SCHEDULES[schedule]
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_for("dflash", target, text, tmp_path, **settings, **halves)
    gammas = note_gammas(trainer)
    trainer.train()
    assert gammas == pytest.approx([gamma for gamma in expected[:6] for _ in range(2)])


@pytest.mark.parametrize("cut_at", [3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_goes_on_with_the_gamma_of_an_unbroken_one(schedule, cut_at, target, text, tmp_path):
    settings, expected = SCHEDULES[schedule]
    unbroken = trainer_for("dflare", target, text, tmp_path / "unbroken", **settings)
    unbroken.train()
    first = trainer_for("dflare", target, text, tmp_path / "cut", save_strategy="steps", save_steps=cut_at, **settings)
    first.add_callback(StopAt(cut_at))
    first.train()
    second = trainer_for("dflare", target, text, tmp_path / "cut", **settings)
    gammas = note_gammas(second)
    second.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{cut_at}"))
    assert gammas == pytest.approx(expected[cut_at:6])
    assert losses(second)[cut_at:] == losses(unbroken)[cut_at:]


def test_a_drafter_that_taps_needs_its_target(target, text, tmp_path):
    with pytest.raises(ValueError, match="pass target="):
        DraftTrainer(tiny_drafter("dflash", target), args=DraftTrainingArguments(tmp_path, use_cpu=True))


def test_a_drafter_whose_taps_the_target_decides_needs_it_too(tmp_path):
    published = AutoDrafter.from_pretrained(Path(__file__).parent.parent / "fixtures" / "dart")
    with pytest.raises(ValueError, match="pass target="):
        DraftTrainer(published, args=DraftTrainingArguments(tmp_path, use_cpu=True))


def test_the_targets_logits_are_computed_only_where_they_are_learned_from(target, text, tmp_path):
    widths = {}
    for kind in ("dflash", "dart"):
        trainer = trainer_for(kind, target, text, tmp_path / kind, max_steps=1, loss_chunk_rows=100)
        seen = []
        handle = target.lm_head.register_forward_hook(
            lambda _module, _args, output, seen=seen: seen.append(output.shape)
        )
        trainer.train()
        handle.remove()
        # DFlash borrows the head, for rows without a batch dimension.
        widths[kind] = [shape[1] for shape in seen if len(shape) == 3]
    assert widths["dflash"] == [0]
    # The rows that are learned, a chunk at a time, and once more in the backward pass.
    assert widths["dart"][0] == 0
    assert sorted(widths["dart"][1:]) == [8] * 2 + [100] * 8


def test_the_loss_is_the_annealed_kl_to_the_target(target, text, tmp_path):
    """Of blocks laid out by hand: every anchor, its positions, and the laws that the target has there."""
    trainer = trainer_for("dart", target, text, tmp_path, kl_gamma=0.7, num_anchors=100)
    drafter, ids = trainer.drafter, torch.tensor([text[0]["input_ids"]])
    batch = trainer.data_collator([text[0]])
    with torch.no_grad():
        found = trainer.compute_loss(drafter, batch)
        outputs = target(ids, output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[tap] for tap in drafter.tapped_hidden_states], dim=-1)
        length, drafts, laws = ids.shape[1], [], []
        valid = torch.zeros(length - 5, 4, dtype=torch.bool)
        for block, anchor in enumerate(range(4, length - 1)):
            positions = torch.arange(anchor + 1)[None]
            context = DraftInputs(ids[:, : anchor + 1], positions, states[:, :anchor], positions[:, :-1])
            drafts.append(drafter.draft(context, drafter.new_draft_state(target), 4)[0])
            laws.append(torch.nn.functional.pad(outputs.logits[0, anchor : anchor + 4], (0, 0, 0, 4))[:4])
            valid[block, : length - 1 - anchor] = True
        labels = torch.zeros_like(valid).long()
        drafts, laws = torch.stack(drafts), torch.stack(laws)
        expected = objective_value("annealed_kl", drafts, labels, valid, laws, kl_gamma=0.7)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("objective", ["annealed_kl", "cross_entropy", "chain_reward"])
def test_few_prefixes_with_masks_have_the_loss_of_all_on_average(
    target, text, tmp_path, monkeypatch, objective, shifted
):
    settings = {"objective": objective, "loss_reduction": "paper"}
    trainer = trainer_for("dart", target, text, tmp_path, num_anchors="all", **settings)
    trainer.drafter.config.shifted = trainer.data_collator.shifted = shifted
    example, losses = text[0], []
    with torch.no_grad():
        expected = trainer.compute_loss(trainer.drafter, trainer.data_collator([example]))
        # Each one has masks, alone, in one of the batches.
        for number in range(len(example["input_ids"]) - 5):
            monkeypatch.setattr(shared_prefixes, "some_of", lambda anchors, *_, at=number: anchors[at : at + 1])
            losses.append(trainer.compute_loss(trainer.drafter, trainer.data_collator([example])))
    torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-4, atol=1e-6)


def test_a_drafter_of_some_tokens_learns_the_targets_law_among_them(target, text, tmp_path):
    used = sorted({token for row in text["input_ids"] for token in row})[::2]
    drafter = DartDrafter.for_target(target, draft_token_ids=used, draft_length=3)
    arguments = DraftTrainingArguments(
        tmp_path,
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = DraftTrainer(drafter, target=target, args=arguments, train_dataset=text, eval_dataset=text)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    scores = trainer.evaluate()
    assert scores["eval_loss"] < before / 2
    # What it can't write counts as wrong.
    assert 0.2 < scores["eval_accuracy_1"] < 0.9
    for position in range(1, drafter.max_draft_depth + 1):
        assert scores[f"eval_accuracy_{position}"] < scores[f"eval_hit10_{position}"] < 0.9
    assert not any("hit" in name for logs in trainer.state.log_history if "loss" in logs for name in logs)
    assert torch.equal(drafter.draft_token_ids, torch.tensor(used))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kl_gamma", 0.0),
        ("kl_gamma", 1.1),
        ("draft_tokens", 0),
        ("cod_retention", 0.0),
        ("cod_min_retention", 1.5),
        ("num_anchors", 0),
        ("loss_gamma", -1.0),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, setting, value):
    with pytest.raises(ValueError, match=setting):
        DraftTrainingArguments(tmp_path, use_cpu=True, **{setting: value})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_gamma_end": 5.0}, "a value to start from"),
        ({"loss_gamma_epoch_step": 1.0}, "a value to start from"),
        ({"loss_gamma": 4.0, "loss_gamma_end": 3.0}, "loss_gamma_end must be above"),
        ({"loss_gamma": 4.0, "loss_gamma_epoch_step": 0.0}, "loss_gamma_epoch_step must be positive"),
        ({"loss_gamma": 4.0, "loss_gamma_end": 5.0, "loss_gamma_epoch_step": 1.0}, "leave one of them out"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(tmp_path, settings, match):
    with pytest.raises(ValueError, match=match):
        DraftTrainingArguments(tmp_path, use_cpu=True, **settings)


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
