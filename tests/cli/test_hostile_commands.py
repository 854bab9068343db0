"""Whatever a command is given, it ends in one line that names what is wrong, and in no traceback."""

import base64
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import save_file

from conftest import SAMPLE_TEXT
from hf_pardraft.datagen.rewriting import ROWS_MISSING
from hf_pardraft.user_input.redaction import redacted
from in_process import pardraft

pytest.importorskip("datasets")

NO_UTF8 = b"abc \xff\xfe def"
DEEP = "[" * 100_000 + "]" * 100_000
QUICK = (
    *("--max-steps", 1, "--use-cpu", "--bf16", "false", "--max-length", 48, "--per-device-train-batch-size", 2),
    *("--tau-prompts", 0, "--report-to", "none", "--disable-tqdm", "--save-strategy", "no"),
)
TEMPLATES = {
    "{% for %}": "TemplateSyntaxError",
    "{{ raise_exception('not so') }}": "not so",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages.nothing.at_all }}": "UndefinedError",
}


@pytest.fixture(scope="module")
def work(tiny_family, tmp_path_factory) -> Path:
    """A folder with the tiny family and good input."""
    work = tmp_path_factory.mktemp("work")
    shutil.copytree(tiny_family, work / "family")
    texts = [{"text": SAMPLE_TEXT[start:]} for start in range(0, 60, 3)]
    (work / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    (work / "chat.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 20))
    (work / "prompts.txt").write_text("def add(a, b):\nclass Point:\n")
    return work


@pytest.fixture(autouse=True)
def in_work(work, monkeypatch):
    monkeypatch.chdir(work)


def generate(*more, target="family/target"):
    return ("generate", "--target", target, "--max-new-tokens", 2, *more)


def evaluate(*more, prompts="prompts.txt", target="family/target"):
    common = ("--target", target, "--prompts", prompts, "--max-new-tokens", 4, "--repeats", 1)
    return ("eval", *common, "--drafter", "family/dflash", *more)


def regenerate(*more, data="chat.jsonl", target="family/target", output="answers.jsonl"):
    return ("regenerate", data, "--output", output, "--target", target, "--max-tokens", 2, *more)


def train(*more, data="text.jsonl", target="family/target", command="train"):
    shape = ("--kind", "dflash", "--num-layers", 1, "--block-size", 4, "--target-layer-ids", 0, 2)
    anew = ("--overwrite-output",) if command == "train" else ()
    return (command, *shape, "--target", target, "--dataset", data, "--output", "trained", *anew, *QUICK, *more)


def ngram(*more):
    return ("ngram", "build", "built", "--tokenizer", "family/target", *more)


def written(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


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


def test_half_a_character_in_a_prompt_is_told():
    name = written("half.jsonl", '{"text": "\\ud800"}\n')
    assert "line 1, holds half a character" in pardraft(*evaluate(prompts=name)).error


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


def test_a_drafter_is_no_target():
    for command in (generate("x", target="family/dflash"), evaluate(target="family/dflash")):
        assert "family/dflash holds a drafter: name the target that it drafts for" in pardraft(*command).error


def test_a_data_file_of_another_ending_is_not_looked_for_on_the_hub():
    assert "expected a file ending in .csv, .json, .jsonl, .parquet" in pardraft(*regenerate(data="prompts.txt")).error


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


def test_results_name_no_folders_of_this_machine(tmp_path):
    drafter = (Path.cwd() / "family" / "dflash").as_posix()
    command = evaluate("--drafter", f"DFlash={drafter}", "--json", tmp_path / "r.json")
    assert pardraft(*command).code == 0
    told = json.loads((tmp_path / "r.json").read_text())["command"]
    assert "--drafter DFlash=dflash --json r.json" in told


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


def test_adapters_that_belong_to_themselves_are_refused():
    pytest.importorskip("peft")
    for name, base in (("self", "self"), ("one", "other"), ("other", "one")):
        Path(name).mkdir(exist_ok=True)
        shutil.copy("family/dflash/config.json", name)
        fields = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 4, "target_modules": ["q_proj"]}
        written(f"{name}/adapter_config.json", json.dumps(fields))
    for name in ("self", "one"):
        told = pardraft(*generate("--drafter", name, "x")).error
        assert "which is itself or belongs to it" in told
    written("self/adapter_config.json", '{"peft_type": "NONSENSE", "base_model_name_or_path": "x"}')
    assert "describes no adapter" in pardraft(*generate("--drafter", "self", "x")).error


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


def test_states_are_not_written_into_the_folder_of_a_drafter(tmp_path):
    at = tmp_path / "drafter"
    shutil.copytree("family/dflash", at)
    before = sorted(path.name for path in at.iterdir())
    assert "choose a new folder" in pardraft(*train("--output", at, command="cache-features")).error
    assert sorted(path.name for path in at.iterdir()) == before


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
    ],
)
def test_arguments_for_generate_are_checked(argument):
    assert "generate-argument" in pardraft(*evaluate("--generate-argument", argument)).error.replace(" ", "-")


@pytest.mark.parametrize("repo", ["a/b/c", "not ok!", "", "x" * 200, "a/../b"])
def test_a_dry_run_refuses_what_no_repository_can_be_called(repo):
    assert "no repository can be called" in pardraft("push", "family/dflash", repo, "--dry-run").error


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


def test_weights_that_are_a_link_out_of_the_folder_are_not_loaded(tmp_path):
    at = tmp_path / "drafter"
    shutil.copytree("family/dflash", at)
    weights = at / "model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    for command in (generate("--drafter", at, "x"), ("convert", at, tmp_path / "converted", "--to", "native")):
        assert f"{weights} is a link to" in pardraft(*command).error


