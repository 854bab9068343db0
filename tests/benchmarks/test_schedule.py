"""The schedule's benchmark: both stages, cases that pay and cases that don't, the bounds, and nothing measured twice."""

import json
import shlex
import time

import pytest
import torch

import schedule
from hf_pardraft.evaluation.calls import TimedRun
from hf_pardraft.evaluation.entries import plain_entry
from in_process import run_main
from result_files import public_command
from schedule_cases import Case, mislead, unwritten
from schedule_measure import AUTO, Bench, Way, grid, name_of
from schedule_report import misses_of, share_of_best
from tiny_models import tiny_drafter, tiny_target

FIXED = ("default", "chain 1", "chain 3", "tree 4 of depth 1", "tree 4 of depth 3")


def run_quickly(family, folder, *words: str) -> tuple[list[dict], str]:
    """What was measured on the tiny family, and what was printed."""
    cases = ["--cases", "family/DFlash", "family on other code/DFlash"]
    files = ["--family", str(family), "--work", str(folder / "work"), "--output", str(folder / "schedule.json")]
    done = run_main(schedule.main, "--quick", *cases, *files, "--temperatures", "1", "--batch-sizes", "1", *words)
    assert done.code == 0
    return json.loads((folder / "schedule.json").read_text())["conditions"], done.out


def test_both_stages_are_measured_once_and_the_bounds_are_printed(tiny_family, tmp_path, monkeypatch):
    (pays, loses), printed = run_quickly(tiny_family, tmp_path, "--plot")
    assert [pays["case"], loses["case"]] == ["family/DFlash", "family on other code/DFlash"]
    assert sorted(row["name"] for row in pays["sweep"]) == sorted(FIXED[1:])
    assert loses["sweep"] == []
    finalist = pays["sweep"][0]["name"]
    assert [row["name"] for row in pays["rows"]] == ["plain", "default", finalist, "auto", "auto, first call"]
    assert [row["name"] for row in loses["rows"]] == ["plain", "default", "auto", "auto, first call"]
    for row in pays["rows"] + loses["rows"]:
        # The seed decides the text, whoever drafts.
        assert row["same_text"]
        assert row["tokens_per_second"] > 0
        assert (sum(row["drafted"].values()) > 0) == (row["name"] != "plain")
    assert pays["rows"][0]["speedup"] == 1
    assert "in 2 conditions, and of the best fixed setting in 1" in printed
    assert str(tmp_path) not in pays["command"]
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
    with monkeypatch.context() as patched:
        patched.setattr(schedule, "Bench", lambda *arguments: pytest.fail("it was measured before"))
        assert run_quickly(tiny_family, tmp_path)[0] == [pays, loses]


def test_turns_are_those_of_the_sweep_that_is_there(tiny_family, tmp_path):
    work = ["--cases", "family/DFlash", "--family", str(tiny_family), "--work", str(tmp_path / "work")]
    refused = run_main(schedule.main, "--quick", *work, "--batch-sizes", "1", "--stages", "turns")
    assert "add sweep to --stages" in str(refused.code)
    (pays, _), _ = run_quickly(tiny_family, tmp_path)
    (kept,) = (tmp_path / "work").glob("family-DFlash-*.sweep.json")
    sweep = json.loads(kept.read_text())
    # As another sweep found it.
    kept.write_text(json.dumps({**sweep, "rows": sweep["rows"][::-1]}))
    (pays, _), _ = run_quickly(tiny_family, tmp_path)
    assert sweep["rows"][-1]["name"] in [row["name"] for row in pays["rows"]]


def test_a_turn_has_whole_batches_of_texts_or_one_that_is_larger():
    case = Case("any", None, None, [torch.tensor([[text]]) for text in range(6)], pays=True)
    texts = {size: [prompt.item() for prompt in case.prompts_for(size, 5)] for size in (1, 2, 4, 8)}
    assert texts == {1: [0, 1, 2, 3, 4], 2: [0, 1, 2, 3], 4: [0, 1, 2, 3], 8: [0, 1, 2, 3, 4, 5, 0, 1]}


