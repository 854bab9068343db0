"""Options that no command can follow end it in one line that names them, and in no traceback."""

import json
import shutil

import pytest
import torch

from hostile_cases import DEEP, evaluate, generate, regenerate, train, written
from in_process import pardraft

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_work")


@pytest.mark.parametrize("name", ["float99", "load", "int8"])
@pytest.mark.parametrize(
    "command",
    [
        lambda name: generate("--dtype", name, "x"),
        lambda name: evaluate("--dtype", name),
        lambda name: regenerate("--dtype", name),
        lambda name: train("--target-dtype", name),
    ],
    ids=["generate", "eval", "regenerate", "train"],
)
def test_an_unknown_dtype_is_named(command, name):
    assert f"no dtype {name!r} for weights: expected auto, float32" in pardraft(*command(name)).error


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu", "disk", "cuda:-1"])
def test_a_device_that_is_not_there_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for command in (generate("x"), evaluate(), regenerate()):
        assert f"device {device!r}" in pardraft(*command, "--device", device).error


@pytest.mark.parametrize("temperature", ["1e-45", "inf", "-1", "nan", "1e-300"])
@pytest.mark.parametrize(
    "command",
    [
        lambda value: generate("--temperature", value, "x"),
        lambda value: generate("--drafter", "family/dflash", "--temperature", value, "x"),
        lambda value: evaluate("--temperature", value),
        lambda value: regenerate("--temperature", value),
        lambda value: train("--tau-prompts", 1, "--tau-temperature", value),
    ],
    ids=["generate", "drafted", "eval", "regenerate", "train"],
)
def test_a_temperature_that_no_logit_can_be_divided_by_is_refused(command, temperature):
    done = pardraft(*command(temperature))
    assert done.code in (1, 2)
    assert "temperature" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("temperature", ["1e-6", "1e6"])
def test_the_outermost_temperatures_work(temperature):
    assert pardraft(*generate("--drafter", "family/dflash", "--temperature", temperature, "def")).code == 0


@pytest.mark.parametrize(
    "command",
    [
        lambda name: evaluate(prompts=name),
        lambda name: ("card", "family/dflash", "--output", "card.md", "--results", name),
        lambda name: train("--drafter-config", DEEP),
        lambda name: regenerate("--chat-template-kwargs", DEEP),
        lambda name: evaluate("--setting", f"ngram_weight={DEEP}"),
        lambda name: evaluate("--chat-argument", f"a={DEEP}"),
        lambda name: ("train", "--recipe", name, *train()[1:]),
    ],
    ids=["prompts", "results", "drafter_config", "template", "setting", "chat", "recipe"],
)
def test_json_of_a_hundred_thousand_levels_is_refused_in_a_short_line(command):
    error = pardraft(*command(written("deep.json", DEEP))).error
    assert "bug" not in error
    assert len(error) < 500


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("--block-size", 1000000000), "block_size"),
        (("--drafter-config", '{"fusoin": "fc"}'), "no field fusoin in a DFlashConfig"),
        (("--drafter-config", '{"hidden_act": 5}'), "hidden_act"),
        (("--drafter-config", "[1]"), "JSON object"),
        (("--eval-size", 500), "eval_size is 500, and the data set has 20 examples"),
        (("--eval-size", 20), "eval_size is 20"),
        (("--lr-scheduler-kwargs", "abc"), "lr_scheduler_kwargs must be a mapping"),
        (("--lr-scheduler-kwargs", '{"a": 1}'), "takes no such lr_scheduler_kwargs"),
        (("--accelerator-config", '{"a": 1}'), "a setting has a value that it can't have"),
    ],
)
def test_what_a_run_can_not_have_is_told_before_it_begins(settings, told):
    assert told in pardraft(*train(*settings)).error


def test_a_run_says_that_it_holds_out_fewer_examples_than_it_was_asked_to(caplog):
    assert pardraft(*train("--eval-size", 5)).code == 0
    assert "held out 2 of 20 examples rather than 5" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_schedule", "yes"),
        ("draft_schedule", True),
        ("time_rounds", "no"),
        ("record_drafts", []),
        ("use_target_features", "yes"),
        ("tree_budget", 1.5),
        ("tree_budget", 10**9),
        ("tree_budget", True),
        ("tree_beam_width", 0),
        ("tree_top_k", "all"),
        ("ngram_first_level", -1),
        ("ngram_weight", float("inf")),
        ("ngram_weight", "much"),
        ("ngram_model", 5),
        ("decode_loop", ["native"]),
        ("verification", {}),
        ("tree_scoring", "best"),
        ("tree_end_rule", 1),
        ("ngram_smoothing", "none"),
        ("num_assistant_tokens", True),
        ("num_assistant_tokens", "3"),
    ],
)
def test_settings_of_the_wrong_type_are_refused_wherever_they_are_saved(name, value, tmp_path):
    shutil.copytree("family/dflash", tmp_path / "drafter")
    file = tmp_path / "drafter" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    told = pardraft(*generate("--drafter", tmp_path / "drafter", "def")).error
    assert name in told
    assert "bug" not in told


@pytest.mark.parametrize(
    "argument",
    [
        "eos_token_id=abc",
        "no_repeat_ngram_size=abc",
        "suppress_tokens=5",
        "watermarking_config=abc",
        "output_scores=true",
        "num_beams=2",
        "prompt_lookup_num_tokens=3",
    ],
)
def test_arguments_for_generate_are_checked(argument):
    assert "generate-argument" in pardraft(*evaluate("--generate-argument", argument)).error.replace(" ", "-")


@pytest.mark.parametrize("repo", ["a/b/c", "not ok!", "", "x" * 200, "a/../b"])
def test_a_dry_run_refuses_what_no_repository_can_be_called(repo):
    assert "no repository can be called" in pardraft("push", "family/dflash", repo, "--dry-run").error
