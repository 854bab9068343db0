"""The README and docs/ are run: their Python here with tiny models, their commands as far as they parse; links lead somewhere."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_pardraft
from hf_pardraft import AutoDrafter, DFlashDrafter, DraftTrainer, DraftTrainingArguments, NgramModel
from hf_pardraft.checkpoints.layouts import LAYOUTS
from hf_pardraft.checkpoints.published import KIND_NAMES
from hf_pardraft.cli.app import app
from hf_pardraft.training.recipe import training_run
from test_layering import ARROWS, SOURCE

ROOT = Path(__file__).parent.parent
CI_BLOCK = re.compile(r"<!-- ci:begin -->(.*?)<!-- ci:end -->", flags=re.DOTALL)
SERVERS = ("vllm ", "python -m sglang")
# Other people's commands, which hand options to `generate`.
HARNESS = ("lm_eval ", "python -c ")


@dataclass(frozen=True)
class Page:
    """A Markdown file; of its blocks, all but the one that CI runs."""

    name: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.name).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each."""
        return re.findall(r"^```(\w*)\n(.*?)^```$", CI_BLOCK.sub("", self.text), flags=re.DOTALL | re.MULTILINE)

    @property
    def python(self) -> list[str]:
        return [block for language, block in self.blocks if language == "python"]

    @property
    def lines(self) -> list[str]:
        """Those of blocks of commands."""
        return [line for language, block in self.blocks if language == "bash" for line in block.splitlines() if line]

    @property
    def commands_in_text(self) -> set[str]:
        """What stands between backquotes and begins as a command of ours."""
        spans = re.findall(r"`(pardraft [^`]+)`", CI_BLOCK.sub("", self.text))
        return {" ".join(span.split()) for span in spans}

    @property
    def links(self) -> list[str]:
        """Files (`file.md#heading`) and headings (`#heading`) that it refers to."""
        return [link for link in re.findall(r"\]\(([^)\s]+)\)", self.text) if "://" not in link]

    @property
    def headings(self) -> set[str]:
        """Its headings as links name them."""
        found = re.findall(r"^#+ (.*)$", self.text, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


README = Page("README.md")
GUIDES = [README, *(Page(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md")))]
TUTORIALS = [Page(f"docs/tutorials/{path.name}") for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
PAGES = [*GUIDES, *TUTORIALS]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_ci_reads_its_four_commands_from_the_readme():
    (block,) = CI_BLOCK.findall(README.text)
    commands = [line for line in block.splitlines() if line and not line.startswith("```")]
    assert [command.split("#")[0].split()[0] for command in commands] == ["python3", "pip", "pardraft", "pytest"]
    assert "ci:begin" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_one_page_that_begins_with_a_picture_and_leads_to_all_others():
    assert len(README.text) <= 8500
    assert len(README.text.splitlines()) <= 120
    assert README.text.index("docs/images/round.svg") < README.text.index("## ")
    assert {page.name for page in GUIDES} - {"README.md", "docs/README.md"} <= {*README.links}


@EVERY_PAGE
def test_links_lead_somewhere(page):
    assert page.links
    for link in page.links:
        name, _, heading = link.partition("#")
        place = (ROOT / page.name).parent / name if name else ROOT / page.name
        assert place.exists(), link
        if heading:
            assert heading in Page(str(place.resolve().relative_to(ROOT))).headings, link


@EVERY_PAGE
def test_every_line_of_a_block_is_python_or_a_command_that_is_looked_at(page):
    assert {language for language, _ in page.blocks} <= {"python", "bash", "text"}
    assert all(line.startswith(("pardraft ", "# ", *SERVERS, *HARNESS)) for line in page.lines)


@EVERY_PAGE
def test_scripts_that_are_named_are_there(page):
    for script in re.findall(r"(?:benchmarks|examples|tests|docs)/[\w/]+\.py", page.text):
        assert (ROOT / script).is_file(), script


@pytest.fixture
def repositories(tiny_family, tmp_path, monkeypatch):
    """Every model that a page names is a tiny one on disk, in bfloat16 as there; the folder to work in is empty."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    places = {name: tmp_path / name for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "z-lab/Qwen3-8B-DFlash-b16")}
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"):
        AutoModelForCausalLM.from_pretrained(tiny_family / "target").bfloat16().save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    AutoDrafter.from_pretrained(tiny_family / "dflash").bfloat16().save_pretrained(places["z-lab/Qwen3-8B-DFlash-b16"])
    places["3-grams"] = tmp_path / "3-grams"
    size = AutoModelForCausalLM.from_pretrained(tiny_family / "target").config.vocab_size
    NgramModel.from_token_stream([[*range(50)] * 3], vocab_size=size, save_directory=places["3-grams"])
    asked_for = set()

    def local(loader):
        load = loader.from_pretrained

        def from_pretrained(name, *args, **kwargs):
            asked_for.update({name} & {*places})
            return load(places.get(name, name), *args, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", from_pretrained)

    for loader in (AutoModelForCausalLM, AutoTokenizer, AutoDrafter, NgramModel):
        local(loader)
    (tmp_path / "work").mkdir()
    # Pipelines ask no loader that could be told where it is.
    for owner in ("Qwen", "z-lab"):
        (tmp_path / "work" / owner).symlink_to(tmp_path / owner)
    monkeypatch.chdir(tmp_path / "work")
    # Accelerators and reporting services are a machine's own matter.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return asked_for


def run_python(page: Page) -> dict:
    """Run a page's blocks of Python one after the other; those of guides in docs/ go on from the README's first one."""
    # The data is left to the reader.
    namespace = {"dataset": [{"text": f"def add_{i}(a, b):\n    return a + b + {i}\n"} for i in range(2)]}
    before = [] if page == README or page in TUTORIALS else [("README.md, first", README.python[0])]
    for place, block in [*before, *((f"{page.name}, Python block {n}", b) for n, b in enumerate(page.python, start=1))]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", category=FutureWarning)
            exec(compile(block, place, "exec"), namespace)
    return namespace


def test_the_readmes_python_writes_text_with_a_drafter_and_trains_one(repositories, capsys):
    namespace = run_python(README)
    assert namespace["target"].dtype == torch.bfloat16
    assert repositories == {"Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"}
    out = capsys.readouterr().out
    assert "def quicksort(items):" in out
    assert re.search(r"[\d.]+ tokens per forward of the target", out)
    assert AutoDrafter.from_pretrained("my-drafter").config.block_size == 16


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if page.python], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page, repositories):
    namespace = run_python(page)
    if page.name == "docs/training.md":
        assert AutoDrafter.from_pretrained("my-drafter").config.drafter_kind == "dflash"
    else:
        assert namespace["drafter"].last_stats.rounds > 0


def command_of(words: list[str]):
    """What the first words name, and the others."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("command", sorted(set().union(*(page.commands_in_text for page in PAGES))))
def test_what_the_text_calls_a_command_is_one_and_has_its_options(command):
    named, words = command_of(shlex.split(command)[1:])
    assert not hasattr(named, "commands")
    known = {name for parameter in named.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= {*known, "--help"}


COMMANDS = sorted({line for page in PAGES for line in page.lines if line.startswith("pardraft ")})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_block_can_be_called_as_it_stands(command, tmp_path, monkeypatch):
    words = shlex.split(command, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    # What a command reads has to be there before its options are looked at.
    (tmp_path / "my-drafter").mkdir()
    for word in words:
        if Path(word).suffix in (".jsonl", ".json"):
            (tmp_path / word).write_text("{}\n")
    if words[0] in ("train", "cache-features"):
        # Their settings are the trainer's, and not typer's.
        assert training_run(words[1:]).options.target == "Qwen/Qwen3-8B"
        return
    named, words = command_of(words)
    assert not named.make_context("", words).args


@EVERY_PAGE
def test_a_block_converts_a_drafter_of_the_kind_that_the_layout_holds(page):
    for _, block in page.blocks:
        for layout in re.findall(r"^pardraft convert .* --to (\w+)", block, flags=re.MULTILINE):
            published = re.findall(r"\byou/\S+-(\w+)", block)
            assert {*published} <= {KIND_NAMES[LAYOUTS[layout].kind]}, block


@pytest.mark.parametrize("command", sorted({line for page in PAGES for line in page.lines if line.startswith(SERVERS)}))
def test_what_servers_are_told_is_json_that_names_a_method(command):
    words = shlex.split(command, comments=True)
    settings = [json.loads(word) for word in words if word.startswith("{")]
    assert all({"method", "model", "num_speculative_tokens"} <= {*each} for each in settings)
    assert bool(settings) == (words[0] == "vllm")


# The site


def test_the_site_has_every_page_and_the_api_every_public_name():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    listed = [page for entry in site["nav"] for pages in entry.values() for page in in_order(pages)]
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(found)
    assert {page for page in found if "/" in page} <= {*Page("docs/README.md").links}
    shown = [
        name.rpartition(".")[2]
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert {*hf_pardraft.__all__} <= {*shown}


def in_order(pages: str | list) -> list[str]:
    """The files of a part of the site's navigation."""
    return [pages] if isinstance(pages, str) else [file for entry in pages for file in entry.values()]


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Speed up generate" in home
    assert 'href="tutorials/speed_up/"' in home
    assert (tmp_path / "repository" / "benchmarks" / "results" / "decode.json").is_file()


# Architecture

ARCHITECTURE = Page("docs/architecture.md")


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "images" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_that_the_script_draws(draw):
    drawn = {name: picture().svg() for name, picture in draw.PICTURES.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "images").glob("*.svg")}


def reachable(folder: str, arrows: dict[str, set[str]]) -> set[str]:
    """What `folder` leads to, over one arrow or several."""
    return arrows[folder].union(*(reachable(other, arrows) for other in arrows[folder]))


def test_the_picture_of_the_folders_has_all_of_them_and_the_arrows_that_do_not_follow_from_others(draw):
    arrows = {folder: {place.split(".")[0] for place in places} for folder, places in ARROWS.items()}
    assert {*draw.FOLDERS} == {*arrows}
    direct = {
        (folder, other)
        for folder, others in arrows.items()
        for other in others
        if not any(other in reachable(between, arrows) for between in others)
    }
    to_base = {(folder, other) for folder, other in direct if folder not in draw.BASE and other in draw.BASE}
    assert {*draw.SHOWN_ARROWS} == direct - to_base
    assert {*draw.ARROWS_TO_BASE} == {folder for folder, _ in to_base}


def test_the_architecture_page_lists_every_folder_and_what_it_may_import():
    rows = re.findall(r"^\| `(\w+)/?` \| ([^|]*) \|", ARCHITECTURE.text, flags=re.MULTILINE)
    listed = {folder: set(re.findall(r"`([\w.]+)`", imports)) for folder, imports in rows if folder in ARROWS}
    assert listed == ARROWS


def test_the_files_that_the_architecture_page_names_are_there():
    named = re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.text)
    assert len(named) > 20
    assert [name for name in named if not (SOURCE / name).is_file()] == []


def listed_calls(heading: str) -> list[tuple[str, str]]:
    """File and function of each line of the block of text below a heading of the architecture page."""
    block = ARCHITECTURE.text.split(f"## {heading}\n")[1].split("```text\n")[1].split("```")[0]
    return [tuple(line.split()[:2]) for line in block.splitlines()]


def calls_of(work: Callable[[], object]) -> Iterator[tuple[str, str]]:
    """File and name of each of our functions that is called, in that order."""
    calls = []

    def note(frame, event, _) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in file.parents:
            calls.append((file.relative_to(SOURCE).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return iter(calls)


def test_a_call_of_generate_passes_through_the_functions_listed(tiny_family):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    drafter = AutoDrafter.from_pretrained(tiny_family / "dflash")
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False, "assistant_model": drafter}
    calls = calls_of(lambda: target.generate(torch.ones(1, 5, dtype=torch.long), **options))
    # Each is looked for after the one before it.
    assert [call for call in listed_calls("One call of generate") if call not in calls] == []


def test_a_training_step_passes_through_the_functions_listed(tiny_family, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    args = DraftTrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none", num_anchors=4)
    trainer = DraftTrainer(
        model=DFlashDrafter.for_target(target, num_layers=1, block_size=4, mask_token_id=1),
        target=target,
        args=args,
        train_dataset=[{"input_ids": [*range(10, 30)], "labels": [*range(10, 30)]}] * 2,
    )
    calls = calls_of(trainer.train)
    assert [call for call in listed_calls("One training step") if call not in calls] == []