def test_cases_that_nobody_knows_are_refused_and_others_are_named_whole(tmp_path):
    refused = run_main(schedule.main, "--cases", "nobody", "--work", str(tmp_path / "work"))
    assert "--cases expects any of family/PARD" in str(refused.code)
    assert "not nobody" in str(refused.code)
    words = ["--cases", "family/PARD", "stories/never right", "--work", str(tmp_path / "new" / "work")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["schedule.py", *words])
        patched.chdir(tmp_path)
        told = shlex.split(public_command())
    assert told == [
        "python",
        "benchmarks/schedule.py",
        "--cases",
        "family/PARD",
        "stories/never right",
        "--work",
        "work",
    ]


def test_by_a_modelled_clock_rounds_take_what_they_are_said_to(tiny_family, tmp_path):
    one, two, more, draft, tree, look = 10.0, 14.0, 1.0, 3.0, 2.0, 0.5
    words = ("--modelled-clock", *map(str, (one, two, more, draft, tree, look)), "--clock-noise", "0.1")
    (pays, _), _ = run_quickly(tiny_family, tmp_path / "first", *words)
    assert pays["machine"] == "a modelled clock"
    rows = {row["name"]: row for row in pays["sweep"]}
    plain = pays["rows"][0]
    assert plain["tokens_per_second"] == pytest.approx(1e3 / one)
    for name, nodes, besides in (("chain 1", 1, 0), ("tree 4 of depth 3", 4, tree)):
        drafted = rows[name]["drafted"]
        # The first round reads the prompt; of the last ones some have room for fewer.
        rounds = sum(drafted.values())
        seconds = 12 / rows[name]["tokens_per_second"]
        assert rounds * one < 1e3 * seconds <= rounds * (two + (nodes - 1) * more + draft + besides)
    # Nothing but the model and its noise has a part in it, the same each time.
    assert run_quickly(tiny_family, tmp_path / "second", *words)[0][0]["rows"] == pays["rows"]


def test_in_slices_all_ways_of_a_turn_are_measured_and_the_schedule_learns_from_turn_to_turn(
    tiny_family, tmp_path, monkeypatch
):
    # Put back at the end: the benchmark measures CPU time from here on.
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    (pays, loses), _ = run_quickly(tiny_family, tmp_path, "--cpu-clock", "--slices", "--turns", "2")
    assert [row["name"] for row in loses["rows"]] == ["plain", "default", "auto", "auto, first call"]
    for row in pays["rows"] + loses["rows"]:
        assert row["same_text"]
        assert row["speedup"] > 0
        assert (sum(row["drafted"].values()) > 0) == (row["name"] != "plain")
    assert pays["settings"]["slices"]


def test_the_schedule_learns_by_as_many_calls_as_are_asked_for_before_its_turns(tiny_family, tmp_path, monkeypatch):
    learning = []

    def turn(bench, ways, at_once=None):
        if [way.entry.name for way in ways] == [AUTO]:
            learning.append(len(bench.batches))
        measured(bench, ways, at_once)

    measured = Bench._turn
    monkeypatch.setattr(Bench, "_turn", turn)
    (_, loses), _ = run_quickly(tiny_family, tmp_path, "--learning-calls", "3")
    # A text each, of both cases; what is measured are later turns.
    assert learning == [1] * 6
    assert loses["settings"]["learning_calls"] == 3
    assert {row["turns"] for row in loses["rows"]} == {1}


def test_a_modelled_clock_is_for_uncompiled_rounds_of_one_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["schedule.py", "--modelled-clock", *"123456"])
    with pytest.raises(SystemExit):
        schedule.parse_arguments()
    assert "say --batch-sizes 1" in capsys.readouterr().err


def test_a_speed_is_the_median_of_the_ratios_of_what_ran_in_the_same_turn():
    def way(*turns: tuple[float, float]) -> Way:
        runs = [[TimedRun(((1, 2),), seconds, (1, 1)) for seconds in turn] for turn in turns]
        return Way(plain_entry(), runs)

    # The machine is ten times slower in the second turn, and once in the middle of the third.
    plain, other = way((1.0, 3.0), (10.0, 30.0), (1.0, 3.0)), way((0.5, 3.0), (5.0, 30.0), (5.0, 3.0))
    row = other.row(plain)
    assert row["first_speedup"] == 2
    # 1 + 3 seconds, for which the other takes 0.5 + 3.
    assert row["speedup"] == pytest.approx(4 / 3.5)
    assert plain.row(plain)["speedup"] == 1
    assert row["turn_speedups"] == pytest.approx([4 / 3.5, 40 / 35, 4 / 8])


