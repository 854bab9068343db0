"""Tuning: what is measured is what happened, the fastest is written, and nothing is where something went wrong."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compiled_cases import compile_slowly
from hf_pardraft import AutoDrafter
from hf_pardraft.evaluation.measurement import Condition, Run, Watched
from hf_pardraft.evaluation.report import Report
from hf_pardraft.evaluation.rows import Difference
from hf_pardraft.evaluation.tuning import drafter as drafter_tuning
from hf_pardraft.evaluation.tuning import search
from hf_pardraft.evaluation.tuning.cost_model import Draft, Measurements, RoundCosts, TextAcceptance
from hf_pardraft.evaluation.tuning.probing import (
    measure_acceptance,
    measure_costs,
    plain_costs,
    summarise_probe,
    texts_accepted,
)
from hf_pardraft.evaluation.tuning.search import own_default, plan_search, problems_in, table_of
from hf_pardraft.generation.stats import Proposal
from in_process import pardraft
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

PROMPTS = [random_prompt(5, seed=seed) for seed in range(3)]


def proposal(item, num_accepted, num_committed, depth=3):
    return Proposal(item, 0, (1,) * depth, tuple(range(1, depth + 1)), num_accepted, num_committed)


def test_what_a_text_accepted_is_counted_by_position():
    # The first text's prompt took a round without a draft; the second one's text ended inside the accepted tokens.
    proposals = (proposal(0, 3, 4), proposal(1, 2, 2), proposal(0, 0, 1), proposal(0, 1, 2))
    watched = Watched(((5,) * 8, (5,) * 3), 4, (), proposals)
    assert texts_accepted(watched, 3) == [TextAcceptance(8, 4, (2, 1, 1)), TextAcceptance(3, 2, (1, 1, 0))]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft", [Draft(3), Draft(4, 9)])
def test_every_round_of_every_text_is_counted(batch, draft):
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    options = {"max_new_tokens": 20, "do_sample": False}
    texts = [target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0] for prompt in PROMPTS]
    condition = Condition(batch_size=batch, max_new_tokens=20)
    # One item's oracle for all would not do, so only whole batches get one.
    if batch == 3:
        make_oracle(drafter, texts, [0.9, 0.7, 0.5, 0.5])
    found = measure_acceptance(target, drafter, [draft], PROMPTS, condition)[draft]
    assert [text.num_tokens for text in found] == [20] * 3
    for text in found:
        # Each round commits the bonus token and what it accepted; only the last may be cut before its bonus token.
        assert text.num_rounds + sum(text.reached) - text.num_tokens in (0, 1)
        assert list(text.reached) == sorted(text.reached, reverse=True)
    if batch == 3:
        assert sum(sum(text.reached) for text in found) > 10


def stats_of(rounds, drafted=4):
    """Statistics of rounds given as `(items, seconds of each part)`."""
    return SimpleNamespace(
        rounds=len(rounds),
        rows_per_round=[items for items, _ in rounds],
        drafted_per_round=[
            0 if not index else drafted for index, (items, _) in enumerate(rounds) for _ in range(items)
        ],
        seconds_per_round={part: [seconds for _, seconds in rounds] for part in ("draft", "tree", "verify", "commit")},
        seconds={part: sum(seconds for _, seconds in rounds) for part in ("draft", "tree", "verify", "commit")},
    )


def test_a_probe_takes_the_median_of_whole_rounds():
    rounds = [(2, 9.0), (2, 1.0), (2, 7.0), (2, 2.0), (1, 0.1)]
    total = 4 * sum(seconds for _, seconds in rounds)
    probe = summarise_probe(Draft(4), 2, [(total + 10.0, stats_of(rounds))])
    assert probe.parts == dict.fromkeys(("draft", "tree", "verify", "commit"), 2.0)
    assert probe.prompt == 36.0
    assert probe.outside == pytest.approx(2.0)
    with pytest.raises(ValueError, match="drafts 5 tokens for 2 texts could be timed"):
        summarise_probe(Draft(5), 2, [(total, stats_of(rounds))])


def test_compiling_is_no_part_of_what_rounds_cost(monkeypatch):
    """Rounds that are timed part by part are compiled in other pieces than those that are timed as a whole."""
    monkeypatch.setattr(torch, "compile", compile_slowly)
    target = tiny_target()
    condition = Condition(1, max_new_tokens=30, repeats=1, generate_arguments={"cache_implementation": "static"})
    costs = measure_costs(target, tiny_drafter("dflash", target), [Draft(4)], PROMPTS[:1], condition)
    # Seconds a round. There are 30 or so, and a compilation of one would be 0.5 / 30 of each.
    assert abs(costs.fixed) < 0.01
    assert costs.verify_chain[5] < 0.1


def test_a_step_of_plain_generate_is_what_more_tokens_cost():
    runs = [(Run(((1,),), 1.0), Run(((1,) * 11,), 6.0)), (Run(((1,),), 3.0), Run(((1,) * 11,), 8.0))]
    assert plain_costs(runs) == (0.5, 2.0)
    with pytest.raises(ValueError, match="after one token"):
        plain_costs([(Run(((1,),), 1.0), Run(((1,),), 1.0))])


def test_what_is_tried_by_default():
    target = tiny_target()
    block = plan_search(tiny_drafter("dflash", target, depth=6), [], [])
    assert block.default == Draft(6)
    assert block.chains == [Draft(depth) for depth in range(1, 7)]
    assert block.trees == [Draft(6, budget) for budget in search.TREE_BUDGETS]
    assert block.probes == sorted([Draft(1), Draft(2), Draft(4), Draft(6), *block.trees])
    pard = tiny_drafter("pard", target, depth=5)
    pard.generation_config.tree_budget = 9
    found = plan_search(pard, [2, 7], [0, 3])
    assert (found.default, found.deepest_chain) == (Draft(5, 9), Draft(7))
    assert found.chains == [Draft(2), Draft(7)]
    assert found.trees == [Draft(2, 3), Draft(7, 3)]
    assert set(found.probes) == {Draft(2), Draft(5), Draft(7), Draft(2, 3), Draft(7, 3), Draft(5, 9)}
    assert plan_search(pard, [], [], takes_trees=False).trees == []
    assert plan_search(pard, [], [4]).chains == []


COSTS = RoundCosts(
    draft={4: 1.0},
    tree={0: {4: 0.0}},
    verify_chain={5: 3.0},
    verify_tree={},
    fixed=0.5,
    prompt=2.0,
    plain_step=2.5,
    plain_prompt=2.0,
)


@pytest.mark.parametrize(("speeds", "written"), [((1, 2, 3), "tuned"), ((1, 3, 2), "default"), ((3, 2, 1), "plain")])
def test_the_measured_fastest_is_written(speeds, written):
    names = ("plain", "default", "tuned")
    rows = {name: SimpleNamespace(tokens_per_second=speed, tau=1.0) for name, speed in zip(names, speeds, strict=True)}
    measurements = Measurements({1: COSTS}, [TextAcceptance(30, 10, (10, 5, 3, 2))])
    choice = search.choice_of(measurements, 1, Draft(4), Draft(2), rows)
    assert choice.written == written
    assert choice.measured == dict(zip(names, speeds, strict=True))
    assert choice.predicted["default"] == pytest.approx(30 / (2.0 + 9 * 4.5))
    drafts = {"plain": {"num_assistant_tokens": 0}, "default": {"num_assistant_tokens": 4}}
    expected = {"tree_budget": 0, **drafts.get(written, {"num_assistant_tokens": 2})}
    assert table_of(SimpleNamespace(choices=[choice])) == {"1": expected}


def test_rows_that_are_missing_or_wrong_are_problems():
    no_tie, tie, unjudged = (Difference(0, 3, 7, 8, near_tie=near_tie) for near_tie in (False, True, None))
    ended = Difference(0, 3, None, 8)
    report = Report({}, skipped=[{"name": "tuned", "batch_size": 4, "temperature": 0, "reason": "out of memory"}])
    report.rows += [
        SimpleNamespace(name="plain", batch_size=1, differences=[]),
        SimpleNamespace(name="default", batch_size=1, differences=[tie, unjudged]),
        SimpleNamespace(name="tuned", batch_size=2, differences=[tie, no_tie]),
        SimpleNamespace(name="default", batch_size=2, differences=[ended]),
    ]
    # In bfloat16 texts may part anywhere.
    assert len(problems_in(report, is_exact=False)) == 1
    problems = problems_in(report, is_exact=True)
    assert len(problems) == 3
    assert "batches of 4 (out of memory)" in problems[0]
    assert "tuned wrote other texts than plain generate in batches of 2" in problems[1]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def add(a, b):\nclass Point:\nimport json\n")
    return file


@pytest.fixture
def drafter(tiny_family, tmp_path):
    """A copy that may be written to."""
    folder = tmp_path / "drafter"
    AutoDrafter.from_pretrained(tiny_family / "dflash").save_pretrained(folder)
    return folder


def arguments(tiny_family, drafter, prompts, *more):
    target = ["--target", tiny_family / "target", "--dtype", "float32", "--max-new-tokens", 12, "--repeats", 1]
    return ["eval", "--tune", *target, "--drafter", drafter, "--prompts", prompts, *more]


def test_a_drafter_is_tuned_and_generate_does_as_it_was_told(tiny_family, drafter, prompts, tmp_path):
    results, plots = tmp_path / "results.json", tmp_path / "plots"
    pytest.importorskip("matplotlib")
    before = {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()}
    done = pardraft(
        *arguments(tiny_family, drafter, prompts, "--batch-size", 1, 3, "--tree-budget", 0, 4),
        *["--json", results, "--plots", plots],
    )
    assert done.code == 0, done.err
    assert all(heading in done.out for heading in ("predicted tok/s", "measured tok/s", "Accepted by depth"))
    assert done.out.count("Batch ") == 2
    found = json.loads(results.read_text())
    assert [(row["name"], row["batch_size"]) for row in found["rows"]] == [
        (name, size) for size in (1, 3) for name in ("plain", "default", "tuned")
    ]
    assert all(row["identical"] for row in found["rows"])
    facts = found["tuning"]
    assert [costs["batch_size"] for costs in facts["costs"]] == [1, 3]
    assert set(facts["costs"][0]["verify_chain"]) == {"2", "3", "4"}
    assert set(facts["costs"][0]["verify_tree"]) == {"5"}
    assert facts["problems"] == []
    assert (plots / "speedup_by_batch_size.png").exists()
    # Only the generation config is another file, and nothing is left beside it.
    after = {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()}
    assert {name for name in after if after[name] != before.get(name)} == {"generation_config.json"}
    assert before.keys() == after.keys()
    saved = json.loads(after["generation_config.json"])["tuned_drafting"]
    assert saved["measured_on"]["device_type"] == "cpu"
    assert saved["measured_on"]["target"] == "target"
    assert str(tmp_path) not in json.dumps(saved)
    for choice in facts["choices"]:
        fastest = max(choice["measured"], key=choice["measured"].get)
        assert choice["measured"][choice["written"]] == choice["measured"][fastest]
        entry = saved["by_batch_size"][str(choice["batch_size"])]
        assert (entry["num_assistant_tokens"], entry["tree_budget"]) == tuple(choice["draft"].values())
    check_generate(tiny_family / "target", drafter, saved["by_batch_size"])


def check_generate(target_folder, folder, table):
    """The reloaded drafter drafts what the table says, and the text is plain's."""
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    drafter = AutoDrafter.from_pretrained(folder, dtype=torch.float32)
    for size, entry in table.items():
        ids = tokenizer(["def add(a, b):"] * int(size), return_tensors="pt").to(target.device)
        plain = target.generate(**ids, max_new_tokens=10, do_sample=False)
        text = target.generate(**ids, max_new_tokens=10, do_sample=False, assistant_model=drafter)
        assert torch.equal(plain, text)
        most = max(drafter.last_stats.drafted_per_round)
        assert most == (entry["tree_budget"] or entry["num_assistant_tokens"])


