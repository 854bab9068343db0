"""Model cards: metadata that the Hub reads, an example that runs, figures that were measured, and people's words left alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter, PardDrafter
from hf_pardraft.checkpoints.published import KIND_NAMES
from hf_pardraft.evaluation.entries import plain_entry
from hf_pardraft.hub.cards import TEMPLATES, card_gaps, has_measured_numbers
from hf_pardraft.hub.results import PLAIN, read_results
from in_process import pardraft
from tiny_models import tiny_drafter

ROOT = Path(__file__).parents[2]
DEMO_RESULTS = ROOT / "benchmarks" / "results" / "demo_family.json"
DEMO_CARDS = sorted((ROOT / "model_cards" / "demo").glob("*.md"))
KINDS = tuple(KIND_NAMES)
RESULTS = {
    "rows": [
        {"name": "plain", "tokens_per_second": 20.0, "speedup": 1.0, "tau": 1.0, "rounds": 7},
        {"name": "drafter", "tokens_per_second": 50.0, "speedup": 2.5, "tau": 3.25, "identical": True},
        {"name": "drafter, tree 16", "tokens_per_second": 60.0, "speedup": 3.0, "tau": 4.5},
        {"name": "another", "tokens_per_second": 99.0, "speedup": 9.0, "tau": 9.0},
    ],
    "machine": "one H200",
    "command": "pardraft eval --target someone/target --drafter someone/drafter",
    "date": "2026-11-21",
    "prompts": "humaneval",
    "unheard_of": {"nested": True},
}


def run_examples(card: ModelCard) -> list[dict]:
    """Run every Python block of a card, as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    names = []
    for block in blocks:
        names.append({})
        exec(compile(block, "card", "exec"), names[-1])
    return names


def write_results(folder: Path, **changes) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({**RESULTS, **changes}))
    return path


@pytest.fixture
def hub(tiny_family, tmp_path, monkeypatch):
    """A working directory in which the names of repositories are folders: `someone/target`, and the drafters to come."""
    shutil.copytree(tiny_family / "target", tmp_path / "someone" / "target")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "someone"


def save_drafter(kind: str, hub: Path, chat: dict | None = None) -> Path:
    target = AutoModelForCausalLM.from_pretrained("someone/target")
    tokenizer = AutoTokenizer.from_pretrained("someone/target")
    if kind == "pard":
        drafter = PardDrafter.from_causal_lm(target, tokenizer=tokenizer)
        drafter.generation_config.num_assistant_tokens = 4
    else:
        drafter = tiny_drafter(kind, target)
    if chat is not None:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %}short{% endif %}"
        tokenizer.save_pretrained(hub / "target")
    drafter.note_target(target, tokenizer, chat)
    drafter.config.target_name_or_path = "someone/target"
    drafter.save_pretrained(hub / "drafter")
    return hub / "drafter"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_card_has_metadata_and_an_example_that_runs(hub, kind, capsys):
    folder = save_drafter(kind, hub)
    assert pardraft("card", folder, "--fresh", "--repo", "someone/drafter").code == 0
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (
        "someone/target",
        "transformers",
        "text-generation",
    )
    assert {"speculative-decoding", kind} <= set(data.tags)
    (names,) = run_examples(card)
    assert names["drafter"].last_stats.rounds > 0
    assert "tokens per forward of the target" in capsys.readouterr().out
    assert "```bibtex\n@misc{" in card.text
    assert not re.search(r"\{\{|\{%|TARGET", card.text)
    # What nobody said is a gap, and measured numbers come first.
    gaps = card_gaps(card)
    assert [gap.split(":")[0] for gap in gaps] == [
        "no measured numbers",
        "no licence",
        "no data sets",
        "no training recipe",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_writes_a_card_and_leaves_the_one_that_is_there(hub, kind):
    folder = save_drafter(kind, hub)
    assert ModelCard.load(folder / "README.md").data.base_model == "someone/target"
    (folder / "README.md").write_text("mine")
    save_drafter(kind, hub)
    assert (folder / "README.md").read_text() == "mine"


def test_the_example_of_a_chat_drafter_prompts_as_in_training(hub, capsys):
    folder = save_drafter("dflash", hub, chat={"brief": True})
    pardraft("card", folder, "--fresh", "--repo", "someone/drafter")
    card = ModelCard.load(folder / "README.md")
    assert "brief=True" in card.text
    (names,) = run_examples(card)
    assert names["tokenizer"].decode(names["inputs"]["input_ids"][0]).endswith("short")


def test_results_go_into_the_card_and_nothing_else_changes(hub):
    folder = save_drafter("dflash", hub)
    path = folder / "README.md"
    before = path.read_text().replace("# drafter\n", "# My drafter\n\nOur own words.\n")
    path.write_text(before)
    results = write_results(hub)
    assert pardraft("card", folder, "--results", results).code == 0
    card = ModelCard.load(path)
    assert "Our own words." in card.text
    assert "| drafter, tree 16 | 60.0 | 3.00x | 4.50 |" in card.text
    assert "| another" not in card.text
    assert all(RESULTS[fact] in card.text for fact in ("machine", "command", "date", "prompts"))
    figures = {(r.metric_type, r.metric_name): r.metric_value for r in card.data.eval_results}
    assert figures[("acceptance_length", "tau (drafter)")] == 3.25
    assert figures[("speedup", "speedup (drafter, tree 16)")] == 3.0
    assert has_measured_numbers(card)
    outside = re.compile(r"<!-- measured:begin -->.*<!-- measured:end -->", flags=re.DOTALL)
    assert outside.sub("", card.text).strip() == outside.sub("", ModelCard(before).text).strip()
    once = path.read_text()
    assert pardraft("card", folder, "--results", results).code == 0
    assert path.read_text() == once


def test_everything_that_a_card_lacks_can_be_said(hub):
    folder = save_drafter("dart", hub)
    recipe = hub / "recipe.md"
    recipe.write_text("On its target's answers.")
    said = ["--license", "mit", "--dataset", "someone/questions", "--language", "en", "--recipe", recipe]
    said += ["--repo", "someone/drafter"]
    done = pardraft("card", folder, "--results", write_results(hub), *said)
    assert done.code == 0
    assert "gap" not in done.out
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.datasets, card.data.language) == ("mit", ["someone/questions"], ["en"])
    assert "On its target's answers." in card.text


