"""A run's terminal shows a line for each log and a table for each evaluation; a reporter gets every metric by its name."""

import pytest
from transformers import TrainerCallback

from hf_pardraft.training.progress import evaluation_table, training_line
from training.tiny_training import trainer_for


class Reporter(TrainerCallback):
    """What TensorBoard, trackio and others are given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_the_terminal_shows_a_table_and_a_reporter_everything(target, text, tmp_path, capsys, disable_tqdm):
    reporter = Reporter()
    settings = {"max_steps": 2, "tau_prompts": 1, "tau_new_tokens": 6, "eval_strategy": "steps", "eval_steps": 1}
    options = {"trainer_options": {"callbacks": [reporter]}, "disable_tqdm": disable_tqdm}
    trainer_for("dflash", target, text, tmp_path, **options, **settings).train()
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert sum(line.startswith("eval at step 2: loss ") for line in lines) == 1
    assert sum(line.startswith("step 2/2: loss ") for line in lines) == 1
    assert sum(line.split()[:3] == ["position", "1", "2"] for line in lines) == 2
    assert sum(line.startswith("  accepted, %") for line in lines) == 2
    # Nobody prints dictionaries.
    assert "{" not in shown
    assert max(map(len, lines)) < 130
    evaluated = next(logs for logs in reporter.logs if "eval_loss" in logs)
    names = {"tau", "expected_tau", "decoded_tokens_per_second", "acceptance_1", "accuracy_1"}
    assert {f"eval_{name}" for name in names} < evaluated.keys()
    assert {"accuracy_1", "expected_tau", "grad_norm"} < next(logs for logs in reporter.logs if "loss" in logs).keys()


def test_an_evaluation_is_compared_with_the_one_before():
    before = {"loss": 2.0, "tau": 2.25}
    now = {"loss": 1.5, "tau": 2.5, "expected_tau": 2.4, "decoded_tokens_per_second": 81.26}
    shares = {"accuracy_1": 0.7, "accuracy_2": 0.5, "acceptance_1": 1.0}
    assert evaluation_table({**now, **shares, "runtime": 3.0}, before).splitlines() == [
        "loss 1.5000 (-0.500), tau 2.500 (+0.250), expected tau 2.400, 81.3 tokens/s with the drafter",
        "  position       1   2",
        "  right, %      70  50",
        "  accepted, %  100",
    ]


def test_many_positions_stand_below_each_other():
    lines = evaluation_table({f"accuracy_{k}": 0.5 for k in range(1, 21)}).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["position", "right,", "position", "right,"]
    assert lines[2].split() == ["position", "17", "18", "19", "20"]
    assert max(map(len, lines)) < 80


def test_other_logs_are_no_line_of_training():
    assert training_line({"eval_loss": 1.0, "epoch": 1.0}) == ""
    assert training_line({"loss": 1.0, "grad_norm": 2.0, "learning_rate": 1e-4}) == "loss 1.0000, learning rate 0.0001"
