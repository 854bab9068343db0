"""What a command would read or write where it must not ends it in one line, before any work."""

import os
import shutil
from pathlib import Path

import pytest
import transformers

from hostile_cases import evaluate, generate, regenerate, train
from in_process import pardraft

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_work")


def test_results_take_no_place_of_a_pipe_or_folder(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        for command in (
            evaluate("--json", path),
            evaluate("--markdown", path),
            ("card", "family/dflash", "--output", path),
        ):
            assert "expected a file to write to" in pardraft(*command).error
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "command",
    [
        evaluate("--json", "prompts.txt/r.json"),
        evaluate("--plots", "prompts.txt/plots"),
        regenerate(output="prompts.txt/answers.jsonl"),
        train("--output", "prompts.txt/trained"),
        ("card", "family/dflash", "--output", "prompts.txt/card.md"),
    ],
    ids=["eval", "plots", "regenerate", "train", "card"],
)
def test_results_below_a_file_are_refused_before_any_work(command, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "__call__", lambda *rest, **more: pytest.fail("it worked"))
    assert "prompts.txt is a file, and a folder would have to be there" in pardraft(*command).error


@pytest.mark.parametrize(
    "command",
    [
        train("--output", "prompts.txt"),
        train("--output", "prompts.txt", command="cache-features"),
        evaluate("--plots", "prompts.txt"),
        ("ngram", "build", "prompts.txt", "--tokenizer", "family/target", "--text-file", "prompts.txt"),
        ("convert", "family/dflash", "prompts.txt", "--to", "zlab"),
        ("make", "--target", "family/target", "--output", "prompts.txt"),
    ],
    ids=["train", "cache-features", "plots", "ngram", "convert", "make"],
)
def test_a_file_where_a_folder_is_to_be_is_told_alike_by_every_command(command, monkeypatch):
    before = Path("prompts.txt").read_bytes()
    monkeypatch.setattr(transformers.PreTrainedModel, "__call__", lambda *rest, **more: pytest.fail("it worked"))
    told = pardraft(*command).error
    assert "expected a folder to write to, and prompts.txt is a file: choose another name" in told
    assert Path("prompts.txt").read_bytes() == before


def test_a_card_of_a_folder_that_can_only_be_read_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", lambda *rest, **more: pytest.fail("it worked"))
    monkeypatch.setattr(os, "access", lambda place, mode: mode != os.W_OK)
    told = pardraft("card", "family/dflash").error
    assert "can't write family/dflash/README.md: no permission for" in told


def test_a_link_that_leads_nowhere_is_no_place_for_a_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = pardraft(*train("--output", tmp_path / "link")).error
    assert "link is a link that leads nowhere: choose another name" in told


@pytest.mark.parametrize(
    "command",
    [
        lambda name: generate("x", target=name),
        lambda name: evaluate(target=name),
        lambda name: regenerate(target=name),
        lambda name: train(target=name),
        lambda name: ("train", "--kind", "pard", "--base", name, *train()[10:]),
        lambda name: ("make", "--target", name, "--output", "made"),
        lambda name: ("make", "--kind", "pard", "--target", "family/target", "--base", name, "--output", "made"),
        lambda name: ("chat", "--target", name),
        lambda name: ("ngram", "build", "built", "--tokenizer", name, "--text-file", "prompts.txt"),
    ],
    ids=["generate", "eval", "regenerate", "train", "train a base", "make", "make of a base", "chat", "ngram"],
)
def test_a_path_without_a_folder_is_not_told_to_be_a_bad_name_of_a_repository(command, tmp_path):
    told = pardraft(*command(str(tmp_path / "no" / "folder"))).error
    assert f"'{tmp_path / 'no' / 'folder'}' is no folder here" in told
    assert "repo_type" not in told
    (tmp_path / "a_file").write_text("x")
    assert "a_file is a file: name the folder that it is in" in pardraft(*command(str(tmp_path / "a_file"))).error


def test_stored_states_have_one_folder():
    command = train("--features-folder", "states", command="cache-features")
    assert "name the folder for the states as --output" in pardraft(*command).error


def test_a_dry_run_tells_that_a_push_would_be_refused(tmp_path):
    at = tmp_path / "drafter"
    shutil.copytree("family/dflash", at)
    (at / "README.md").unlink(missing_ok=True)
    told = " ".join(pardraft("push", at, "me/x", "--dry-run").out.split())
    assert "would be refused" in told
    assert "has no measured numbers" in told


def test_states_are_not_written_into_the_folder_of_a_drafter(tmp_path):
    at = tmp_path / "drafter"
    shutil.copytree("family/dflash", at)
    before = sorted(path.name for path in at.iterdir())
    assert "choose a new folder" in pardraft(*train("--output", at, command="cache-features")).error
    assert sorted(path.name for path in at.iterdir()) == before


def test_links_out_of_a_folder_are_not_published(tmp_path):
    at = tmp_path / "drafter"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.txt").write_text("secret")
    for name, place in (("a_folder", "elsewhere"), ("a_file.txt", "elsewhere/secret.txt"), ("loop", "drafter")):
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree("family/dflash", at)
        (at / name).symlink_to(tmp_path / place)
        done = pardraft("push", at, "me/x", "--dry-run")
        assert f"{name} is a link" in done.error
        assert "secret" not in done.out
    shutil.rmtree(at)
    shutil.copytree("family/dflash", at)
    (at / "COPYING").symlink_to("README.md")
    assert "file COPYING" in pardraft("push", at, "me/x", "--dry-run").out