def test_a_copy_is_written_where_the_drafter_must_not_be_touched(tiny_family, prompts, tmp_path):
    source = tiny_family / "pard"
    before = (source / "generation_config.json").read_bytes()
    done = pardraft(
        *arguments(tiny_family, source, prompts, "--depth", 2, "--tree-budget", 0),
        *["--output", tmp_path / "tuned", "--temperature", 1.0, "--generate-argument", "use_cache=true"],
    )
    assert done.code == 0, done.err
    assert (source / "generation_config.json").read_bytes() == before
    drafter = AutoDrafter.from_pretrained(tmp_path / "tuned")
    tuned = drafter.generation_config.tuned_drafting
    assert tuned["by_batch_size"].keys() == {"1"}
    assert tuned["measured_on"]["temperature"] == 1.0
    assert tuned["measured_on"]["generate_arguments"] == {"use_cache": True}


def test_compiled_rounds_get_a_table_of_their_own(tiny_family, drafter, prompts, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    once = arguments(tiny_family, drafter, prompts, "--depth", 2, "--tree-budget", 0)
    place = drafter / "generation_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "tuned_drafting": {"by_batch_size": {"one": 1}}}))
    assert "can't be read" in pardraft(*once).err
    first = json.loads(place.read_text())["tuned_drafting"]
    done = pardraft(*once, "--generate-argument", "cache_implementation=static")
    assert done.code == 0, done.err
    both = json.loads(place.read_text())["tuned_drafting"]
    assert {name: value for name, value in both.items() if name != "compiled"} == first
    assert both["compiled"]["by_batch_size"].keys() == {"1"}
    assert both["compiled"]["measured_on"]["generate_arguments"] == {"cache_implementation": "static"}


def test_nothing_is_written_when_a_text_is_wrong(tiny_family, drafter, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "problems_in", lambda *rest: ["tuned wrote other texts"])
    before = (drafter / "generation_config.json").read_bytes()
    results = tmp_path / "results.json"
    done = pardraft(*arguments(tiny_family, drafter, prompts, "--depth", 2, "--tree-budget", 0), "--json", results)
    assert "tuned wrote other texts: nothing was written into the drafter" in done.error
    assert (drafter / "generation_config.json").read_bytes() == before
    assert json.loads(results.read_text())["tuning"]["problems"]


def test_a_full_disk_leaves_the_drafter_as_it_was(tiny_family, drafter, monkeypatch):
    def fail(*rest, **more):
        raise OSError(28, "No space left on device")

    loaded = AutoDrafter.from_pretrained(drafter)
    before = sorted(path.name for path in drafter.iterdir()), (drafter / "generation_config.json").read_bytes()
    monkeypatch.setattr(type(loaded.generation_config), "save_pretrained", fail)
    with pytest.raises(OSError, match="No space"):
        drafter_tuning.write_tuning(loaded, {"by_batch_size": {"1": {"num_assistant_tokens": 1}}}, drafter, None)
    assert (
        sorted(path.name for path in drafter.iterdir()),
        (drafter / "generation_config.json").read_bytes(),
    ) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--drafter", "other/drafter"], "pass one --drafter"),
        (["--baselines", "prompt_lookup"], "no --baselines"),
        (["--simulate-acceptance", 0.5], "benchmarks/simulate.py"),
        (["--random-weights"], "no acceptance to measure"),
        (["--compiled"], "instead of --compiled"),
        (["--temperature", 0, 1], "pass one --temperature"),
        (["--setting", "ngram_weight=0.5"], "no --setting"),
        (["--output", "."], "is not empty"),
        (["--generate-argument", "cache=static"], "no generate argument cache"),
        (["--generate-argument", "max_new_tokens=3"], "no generate argument max_new_tokens"),
        (["--generate-argument", "static"], "expected name=value"),
    ],
)
def test_what_can_not_be_tuned_is_refused_before_a_model_is_loaded(tiny_family, prompts, more, message, monkeypatch):
    monkeypatch.setattr(drafter_tuning, "prepare", lambda *rest: pytest.fail("models were loaded"))
    done = pardraft(*arguments(tiny_family, tiny_family / "dflash", prompts, *more))
    assert message in done.error