def condition_of(auto: float, best: float, pays: bool) -> dict:
    rows = [("plain", 1.0, False), ("default", 0.8, True), ("chain 2", best, True), ("auto", auto, False)]
    return {
        "case": "target/drafter",
        "pays": pays,
        "temperature": 0.0,
        "batch_size": 4,
        "compiled": False,
        "rows": [
            {"name": name, "speedup": speedup, "turn_speedups": [speedup] * 3, "is_fixed": is_fixed}
            for name, speedup, is_fixed in rows
        ],
    }


@pytest.mark.parametrize(
    ("auto", "best", "pays", "missed"),
    [
        (0.96, 0.8, False, ["0.960 of plain generate"]),
        (0.98, 2.0, False, []),
        (1.90, 2.0, True, ["0.950 of the best fixed setting (chain 2)"]),
        (1.95, 2.0, True, []),
        (0.90, 1.0, True, ["0.900 of plain generate", "0.900 of the best fixed setting (chain 2)"]),
    ],
)
def test_what_misses_a_bound_is_named(auto, best, pays, missed):
    where = "target/drafter, temperature 0, batch 4: "
    assert misses_of(condition_of(auto, best, pays)) == [where + miss for miss in missed]


def test_the_best_fixed_setting_of_a_turn_is_that_of_the_other_turns():
    condition = condition_of(2.0, 2.0, True)
    _, default, chain, auto = condition["rows"]
    auto["turn_speedups"] = [2.0, 2.0, 2.0]
    # Each is lucky once, in a turn of its own. Of the turns besides the first, chain 2 is better; besides the others, default.
    default["turn_speedups"], chain["turn_speedups"] = [3.0, 2.0, 2.0], [2.0, 2.5, 2.5]
    assert share_of_best(condition) == 2.0 / 2.0
    default["turn_speedups"] = [3.0, 2.6, 2.5]
    # Besides the first turn default, with 2.55; besides the second and the third as well.
    assert share_of_best(condition) == pytest.approx(2.0 / 2.6)
    condition["rows"] = [{**row, "turn_speedups": row["turn_speedups"][:1]} for row in condition["rows"]]
    assert share_of_best(condition) == pytest.approx(2.0 / 3.0)


def test_the_sweep_is_every_chain_and_every_tree_with_more_nodes_than_levels_that_fits(parsed):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"), block_size=4)
    vars(parsed).update(depths=[1, 2, 8], tree_budgets=[2, 4, 16], most_slots=10)
    names = [name_of(setting) for setting in grid(drafter, 2, parsed)]
    # Depth 3 is the most that blocks of 4 give, and 17 slots for each of two items are too many.
    assert names == [
        "chain 1",
        "chain 2",
        "chain 3",
        *(f"tree {n} of depth {d}" for d in (1, 2, 3) for n in (2, 4) if n > d),
    ]


@pytest.fixture
def parsed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["schedule.py"])
    return schedule.parse_arguments()


@pytest.mark.parametrize("tree_budget", [0, 4])
def test_a_drafter_that_is_never_right_costs_what_it_costs_and_has_nothing_accepted(tree_budget):
    target = tiny_target("qwen3")
    drafter = tiny_drafter("pard", target)
    prompt = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
    text = target.generate(prompt, **options)
    calls, draft = [], drafter.draft
    drafter.draft = lambda *inputs: calls.append(0) or draft(*inputs)
    mislead(drafter, unwritten(text.tolist(), target.config.vocab_size, 8))
    settings = {"draft_schedule": "fixed", "tree_budget": tree_budget}
    vars(drafter.generation_config).update(settings)
    drafted = target.generate(prompt, assistant_model=drafter, num_assistant_tokens=3, **options)
    assert torch.equal(drafted, text)
    assert drafter.last_stats.tau == 1
    assert len(calls) == sum(number > 0 for number in drafter.last_stats.drafted_per_round) > 5


def test_a_text_with_every_token_leaves_nothing_to_be_wrong_about():
    assert unwritten([[0, 2], [4]], 6, 2).tolist() == [1, 3]
    with pytest.raises(ValueError, match="every token of the vocabulary"):
        unwritten([[0, 1]], 2, 4)
