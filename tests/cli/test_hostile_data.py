"""Data that no command can read, prompts and stored states included, end it in one line that names what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_pardraft.datagen.rewriting import ROWS_MISSING
from hf_pardraft.datagen.self_prompts import TooFewPromptsError
from hostile_cases import DEEP, evaluate, generate, ngram, regenerate, train, written
from in_process import pardraft

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_work")

NO_UTF8 = b"abc \xff\xfe def"
TEMPLATES = {
    "{% for %}": "TemplateSyntaxError",
    "{{ raise_exception('not so') }}": "not so",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages.nothing.at_all }}": "UndefinedError",
}
BAD_DATA = {
    "no_utf8.jsonl": (b'{"text": "\xff\xfe"}\n', "utf-8"),
    "deep.jsonl": ('{"text": ' + DEEP + "}\n", "more than 1000 deep"),
    "deep_lines.json": ("[\n" * 5000 + "]\n" * 5000, "more than 1000 deep"),
    "empty.jsonl": ("", "is empty"),
    "cut_off.jsonl": ('{"text": "abc"}\n{"text": "de', "JSON parse error"),
    "bad.csv": ('text\n"abc\nd,e,f\n"x","y"\n1,2,3,4\n', "Expected 2 fields"),
    "empty.csv": ("", "No columns"),
    "bad.parquet": (b"PAR1 nonsense", "Parquet magic bytes"),
    "bad.jsonl.gz": (b"\x1f\x8bnonsense", "bad.jsonl.gz"),
}


@pytest.mark.parametrize(
    "command",
    [
        lambda name: generate("--prompt-file", name),
        lambda name: ("demo", "--family", "family", "--prompt-file", name),
        lambda name: evaluate(prompts=name),
        lambda name: ("train", "--recipe", name, *train()[1:]),
        lambda name: ("card", "family/dflash", "--output", "card.md", "--recipe", name),
        lambda name: ("card", "family/dflash", "--output", "card.md", "--usage", name),
        lambda name: ("card", "family/dflash", "--output", "card.md", "--results", name),
        lambda name: ngram("--text-file", name),
    ],
    ids=["prompt", "demo", "eval", "recipe", "card recipe", "card usage", "card results", "ngram"],
)
def test_a_file_that_is_no_utf8_is_named(command):
    name = written("no_utf8.txt", NO_UTF8)
    assert f"{name} is no UTF-8 text" in pardraft(*command(name)).error


def test_input_that_is_no_utf8_is_named():
    assert "standard input is no UTF-8" in pardraft(*generate(), stdin=NO_UTF8).error
    # What Python makes of such bytes on a command line.
    assert "the prompt is no UTF-8" in pardraft(*generate("\udcff")).error


@pytest.mark.parametrize("name", BAD_DATA)
@pytest.mark.parametrize(
    "command",
    [
        lambda name: train(data=name),
        lambda name: train(data=name, command="cache-features"),
        lambda name: regenerate(data=name),
        lambda name: ngram("--dataset", name),
    ],
    ids=["train", "cache-features", "regenerate", "ngram"],
)
def test_a_data_set_that_can_not_be_read_is_named(command, name):
    content, reason = BAD_DATA[name]
    error = pardraft(*command(written(name, content))).error
    assert name in error
    assert reason in error


def test_a_folder_with_a_script_is_no_data_set():
    Path("scripted").mkdir(exist_ok=True)
    written("scripted/scripted.py", "raise SystemExit('this ran')")
    for command in (train(data="scripted"), regenerate(data="scripted"), ngram("--dataset", "scripted")):
        assert "scripts are no longer supported" in pardraft(*command).error


@pytest.mark.parametrize(
    ("tokens", "labels", "told"),
    [
        ([5, 6, 999999, 7, 8], None, "input_ids holds 999999, and the vocabulary has 300 tokens"),
        ([5, 6, -3, 7, 8], None, "input_ids holds -3"),
        ([5, 6, -100, 7, 8], None, "input_ids holds -100"),
        ([5, 6.5, 3, 7, 8], None, "whole numbers"),
        (["a", "b", "c"], None, "token ids"),
        ([True, False, True], None, "whole numbers"),
        ([[1, 2], [3, 4]], None, "token ids"),
        (None, None, "token ids"),
        ([5, 6, 7, 8, 9], [5, 6, 999999, 8, 9], "labels holds 999999"),
        ([5, 6, 7, 8, 9], [5, 6, -1, 8, 9], "labels holds -1"),
    ],
)
@pytest.mark.parametrize("command", ["train", "cache-features"])
def test_tokens_that_are_none_are_named(command, tokens, labels, told):
    good = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]} if tokens and tokens[0] == 5 else None
    bad = {"input_ids": tokens, "labels": labels or tokens}
    name = written("tokens.jsonl", "\n".join(map(json.dumps, [good or bad] * 12 + [bad] * 8)))
    error = pardraft(*train(data=name, command=command)).error
    assert told in error
    assert "example " in error


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": ["a"]}, "expected a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{bad"}, "column tools is no JSON"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": 5}, "TypeError"),
    ],
)
def test_a_row_that_is_no_conversation_fails_and_no_other(row, told, tmp_path):
    shutil.copytree("family/target", "talking", dirs_exist_ok=True)
    written(
        "talking/chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}{% endfor %}",
    )
    name = written("rows.jsonl", "\n".join([json.dumps(row)] * 2))
    done = pardraft(*regenerate(data=name, target="talking", output=tmp_path / "answers.jsonl"))
    assert done.code == ROWS_MISSING
    assert told in done.out
    assert "failed: 2" in done.out


def test_a_row_that_fails_does_not_end_other_processes(tmp_path, monkeypatch):
    """As a launcher does when one of its processes ends with another status than 0."""
    name = written("rows.jsonl", '{"prompt": null}\n' * 2)
    words = regenerate(data=name, output=tmp_path / "answers.jsonl")
    for size, status in (("1", ROWS_MISSING), ("2", 0)):
        monkeypatch.setenv("WORLD_SIZE", size)
        done = pardraft(*words)
        assert done.code == TooFewPromptsError().exit_status == status
        assert f"failed: {2 // int(size)}" in done.out


def test_half_a_character_in_a_prompt_is_told():
    name = written("half.jsonl", '{"text": "\\ud800"}\n')
    assert "line 1, holds half a character" in pardraft(*evaluate(prompts=name)).error


def test_a_data_file_of_another_ending_is_not_looked_for_on_the_hub():
    assert "expected a file ending in .csv, .json, .jsonl, .parquet" in pardraft(*regenerate(data="prompts.txt")).error


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_fails_is_told(template):
    shutil.copytree("family/target", "templated", dirs_exist_ok=True)
    written("templated/chat_template.jinja", template)
    Path("answers.jsonl").unlink(missing_ok=True)
    done = pardraft(*regenerate(target="templated"))
    assert (done.code, "Traceback" in done.err) == (ROWS_MISSING, False)
    assert TEMPLATES[template] in done.out
    for command in (evaluate(target="templated"), train(data="chat.jsonl", target="templated")):
        error = pardraft(*command).error
        assert "the chat template refuses this conversation" in error
        assert TEMPLATES[template] in error


@pytest.fixture(scope="module")
def stored(work, tmp_path_factory, request) -> Path:
    """The target's states, as `pardraft cache-features` stores them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        assert pardraft(*train("--output", "stored", command="cache-features")).code == 0
    return work / "stored"


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def changed_index(folder: Path, **fields) -> None:
    index = folder / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **fields}))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda at: first_shard(at).write_bytes(first_shard(at).read_bytes()[:-100]), "is damaged"),
        (lambda at: first_shard(at).write_bytes(first_shard(at).read_bytes()[:20]), "is damaged"),
        (lambda at: first_shard(at).write_bytes(b""), "is damaged"),
        (lambda at: save_file({"a": torch.zeros(3)}, at / "foreign.safetensors"), "foreign.safetensors"),
        (lambda at: save_file({"a": torch.zeros(3)}, first_shard(at)), "00000.safetensors"),
        (lambda at: (at / "index.json").write_text("[1, 2]"), "index.json"),
        (lambda at: (at / "index.json").write_text('{"complete": true}'), "index.json"),
        (lambda at: (at / "index.json").write_text('{"complete'), "index.json"),
        (lambda at: (at / "index.json").write_text(DEEP), "index.json"),
        (lambda at: changed_index(at, taps="abc"), "hidden states"),
    ],
    ids=["cut", "header", "empty", "foreign", "replaced", "list", "lacks", "no json", "deep", "taps"],
)
def test_a_cache_of_states_that_is_damaged_is_named(harm, told, stored, tmp_path):
    at = tmp_path / "states"
    shutil.copytree(stored, at)
    harm(at)
    assert told in pardraft(*train("--features-folder", at)).error


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (".answers.jsonl.settings", "[1]", "does not say how answers.jsonl was made"),
        (".answers.jsonl.settings", '"a"', "does not say how answers.jsonl was made"),
        (".answers.jsonl.settings", "{", "is no JSON"),
        (".answers.jsonl.settings", DEEP, "deeper"),
        ("answers.jsonl", "[1]\n", "line 1 is no row"),
        ("answers.jsonl", DEEP + "\n", "line 1 is no row"),
        ("answers.jsonl", '{"index": [1]}\n', "line 1 is no row"),
        ("answers.jsonl", '{"index": "a"}\n', "line 1 is no row"),
    ],
)
def test_a_journal_that_holds_something_else_is_named(file, content, told, tmp_path):
    shutil.copytree("family/target", "talking", dirs_exist_ok=True)
    written("talking/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    command = regenerate(target="talking", output=tmp_path / "answers.jsonl")
    assert pardraft(*command).code == 0
    (tmp_path / file).write_text(content)
    assert told in pardraft(*command).error


def test_a_prompt_beyond_the_context_is_refused_and_an_answer_beyond_it_is_cut_aloud():
    assert "the prompt has 2000 tokens, and the target's context is 256" in pardraft(*generate("def add " * 400)).error
    done = pardraft(*generate("--max-new-tokens", 100, "--drafter", "family/dflash", "def add " * 50))
    assert done.code == 0
    assert "has room for 6 after the prompt, not for 100" in done.err