def test_a_drafter_of_the_hub_needs_a_place_for_its_copy(tiny_family, prompts, monkeypatch):
    monkeypatch.setattr(drafter_tuning, "prepare", lambda *rest: pytest.fail("models were loaded"))
    done = pardraft(*arguments(tiny_family, "someone/drafter", prompts))
    assert "pass --output FOLDER" in done.error
    alone = pardraft(*arguments(tiny_family, "someone/drafter", prompts, "--output", "tuned")[:1], *COMMON)
    assert "--output is where --tune saves" in alone.error


COMMON = ("--target", "t", "--drafter", "d", "--prompts", "random", "--output", "tuned")


def test_a_drafter_that_drafts_otherwise_is_refused(tiny_family, drafter, prompts):
    config = json.loads((drafter / "generation_config.json").read_text())
    (drafter / "generation_config.json").write_text(json.dumps({**config, "verification": "rejection"}))
    done = pardraft(*arguments(tiny_family, drafter, prompts))
    assert "verification='rejection', and only 'match' drafts as tuned" in done.error


def test_what_was_tuned_before_is_no_default():
    drafter = tiny_drafter("dflash", tiny_target())
    drafter.generation_config.tuned_drafting = {"by_batch_size": {"1": {"num_assistant_tokens": 1}}}
    assert own_default(drafter) == Draft(4)
