"""Models that can't be loaded as they are end a command in one line that names what is wrong; a bug says that it is one."""

import json
import shutil
from pathlib import Path

import pytest

from hostile_cases import DEEP, evaluate, generate, regenerate, train, written
from in_process import pardraft

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("in_work")


def test_a_drafter_is_no_target():
    for command in (generate("x", target="family/dflash"), evaluate(target="family/dflash")):
        assert "family/dflash holds a drafter: name the target that it drafts for" in pardraft(*command).error


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
