"""`pardraft eval` as a user types it."""

import json

import pytest
from transformers import AutoTokenizer

from hf_pardraft.evaluation import calls, workbench
from hf_pardraft.evaluation.plan import read_drafters
from in_process import pardraft as invoke


@pytest.fixture
def prompts(tmp_path):
    """Two prompts: the second turn follows the target's answer."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["def add(a, b):", "class Point:"]}\n')
    return file


def test_everything_side_by_side(tiny_family, prompts, tmp_path):
    pytest.importorskip("matplotlib")
    results, text, plots = tmp_path / "out" / "results.json", tmp_path / "results.md", tmp_path / "plots"
    done = invoke(
        *["eval", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 5, "--repeats", 1],
        *["--drafter", tiny_family / "pard", f"block={tiny_family / 'dflash'}", "--prompts", prompts, "--depth", 3],
        *["--tree-budget", 0, 4, "--batch-size", 1, 2, "--temperature", 0, 1.0],
        *["--baselines", f"assisted={tiny_family / 'target'}", "prompt_lookup", "stock_dflash"],
        *["--json", results, "--markdown", text, "--plots", plots],
    )
    assert done.code == 0, done.err
    found = json.loads(results.read_text())
    assert (found["target"], found["simulated"], found["dtype"]) == ("target", False, "float32")
    assert {"machine", "command", "date", "versions"} <= set(found)
    assert (found["prompts"]["count"], found["prompts"]["left_out"]) == (2, 0)
    assert (found["drafters"]["block"]["kind"], found["drafters"]["block"]["depth"]) == ("dflash", 3)
    ours = ["pard, chain", "pard, tree 4", "block, chain", "block, tree 4"]
    alone = ["assisted, target", "prompt lookup", "block, stock DFlash loop"]
    names = {(size, t): [] for t in (0, 1) for size in (1, 2)}
    for row in found["rows"]:
        names[row["batch_size"], row["temperature"]].append(row["name"])
    assert names[1, 0] == names[1, 1] == ["plain", *ours, *alone]
    assert names[2, 0] == names[2, 1] == ["plain", *ours]
    assert {(entry["name"], entry["batch_size"]) for entry in found["skipped"]} == {(name, 2) for name in alone}
    greedy = [row for row in found["rows"] if row["temperature"] == 0]
    assert all(row["identical"] for row in greedy)
    # The tiny PARD drafter is its target, so each of its first guesses is right.
    assert greedy[1]["acceptance_by_position"][0] == 1.0
    assert all(sum(row["shares"].values()) == pytest.approx(1) for row in found["rows"] if row["name"] in ours)
    assert "| pard, tree 4 |" in text.read_text()
    assert len(list(plots.iterdir())) == 3


def test_results_of_before_are_there_until_there_are_new_ones(tiny_family, prompts, tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    results.write_text("earlier")

    def broken_off(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_pardraft.evaluation.runner.measure", broken_off)
    pair = ["--target", tiny_family / "target", "--drafter", tiny_family / "pard", "--prompts", prompts]
    assert invoke("eval", *pair, "--max-new-tokens", 5, "--json", results).code == 130
    assert results.read_text() == "earlier"


def test_two_results_do_not_share_a_file(tmp_path):
    same = ["--json", tmp_path / "out.json", "--markdown", tmp_path / "folder" / ".." / "out.json"]
    assert "expected two files" in invoke("eval", "--target", "x", "--drafter", "y", "--prompts", "random", *same).error


def test_compiled_rounds_are_measured_beside_eager_ones_at_every_batch_size(
    tiny_family, prompts, tmp_path, monkeypatch
):
    asked = []
    real = calls.call

    def noting(target, entry, batch, config, **more):
        asked.append((entry.name, config.cache_implementation))
        if config.cache_implementation is not None:
            # transformers would leave plain generate on a CPU uncompiled.
            assert config.compile_config._compile_all_devices
        config.disable_compile = True
        return real(target, entry, batch, config, **more)

    monkeypatch.setattr(calls, "call", noting)
    results = tmp_path / "results.json"
    done = invoke(
        *["eval", "--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 4, "--repeats", 1],
        *["--drafter", tiny_family / "dflash", "--prompts", prompts, "--batch-size", 1, 2, "--compiled"],
        *["--baselines", "prompt_lookup", "--generate-argument", "repetition_penalty=1.1", "--json", results],
    )
    assert done.code == 0, done.err
    found = json.loads(results.read_text())
    names = ["plain", "plain, compiled", "dflash", "dflash, compiled"]
    assert [row["name"] for row in found["rows"]] == [*names, "prompt lookup", *names]
    assert all(row["identical"] for row in found["rows"])
    assert found["generate_arguments"] == {"repetition_penalty": 1.1}
    assert set(asked) == {(name, "static" if "compiled" in name else None) for name in [*names, "prompt lookup"]}


def test_a_chat_template_may_come_as_its_own_argument(tiny_family, prompts, tmp_path):
    results = tmp_path / "results.json"
    done = invoke(
        *["eval", "--target", tiny_family / "target", "--drafter", tiny_family / "dflash", "--prompts", prompts],
        *["--max-new-tokens", 2, "--repeats", 1, "--json", results],
        *["--chat-argument", "chat_template={% for m in messages %}{{ m.content }}!{% endfor %}"],
    )
    assert done.code == 0, done.err
    assert json.loads(results.read_text())["prompts"]["chat_template"] is True


@pytest.mark.parametrize("words", [["--setting", "{}", "--setting", "{}"], ["--setting", "{}", "{}"]])
def test_all_values_of_a_setting_are_tried_however_they_are_typed(words, tiny_family, prompts, tmp_path):
    results, pairs = tmp_path / "results.json", iter(["draft_schedule=fixed", "draft_schedule=auto"])
    words = [next(pairs) if word == "{}" else word for word in words]
    done = invoke(
        *["eval", "--target", tiny_family / "target", "--drafter", tiny_family / "dflash", "--prompts", prompts],
        *["--max-new-tokens", 2, "--repeats", 1, "--json", results, *words],
    )
    assert done.code == 0, done.err
    names = [row["name"] for row in json.loads(results.read_text())["rows"]]
    assert names == ["plain", "dflash, draft_schedule fixed", "dflash, draft_schedule auto"]


def test_several_values_may_follow_an_option():
    arguments = ["--prompts", "random", "--drafter", "d", "--batch-size=1", "2", "--temperature", "0", "-1"]
    assert "temperatures must be 0 or more, got 0.0, -1.0" in invoke("eval", *COMMON, *arguments).error
    stray = invoke("eval", *COMMON, "--prompts", "random", "more", "--drafter", "d")
    assert stray.code == 2
    text = invoke("eval", "--help").out
    assert all(name in text for name in ("--tree-budget", "livecodebench", "--plots"))
    assert "simulate" not in text


COMMON = ("--target", "nowhere", "--max-new-tokens", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "random"], "nothing to compare"),
        (["--prompts", "humanevil", "--drafter", "d"], "no prompts 'humanevil'"),
        (["--prompts", "random:x", "--drafter", "d"], "expected random:LENGTH"),
        (["--prompts", "random", "--drafter", "new:dflash,num_layers=2"], "run the project's benchmarks/simulate.py"),
        (["--prompts", "random", "--drafter", "x=new:dflash"], "run the project's benchmarks/simulate.py"),
        (["--prompts", "random", "--drafter", "d", "--simulate-acceptance", "0.5", "0.4"], "benchmarks/simulate.py"),
        (["--prompts", "random", "--drafter", "d", "--simulate-runner-up", "0.5"], "benchmarks/simulate.py"),
        (["--prompts", "random", "--drafter", "a/d", "b/d"], "two drafters are called 'd'"),
        (["--prompts", "random", "--drafter", "plain=a/d"], "plain is what plain generate is called"),
        (["--prompts", "random", "--baselines", "beam"], "no baseline 'beam'"),
        (["--prompts", "random", "--drafter", "d", "--setting", "depth=3"], "no setting 'depth=3'"),
        (["--prompts", "random", "--drafter", "d", "--tree-budget", "4", "--setting", "tree_budget=3"], "given twice"),
        (["--prompts", "random", "--drafter", "d", "--batch-size", "0"], "batch sizes must be 1 or more"),
        (["--prompts", "random", "--drafter", "d", "--temperature", "-1"], "temperatures must be 0 or more"),
        (["--prompts", "random", "--drafter", "d", "--chat-argument", "thinking"], "expected name=value"),
        (["--prompts", "random", "--drafter", "d", "--json", "."], "is a folder"),
        (["--prompts", "random", "--drafter", "d", "--dtype", "float31"], "no dtype 'float31'"),
        (["--prompts", "random", "--drafter", "d"], "can't load 'nowhere'"),
    ],
)
def test_what_can_not_be_done_is_said_before_a_model_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(workbench, "load_fitting_drafter", lambda *rest: pytest.fail("a drafter was loaded"))
    monkeypatch.setattr(workbench, "load_target", lambda *rest, **more: pytest.fail("the target was loaded"))
    done = invoke("eval", *COMMON, *arguments)
    assert message in done.error


def test_plots_without_matplotlib_are_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke("eval", *COMMON, "--prompts", "random", "--drafter", "d", "--plots", "plots")
    assert "plots need matplotlib" in done.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depth", 9], "must be between 1 and 3"),
        (["--setting", "verification=maybe"], "verification must be one of"),
        (["--chat-argument", "thinking=true"], "has no chat template"),
        (["--max-new-tokens", 256], "at most 255"),
    ],
)
def test_what_a_drafter_can_not_do_is_said_before_the_target_is_loaded(
    tiny_family, prompts, arguments, message, monkeypatch
):
    monkeypatch.setattr(workbench, "load_target", lambda *rest, **more: pytest.fail("the target was loaded"))
    done = invoke(
        *["eval", "--target", tiny_family / "target", "--drafter", tiny_family / "dflash", "--prompts", prompts],
        *["--max-new-tokens", 8, *arguments],
    )
    assert message in done.error


def test_a_drafter_for_another_vocabulary_is_refused(tiny_family, prompts, tmp_path, monkeypatch):
    config = json.loads((tiny_family / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 999}))
    AutoTokenizer.from_pretrained(tiny_family / "target").save_pretrained(tmp_path)
    monkeypatch.setattr(workbench, "load_target", lambda *rest, **more: pytest.fail("the target was loaded"))
    arguments = ["--target", tmp_path, "--drafter", tiny_family / "pard", "--prompts", prompts, "--max-new-tokens", 8]
    done = invoke("eval", *arguments)
    assert "300 tokens and the target 999" in done.error


def test_drafters_as_they_are_typed(tmp_path):
    found = read_drafters(["someone/Qwen-DFlash", f"mine={tmp_path}"])
    assert list(found) == ["Qwen-DFlash", "mine"]
    assert found["mine"].public_source == tmp_path.name