def test_the_example_loads_what_was_published_and_not_what_lay_here(hub):
    folder = save_drafter("dflash", hub)
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.config.target_name_or_path = "my-target"
    (folder / "README.md").unlink()
    drafter.save_pretrained(folder)
    path = folder / "README.md"
    path.write_text(path.read_text() + "\nMy own words on drafter and my-target.\n")
    assert "the example loads the drafter from a folder" in pardraft("card", folder, "--license", "mit").out
    done = pardraft("card", folder, "--repo", "someone/drafter", "--base-model", "someone/target")
    assert "the example" not in done.out
    card = ModelCard.load(path)
    (names,) = run_examples(card)
    assert names["drafter"].last_stats.rounds > 0
    assert "| Target | [someone/target](" in card.text
    assert "My own words on drafter and my-target." in card.text


def test_a_card_that_people_wrote_gets_a_part_of_its_own(hub):
    folder = save_drafter("dflash", hub)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    assert pardraft("card", folder, "--results", write_results(hub)).code == 0
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert card.text.index("# Mine") < card.text.index("## Measured") < card.text.index("| drafter |")


@pytest.mark.parametrize("name", ["card.md", "README.md"])
def test_a_card_that_is_written_elsewhere_says_what_the_folders_card_says(name, hub):
    folder = save_drafter("dflash", hub)
    path, elsewhere = folder / "README.md", hub / "elsewhere" / name
    path.write_text(path.read_text() + "\nMy own words.\n")
    before = path.read_text()
    assert pardraft("card", folder, "--license", "mit", "--output", elsewhere).code == 0
    assert path.read_text() == before
    assert "My own words." in elsewhere.read_text()
    assert ModelCard.load(elsewhere).data.license == "mit"
    assert pardraft("card", folder, "--fresh", "--output", elsewhere).code == 0
    assert "My own words." not in elsewhere.read_text()


def test_figures_that_people_put_into_the_metadata_stay(hub):
    folder = save_drafter("dflash", hub)
    path = folder / "README.md"
    card = ModelCard.load(path)
    card.data.model_name = "drafter"
    card.data.eval_results = [EvalResult("text-generation", "mmlu", "MMLU", "accuracy", 0.5, task_name="questions")]
    card.save(path)
    for speedup in (2.5, 2.6):
        rows = [{**RESULTS["rows"][1], "speedup": speedup}]
        assert pardraft("card", folder, "--results", write_results(hub, rows=rows)).code == 0
        found = [(r.metric_type, r.metric_value) for r in ModelCard.load(path).data.eval_results]
        measured = [("acceptance_length", 3.25), ("speedup", speedup), ("tokens_per_second", 50.0)]
        assert found == [("accuracy", 0.5), *measured]


