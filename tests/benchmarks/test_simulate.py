"""benchmarks/simulate.py takes the options of `pardraft eval`, writes what that writes, and says that it is a simulation."""

import json
import re
from functools import partial

import pytest

import simulate
from in_process import run_main

run = partial(run_main, simulate.main)
COMMON = ("--max-new-tokens", 4, "--repeats", 1)


def on_random_tokens(*more, target="nowhere"):
    return run("--target", target, "--random-weights", "--prompts", "random:9", "--limit", 1, *COMMON, *more)


def test_a_simulation_needs_no_trained_model(tiny_family, tmp_path):
    results = tmp_path / "results.json"
    done = on_random_tokens(
        *["--drafter", "new:dflash,num_layers=1,block_size=4", "second=new:dart,draft_length=3"],
        *["--max-new-tokens", 60, "--simulate-acceptance", "1.0", "0.5", "0", "0", "--json", results],
        target=tiny_family / "target",
    )
    assert done.code == 0, done.err
    assert "SIMULATED ACCEPTANCE" in done.out
    found = json.loads(results.read_text())
    assert found["simulated"] is True
    assert found["simulation"] == {"acceptance": "1 0.5 0 0", "runner_up": 0.0}
    assert found["command"].startswith("python benchmarks/simulate.py --target")
    assert [drafter["source"] for drafter in found["drafters"].values()] == ["untrained dflash", "untrained dart"]
    assert [row["name"] for row in found["rows"]] == ["plain", "new dflash", "second"]
    for row in found["rows"][1:]:
        assert row["identical"]
        assert row["acceptance_by_position"][0] == 1.0
        assert 0.2 < row["acceptance_by_position"][1] < 0.8
        assert row["acceptance_by_position"][2] == 0.0


def test_trained_drafters_and_transformers_own_loop_are_told_what_to_say(tiny_family, tmp_path):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    prompts.write_text('{"turns": ["def add(a, b):", "class Point:"]}\n')
    done = run(
        *["--target", tiny_family / "target", "--prompts", prompts, "--drafter", tiny_family / "dflash", *COMMON],
        *["--baselines", "stock_dflash", "--simulate-acceptance", "0.7", "--dtype", "float32", "--json", results],
    )
    assert done.code == 0, done.err
    found = json.loads(results.read_text())
    assert [row["name"] for row in found["rows"]] == ["plain", "dflash", "dflash, stock DFlash loop"]
    # A simulated target has nothing of its own to answer, so later turns are left out.
    assert found["prompts"]["count"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "new:eagle"], "no new drafter of the kind 'eagle'"),
        (["--drafter", "new:pard"], "like="),
        (["--drafter", "d", "--simulate-acceptance", "2"], "between 0 and 1"),
        (["--baselines", "prompt_lookup"], "leave them out"),
        (["--drafter", "new:dflash", "--dtype", "float99"], "no dtype 'float99'"),
    ],
)
def test_what_can_not_be_simulated_is_said_before_a_model_is_loaded(arguments, message):
    simulation = () if "--simulate-acceptance" in arguments else ("--simulate-acceptance", "0.5")
    assert message in on_random_tokens(*simulation, *arguments).error


def test_how_often_drafters_are_right_has_to_be_said(tiny_family):
    assert "pass --simulate-acceptance" in on_random_tokens("--drafter", "new:dflash").error
    one = ("--simulate-acceptance", "0.5", "0.4", "--drafter", tiny_family / "dflash")
    assert "2 positions, and 3 tokens are drafted" in on_random_tokens(*one, target=tiny_family / "target").error


@pytest.mark.parametrize(
    ("content", "message"), [(b"0.5 \xff", "is no UTF-8 text"), (b"[" * 100_000, "expected a number, got")]
)
def test_a_profile_that_can_not_be_read_is_refused_in_a_short_line(tmp_path, content, message):
    (tmp_path / "profile").write_bytes(content)
    error = on_random_tokens("--drafter", "new:dflash", "--simulate-acceptance", tmp_path / "profile").error
    assert message in error
    assert len(error) < 500


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("num_layers=abc", "num_layers .* whole number from 1 to 1024, got 'abc'"),
        ("block_size=1000000000", "block_size .* whole number from 1 to 4096, got 1000000000"),
        ("num_layers=1000000000", "num_layers of a fresh drafter"),
        ("block_size=true", "block_size .* got True"),
        ("depht=3", "no field depht in a DFlashConfig"),
        ("hidden_act=5", "hidden_act"),
        ("mask_token_id=abc", "mask_token_id .* got 'abc'"),
        ("target_layer_ids=abc", "target_layer_ids .* got 'abc'"),
    ],
)
def test_fields_of_a_new_drafter_are_checked(tiny_family, fields, told):
    words = ("--drafter", f"new:dflash,{fields}", "--simulate-acceptance", "0.5")
    assert re.search(told, on_random_tokens(*words, target=tiny_family / "target").error)