@pytest.fixture
def with_code(tmp_path) -> Path:
    """A target that brings its own code, which leaves a trace where it is run."""
    at = tmp_path / "with_code"
    shutil.copytree("family/target", at)
    config = json.loads((at / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (at / "config.json").write_text(json.dumps(config))
    (at / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import Qwen3Config, Qwen3ForCausalLM\n"
        f"Path({str(tmp_path / 'trace')!r}).touch()\n"
        "class Config(Qwen3Config):\n    model_type = 'own'\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    return at


@pytest.mark.usefixtures("own_modules")
def test_code_that_comes_with_a_target_is_run_only_where_the_user_says_so(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked on the terminal"))
    trace = tmp_path / "trace"
    base = ("train", "--kind", "pard", "--base", with_code, "--target", *train()[train().index("--target") + 1 :])
    commands = (generate("x", target=with_code), evaluate(target=with_code), regenerate(target=with_code))
    for command in (*commands, train(target=with_code), base, train(target=with_code, command="cache-features")):
        assert "pass --trust-remote-code" in pardraft(*command, stdin=b"y\ny\ny\n").error
        assert not trace.exists()
    assert pardraft(*generate("--trust-remote-code", "x", target=with_code)).code == 0
    assert trace.exists()


def test_a_bug_says_that_it_is_one_and_shows_where_on_demand(monkeypatch):
    def broken(*_):
        return {}["missing"]

    monkeypatch.setattr("hf_pardraft.evaluation.facts.installed_versions", broken)
    done = pardraft("env")
    assert "error: this is a bug in hf_pardraft" in done.err
    assert "KeyError: 'missing' (cli/env.py, line " in done.err
    assert "Traceback" not in done.err
    for debugging in (pardraft("--debug", "env"), pardraft("env", PARDRAFT_DEBUG="1")):
        assert debugging.code == 1
        assert "Traceback (most recent call last)" in debugging.err
        assert "in broken" in debugging.err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")])
def test_a_lack_of_memory_is_no_bug(error, monkeypatch):
    def exhausted():
        raise error

    monkeypatch.setattr("hf_pardraft.evaluation.facts.installed_versions", exhausted)
    assert "error: not enough memory" in pardraft("env").error


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", DEEP.encode(), b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_damaged_file_of_a_target_is_named(file, content, tmp_path):
    shutil.copytree("family/target", tmp_path / "target")
    (tmp_path / "target" / file).write_bytes(content)
    error = pardraft(*generate("x", target=tmp_path / "target")).error
    assert file in error
    assert "bug" not in error


def test_damaged_weights_of_a_target_are_named(tmp_path):
    shutil.copytree("family/target", tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors is not a whole safetensors file" in pardraft(*generate("x", target=weights.parent)).error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", "abc"),
        ("eos_token_id", "abc"),
        ("no_repeat_ngram_size", []),
        ("stop_strings", 5),
        ("do_sample", "yes"),
    ],
)
def test_generation_settings_of_a_target_are_checked(name, value, tmp_path):
    shutil.copytree("family/target", tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({name: value}))
    assert name in pardraft(*generate("x", target=tmp_path / "target")).error


def test_a_token_of_the_hub_is_neither_printed_nor_stored(tmp_path):
    token = "hf_" + "a1" * 17
    done = pardraft("push", "family/dflash", token, "--dry-run", "--token", token)
    assert done.code in (0, 1)
    assert token not in done.err
    output = tmp_path / "trained"
    assert pardraft(*train("--output", output, "--hub-token", token)).code == 0
    holding = [path.name for path in output.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert holding == []


class Echo(BaseHTTPRequestHandler):
    """A server that says back what it was sent, key included."""

    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        sent = self.headers["Authorization"]
        choice = {"index": 0, "message": {"role": "assistant", "content": sent}, "finish_reason": "stop"}
        body = json.dumps({"error": {"message": f"wrong key: {sent}"}, "choices": [choice], "id": "x", "created": 0})
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [401, 400, 200])
@pytest.mark.parametrize(
    ("key", "with_password"),
    [("sk-0123456789abcdefghij", False), ("a/key with+signs&more", False), ("unused-key-0123", True)],
)
def test_a_key_that_a_server_says_back_is_neither_printed_nor_stored(
    status, key, with_password, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Echo,), {"status": status}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{'user:passw0rd@' if with_password else ''}127.0.0.1:{server.server_port}/v1"
    common = ("regenerate", "chat.jsonl", "--output", tmp_path / "out.jsonl", "--model", "m", "--retries", 0)
    try:
        done = pardraft(*common, "--server", address, "--api-key-variable", "OWN", OWN=key, PARDRAFT_DEBUG="1")
    finally:
        server.shutdown()
        server.server_close()
    assert done.code == (1 if status == 401 else ROWS_MISSING)
    written_to = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    for text in (done.out, done.err, caplog.text, *written_to):
        assert key not in text
        assert "passw0rd" not in text
        assert base64.b64encode(b"user:passw0rd").decode() not in text
    assert "[hidden]" in done.err + done.out or status == 200


def test_secrets_are_found_in_any_spelling():
    secret = 'a "key"/with+signs'
    for text in (secret, json.dumps(secret), quote(secret, safe=""), f"Authorization: Bearer {secret}"):
        assert "key" not in redacted(text, [secret]).replace("Authorization", "")
    assert redacted("Bearer abcdefgh, hf_" + "x1" * 17) == "Bearer [hidden], [hidden]"
    assert redacted("https://me:word@host/v1") == "https://[hidden]@host/v1"
    # A word is no key.
    assert redacted("it is a test", ["a", None, ""]) == "it is a test"