def test_the_rows_of_a_drafter_can_be_named(hub):
    folder = save_drafter("dflash", hub)
    assert pardraft("card", folder, "--results", write_results(hub), "--row", "another").code == 0
    assert "9.00x" in (folder / "README.md").read_text()
    rows = [row for row in RESULTS["rows"] if row["name"] in ("plain", "another")]
    before = (folder / "README.md").read_text()
    done = pardraft("card", folder, "--results", write_results(hub, rows=rows))
    assert "--row" in done.error
    assert (folder / "README.md").read_text() == before


def test_a_name_with_a_bar_is_one_cell_of_the_table(hub):
    folder, row = save_drafter("dflash", hub), {"name": "one|two", "speedup": 2.0, "tau": 3.0}
    assert pardraft("card", folder, "--results", write_results(hub, rows=[row]), "--row", "one|two").code == 0
    assert "| one\\|two | 2.00x | 3.00 |" in (folder / "README.md").read_text()


PLAIN_ROW = {"name": "plain", "speedup": 1.0, "tau": 1.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rows": []}, "holds no results"),
        ({"machine": None}, "machine missing"),
        ({"command": " "}, "command missing"),
        ({"rows": [{"name": "drafter", "speedup": 2.0}]}, "lacks tau"),
        ({"rows": [{"name": "drafter", "speedup": float("nan"), "tau": 2.0}]}, "speedup nan"),
        ({"rows": [{"name": "drafter", "speedup": "2", "tau": 2.0}]}, "speedup '2'"),
        ({"rows": ["drafter"]}, "lacks name, speedup, tau"),
        ({"rows": [PLAIN_ROW, PLAIN_ROW | {"temperature": "hot"}]}, "row 'plain' of .* has temperature 'hot'"),
        ({"simulated": True}, "simulation"),
        ({"random_weights": True}, "random_weights"),
    ],
)
def test_results_that_can_not_be_published_are_refused(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        read_results(write_results(tmp_path, **changes))


def test_what_pardraft_eval_writes_is_understood(tmp_path):
    figures = {"tokens_per_second": 50.0, "speedup": 2.5, "tau": 3.25, "setting": {}, "acceptance_by_position": None}
    rows = [
        {"name": "drafter", "batch_size": 1, "temperature": 0.0, "identical": True, **figures},
        {"name": "drafter", "batch_size": 8, "temperature": 0.0, "identical": False, **figures},
    ]
    prompts = {"name": "humaneval", "count": 20, "left_out": 0}
    results = read_results(
        write_results(tmp_path, rows=rows, prompts=prompts, simulated=False, simulation=None, random_weights=False)
    )
    assert results.prompts == "humaneval (20 prompts)"
    assert [row.label for row in results.rows] == [
        "drafter, batch size 1",
        "drafter, batch size 8, text not identical to plain's",
    ]


def test_cards_and_evaluation_call_plain_generate_the_same():
    assert plain_entry().name == PLAIN


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("# Results")
    with pytest.raises(ValueError, match="is no JSON"):
        read_results(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(path)


# The demo family's cards


@pytest.mark.parametrize("path", DEMO_CARDS, ids=lambda path: path.stem)
def test_a_demo_card_is_complete_and_its_example_runs(path, capsys):
    card = ModelCard.load(path)
    (names,) = run_examples(card)
    assert names["drafter"].config.drafter_kind == path.stem
    assert capsys.readouterr().out
    assert card.data.base_model
    assert card.data.license == "apache-2.0"
    assert has_measured_numbers(card)
    assert card_gaps(card) == ["no data sets: pardraft card FOLDER --dataset REPOSITORY"]


@pytest.mark.parametrize("path", DEMO_CARDS, ids=lambda path: path.stem)
def test_a_demo_card_is_what_the_command_makes_of_the_results(path, tmp_path):
    folder = ROOT / "src" / "hf_pardraft" / "demo" / "family" / path.stem
    before = sorted(folder.iterdir())
    done = pardraft("card", folder, "--results", DEMO_RESULTS, "--output", tmp_path / "card.md")
    assert done.code == 0
    assert (tmp_path / "card.md").read_text() == path.read_text()
    assert sorted(folder.iterdir()) == before


def test_the_demo_family_has_cards():
    assert {"pard", "dflash"} <= {path.stem for path in DEMO_CARDS}


def test_the_wheel_carries_every_template():
    (line,) = re.findall(r"^hf_pardraft = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    patterns = json.loads(line)
    package = TEMPLATES.parent
    carried = {path for pattern in patterns for path in package.glob(pattern)}
    files = [path for path in TEMPLATES.rglob("*") if path.is_file()]
    assert {f"{kind}.md.jinja" for kind in ("pard", "dflash", "dflare", "dart")} <= {path.name for path in files}
    assert set(files) <= carried
