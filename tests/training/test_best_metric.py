"""A metric that no evaluation reports is refused before training, not at the first evaluation."""

import pytest
from transformers import TrainerCallback

from hf_pardraft import DraftTrainer
from tiny_models import tiny_drafter
from training.tiny_training import trainer_for

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
CHOOSING = {**EVERY_STEP, "load_best_model_at_end": True}
DRAFTING = {"tau_prompts": 1, "tau_new_tokens": 8}
SEVERAL = {"objective": "cross_entropy + 0.5 * forward_kl"}


def chooses_by(metric, target, text, folder, sets=None, **settings):
    """A trained trainer, of a drafter of four tokens."""
    options = {"eval_dataset": sets} if sets else {}
    settings = {**CHOOSING, "metric_for_best_model": metric, "trainer_options": options, **settings}
    trainer = trainer_for("pard", target, text, folder, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("metric", "settings"),
    [
        (None, {}),
        ("loss", {}),
        ("eval_expected_tau", {}),
        ("accuracy_4", {}),
        ("eval_samples_per_second", {}),
        ("tau", DRAFTING),
        ("eval_acceptance_1", DRAFTING),
        ("decoded_tokens_per_second", DRAFTING),
        ("forward_kl", SEVERAL),
    ],
)
def test_what_evaluations_report_may_choose_the_best_checkpoint(metric, settings, target, text, tmp_path):
    trainer = chooses_by(metric, target, text, tmp_path, **settings)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("metric", "settings", "told"),
    [
        ("taux", {}, "choose one of loss, expected_tau, runtime"),
        ("accuracy_0", {}, "accuracy_1 to accuracy_4"),
        ("accuracy_5", {}, "accuracy_1 to accuracy_4"),
        ("acceptance_1", {}, "accuracy_1 to accuracy_4"),
        ("decoded_tokens_per_second", {}, "choose one of loss"),
        ("acceptance_5", DRAFTING, "acceptance_1 to acceptance_4"),
        ("forward_kl", {}, "choose one of loss"),
        ("streak", SEVERAL, "cross_entropy, forward_kl"),
    ],
)
def test_others_are_refused_before_training(metric, settings, told, target, text, tmp_path):
    with pytest.raises(ValueError, match=f"metric_for_best_model='{metric}' is nothing that evaluations.*{told}"):
        chooses_by(metric, target, text, tmp_path, **settings)


def test_of_several_evaluation_sets_each_has_its_own(target, text, tmp_path):
    sets = {"near": text.select([0, 1]), "near_too": text.select([2, 3])}
    trainer = chooses_by("eval_near_too_accuracy_1", target, text, tmp_path, sets)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    for metric in ("loss", "eval_tau", "far_loss"):
        with pytest.raises(ValueError, match="choose one of eval_near_"):
            chooses_by(metric, target, text, tmp_path, sets, **DRAFTING)
    with pytest.raises(ValueError, match="is nothing that evaluations"):
        chooses_by("eval_near_losses", target, text, tmp_path, sets)


class Reporting(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_mine"] = 1.0


def test_what_a_callback_of_a_callers_own_reports_may_choose(target, text, tmp_path):
    options = {"callbacks": [Reporting()]}
    trainer = trainer_for(
        "pard", target, text, tmp_path, metric_for_best_model="mine", trainer_options=options, **CHOOSING
    )
    trainer.train()
    assert trainer.state.best_metric == 1.0


def test_a_class_of_a_callers_own_may_report_more(target, text, tmp_path):
    class Own(DraftTrainer):
        pass

    arguments = trainer_for("pard", target, text, tmp_path).args
    arguments.metric_for_best_model = "mine"
    own = Own(tiny_drafter("pard", target), target=target, args=arguments, train_dataset=text, eval_dataset=text)
    assert own.args.metric_for_best_model == "mine"
