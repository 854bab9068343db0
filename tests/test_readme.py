"""The README is run: CI's commands by CI, its Python here with tiny models, and its other commands as far as they parse."""

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter, PardDrafter
from hf_pardraft.cli.app import app
from hf_pardraft.training.recipe import training_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OUTSIDE_CI = re.sub(r"<!-- ci:begin -->.*?<!-- ci:end -->", "", README, flags=re.DOTALL)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", OUTSIDE_CI, flags=re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
LINES = [line for language, block in BLOCKS if language != "python" for line in block.splitlines() if line]
SERVERS = [line for line in LINES if line.startswith(("vllm ", "python -m sglang"))]
IN_TEXT = sorted({" ".join(span.split()) for span in re.findall(r"`(pardraft [^`]+)`", OUTSIDE_CI)})


def test_ci_reads_its_four_commands_from_the_readme():
    block = README.split("<!-- ci:begin -->")[1].split("<!-- ci:end -->")[0]
    commands = [line for line in block.splitlines() if line and not line.startswith("```")]
    assert [command.split("#")[0].split()[0] for command in commands] == ["python3", "pip", "pardraft", "pytest"]
    assert "ci:begin" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)


def test_every_line_of_a_block_is_python_or_a_command_that_is_looked_at():
    assert {language for language, _ in BLOCKS} <= {"python", "", "bash"}
    assert all(line.startswith(("pardraft ", "# ")) or line in SERVERS for line in LINES)
    assert len(PYTHON) > 1
    assert len(IN_TEXT) > 5


@pytest.fixture
def repositories(tiny_family, tmp_path, monkeypatch):
    """Every repository that the README names is a tiny model on disk, in bfloat16 as there; the folder to work in is empty."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    places = {name: tmp_path / name for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "z-lab/Qwen3-8B-DFlash-b16")}
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"):
        AutoModelForCausalLM.from_pretrained(tiny_family / "target").bfloat16().save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    AutoDrafter.from_pretrained(tiny_family / "dflash").bfloat16().save_pretrained(places["z-lab/Qwen3-8B-DFlash-b16"])
    asked_for = set()

    def local(loader):
        load = loader.from_pretrained

        def from_pretrained(name, *args, **kwargs):
            asked_for.update({name} & {*places})
            return load(places.get(name, name), *args, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", from_pretrained)

    for loader in (AutoModelForCausalLM, AutoTokenizer, AutoDrafter):
        local(loader)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    # Accelerators and reporting services are a machine's own matter.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return asked_for


def test_the_python_blocks_run_one_after_the_other(repositories, capsys):
    namespace = {}
    # The README leaves the data to the reader.
    namespace["dataset"] = [{"text": f"def add_{i}(a, b):\n    return a + b + {i}\n"} for i in range(2)]
    for number, block in enumerate(PYTHON):
        with warnings.catch_warnings():
            warnings.simplefilter("error", category=FutureWarning)
            exec(compile(block, f"README.md, Python block {number + 1}", "exec"), namespace)
    assert namespace["target"].dtype == torch.bfloat16
    assert repositories == {"Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "z-lab/Qwen3-8B-DFlash-b16"}
    out = capsys.readouterr().out
    assert "def quicksort(items):" in out
    assert re.search(r"[\d.]+ tokens per forward of the target", out)
    drafter = AutoDrafter.from_pretrained("my-drafter")
    assert drafter.config.block_size == 16
    assert isinstance(PardDrafter.from_causal_lm("Qwen/Qwen3-0.6B"), PardDrafter)


def command_of(words: list[str]):
    """What the first words name, and the others."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("command", IN_TEXT)
def test_what_the_text_calls_a_command_is_one_and_has_its_options(command):
    named, words = command_of(shlex.split(command)[1:])
    assert not hasattr(named, "commands")
    known = {name for parameter in named.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= {*known, "--help"}


@pytest.mark.parametrize("command", [line for line in LINES if line.startswith("pardraft ")])
def test_a_command_of_a_block_can_be_called_as_it_stands(command, tmp_path, monkeypatch):
    words = shlex.split(command, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    # What a command reads has to be there before its options are looked at.
    (tmp_path / "my-drafter").mkdir()
    for word in words:
        if Path(word).suffix in (".jsonl", ".json"):
            (tmp_path / word).write_text("{}\n")
    if words[0] == "train":
        # Its settings are the trainer's, and not typer's.
        assert training_run(words[1:]).options.target == "Qwen/Qwen3-8B"
        return
    named, words = command_of(words)
    assert not named.make_context("", words).args


@pytest.mark.parametrize("command", SERVERS)
def test_what_servers_are_told_is_json_that_names_a_method(command):
    words = shlex.split(command, comments=True)
    settings = [json.loads(word) for word in words if word.startswith("{")]
    assert all({"method", "model", "num_speculative_tokens"} <= {*each} for each in settings)
    assert bool(settings) == (words[0] == "vllm")
