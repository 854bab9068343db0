"""One command to a drafter: its stages, what a kill leaves, and what is refused before any work."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import FalconConfig, FalconForCausalLM, Qwen3Config, Qwen3ForCausalLM

import in_process
from hf_pardraft import AutoDrafter
from hf_pardraft.cli.make import make
from hf_pardraft.datagen.rewriting import ROWS_MISSING
from hf_pardraft.making import runner
from hf_pardraft.making.commands import Commands, RunFolder
from hf_pardraft.making.plan import PROBE_STEPS, TrainingPlan
from hf_pardraft.making.run import Making, make_drafter
from hf_pardraft.making.runner import run_command
from hf_pardraft.making.settings import Machine, MakeSettings
from hf_pardraft.making.state import MakeState
from hf_pardraft.making.summary import inside, make_command, public_command, try_it, what_to_do_for_more
from hf_pardraft.making.text import Text, written_texts
from hf_pardraft.training.recipe import training_run
from tiny_models import tiny_target
from tiny_tokenizers import tiny_chat_tokenizer

CPU = Machine(has_accelerator=False, computes_bf16=False)
IM_END = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Writes small letters, and ends now and then: whatever it reads, its last hidden state is nearly the same."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "tiny", tiny_chat_tokenizer()
    config = Qwen3Config(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=IM_END,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    words = [token for token in range(3, len(tokenizer)) if tokenizer.decode([token]).replace(" ", "").islower()]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = -20.0
        model.lm_head.weight[[token for token in words if tokenizer.decode([token]).isascii()], 0] = 0.0
        model.lm_head.weight[IM_END, 0] = 0.2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Shell:
    """Runs commands in this process, each in so many seconds of a clock that stands still otherwise.

    Args:
        seconds: of each command.
        killed_at: number of the command that is killed when it is done, before anybody has noted that; counted from 0.
    """

    def __init__(self, seconds: float = 60.0, killed_at: int | None = None) -> None:
        self.seconds, self.killed_at, self.now, self.commands = seconds, killed_at, 0.0, []

    def run(self, words, tick):
        self.commands.append(words)
        self.now += self.seconds / 2
        tick()
        done = in_process.pardraft(*self.quick(words))
        assert done.code == 0, done.err
        self.now += self.seconds / 2
        if self.killed_at == len(self.commands) - 1:
            raise KeyboardInterrupt
        return done.code

    @staticmethod
    def quick(words):
        """What only makes these tests wait is less."""
        less = {"--max-tokens": "24", "--max-steps": "2", "--eval-steps": "1", "--save-steps": "1"}
        less |= {"--tau-new-tokens": "4", "--max-new-tokens": "8"}
        return [less.get(words[place - 1], word) if place else word for place, word in enumerate(words)]

    @property
    def names(self):
        return [words[0] for words in self.commands]

    def make(self, settings, output):
        return make_drafter(settings, output, self.run, lambda: self.now, lambda line: None, CPU)


class TimedShell(Shell):
    """One whose first steps of training, and the evaluation after them, take so many seconds each by Trainer's clock."""

    steps, evaluation = 10.0, 30.0

    def run(self, words, tick):
        done = super().run(words, tick)
        if words[0] == "train" and of(words, "--output").endswith("probe"):
            folder = Path(of(words, "--output"))
            state = json.loads((folder / "trainer_state.json").read_text())
            (logged,) = (entry for entry in state["log_history"] if "train_runtime" in entry)
            # Trainer's own figures: an evaluation after the last step belongs to its training.
            assert 0 < json.loads((folder / "eval_results.json").read_text())["eval_runtime"] < logged["train_runtime"]
            logged["train_runtime"] = self.steps + self.evaluation
            (folder / "trainer_state.json").write_text(json.dumps(state))
            (folder / "eval_results.json").write_text(json.dumps({"eval_runtime": self.evaluation}))
        return done


def of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


HOURS = 400 / 3600


@pytest.mark.parametrize("kind", ["dflash", "dart", "dflare", "pard"])
def test_every_kinds_training_is_a_command_that_can_be_read(kind, tmp_path):
    folder = RunFolder(tmp_path, "tiny", kind)
    commands = Commands(
        MakeSettings("tiny", kind=kind), folder, is_small=True, has_accelerator=False, dtype="float32", vocab_size=49152
    )
    command, *words = commands.train(TrainingPlan(4, 2, 1.0, is_capped=False), resume=False)
    run = training_run(words)
    assert command == "train"
    assert run.drafter.kind == kind
    assert run.arguments["max_steps"] == 4
    assert run.arguments.get("draft_vocab_size") == 8192
    stored = commands.train(TrainingPlan(4, 2, 1.0, is_capped=False), resume=False, stored_states=True)
    assert of(stored, "--features-folder") == str(folder.states)


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """Makes a drafter of a kind once: what ran, what was told, and the folder."""

    @functools.cache
    def make(kind):
        shell, output = Shell(), tmp_path_factory.mktemp(kind) / "out"
        return shell, shell.make(MakeSettings(str(target), kind=kind, hours=HOURS), output), output

    return make


def test_what_a_step_costs_is_found_without_the_evaluation_after_it(target, tmp_path):
    shell = TimedShell()
    shell.make(MakeSettings(str(target), kind="dart", hours=HOURS), tmp_path / "out")
    costs = json.loads((tmp_path / "out" / "make.json").read_text())["decided"]["costs"]
    assert costs == {"step": 10.0 / PROBE_STEPS, "evaluation": 30.0, "around": shell.seconds - 40.0}


# The others differ in the words of their training.
@pytest.mark.parametrize("kind", ["dflare", "pard"])
def test_one_command_makes_a_measured_drafter_with_a_card(kind, made):
    _, lines, output = made(kind)
    names = {"dflare": "DFlare", "dflash": "DFlash", "dart": "DART", "pard": "PARD"}
    drafter = output / f"tiny-{names[kind]}"
    assert AutoDrafter.from_pretrained(drafter).config.drafter_kind == kind
    card = (drafter / "README.md").read_text()
    assert "| plain |" in card
    assert "pardraft regenerate --self-prompts" in card
    assert str(output.parent) not in card
    told = "\n".join(lines)
    assert "tau " in told
    assert f"pardraft push {drafter}" in told
    assert "--hours 0.444 " in told
    assert not {"probe", "probe-states", "states"} & {path.name for path in output.iterdir()}
    if kind == "pard":
        assert AutoDrafter.from_pretrained(drafter).config.num_hidden_layers == 2


def test_the_hours_are_shared_out(made):
    shell, _, output = made("dflare")
    # 160 of 400 seconds are for text: 8 dialogues in 60 seconds, 13 in the next 60, though there was time for more, and so on.
    states = ["cache-features"]
    written = ["regenerate", "regenerate"]
    assert shell.names == ["regenerate", *states, "train", *written, *states, "train", "eval", "card"]
    counts = [int(of(words, "--self-prompts")) for words in shell.commands if words[0] == "regenerate"]
    assert counts == [8, 8 + 13, 21 + 8]
    probe, training = [words for words in shell.commands if words[0] == "train"]
    assert of(probe, "--output").endswith("probe")
    assert of(training, "--metric-for-best-model") == "tau"
    text = output / "text"
    rows = {name: (text / name).read_text().splitlines() for name in ("train.jsonl", "held-out.jsonl")}
    assert len(rows["train.jsonl"]) + len(rows["held-out.jsonl"]) == counts[-1]
    assert not {*rows["train.jsonl"]} & {*rows["held-out.jsonl"]}
    state = json.loads((output / "make.json").read_text())
    assert state["seconds"]["text"] == 180.0


def test_a_run_that_is_killed_anywhere_goes_on_where_it_was(target, tmp_path):
    settings, shell, ran, lines = MakeSettings(str(target), hours=HOURS), Shell(killed_at=0), [], None
    while lines is None:
        try:
            lines = shell.make(settings, tmp_path / "out")
        except KeyboardInterrupt:
            ran.append(shell.names)
            # The next one does what this one had done, and dies a command later.
            shell = Shell(killed_at=1)
    assert ran[0] == ["regenerate"]
    assert all(before[-1] == after[0] for before, after in pairwise([*ran, shell.names]))
    assert [names[-1] for names in ran] == [
        "regenerate",
        "cache-features",
        "train",
        "regenerate",
        "cache-features",
        "train",
        "eval",
        "card",
    ]
    # What a kill cost is of the hours, too: no text was asked for beyond them.
    counts = [json.loads(line)["index"] for line in (tmp_path / "out" / "text" / "dialogues.jsonl").open()]
    assert sorted(counts) == list(range(len(counts)))
    again = Shell()
    assert again.make(settings, tmp_path / "out") == lines
    assert again.commands == []


def test_training_goes_on_from_its_checkpoint_and_a_stage_that_fails_says_where_to_go_on(target, tmp_path):
    settings = MakeSettings(str(target), hours=HOURS)

    class Killed(Shell):
        def run(self, words, tick):
            status = super().run(words, tick)
            if words[0] == "train" and "probe" not in of(words, "--output"):
                raise KeyboardInterrupt
            return status

    with pytest.raises(KeyboardInterrupt):
        Killed().make(settings, tmp_path / "out")

    class Failing(Shell):
        def run(self, words, tick):
            return 1 if words[0] == "eval" else super().run(words, tick)

    failing = Failing()
    with pytest.raises(ValueError, match=r"measuring failed: .* status 1.* run the same pardraft make again"):
        failing.make(settings, tmp_path / "out")
    assert failing.names == ["train"]
    assert of(failing.commands[0], "--resume-from-checkpoint") == "last"
    shell = Shell()
    shell.make(settings, tmp_path / "out")
    assert shell.names == ["eval", "card"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_run_that_is_killed_while_it_clears_up_goes_on(target, tmp_path, monkeypatch, number):
    """What it deletes then are hidden states, which may be gigabytes; first those of the probe, then all."""
    settings, shell, remove, removed = MakeSettings(str(target), hours=HOURS), Shell(), shutil.rmtree, []

    def killed(folder, **options):
        name, had_files = Path(folder).name, any(Path(folder).glob("*"))
        remove(folder, **options)
        if had_files and name in ("probe-states", "states"):
            removed.append(name)
            if len(removed) == number + 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            shell.make(settings, tmp_path / "out")
    assert removed == ["probe-states", "states"][: number + 1]
    again = Shell()
    again.make(settings, tmp_path / "out")
    assert again.names[-2:] == ["eval", "card"]
    assert ("train" in again.names) == (number == 0)
    assert not [*(tmp_path / "out").rglob("*states")]


class TextShell(Shell):
    """One that is killed once there is text."""

    def run(self, words, tick):
        if words[0] != "regenerate":
            raise KeyboardInterrupt
        return super().run(words, tick)


class HalfWritten(TextShell):
    """One whose text ends with a status when so many rows are written."""

    status, rows = 1, 5

    def run(self, words, tick):
        super().run(words, tick)
        path = Path(of(words, "--output"))
        path.write_text("".join(path.read_text().splitlines(keepends=True)[: self.rows]))
        return self.status


def test_text_that_broke_off_is_not_taken_for_text_with_rows_missing(target, tmp_path):
    settings, shell = MakeSettings(str(target), hours=HOURS), HalfWritten()
    with pytest.raises(ValueError, match=r"writing text failed: .* status 1"):
        shell.make(settings, tmp_path / "broken")
    shell = HalfWritten()
    shell.status = ROWS_MISSING
    with pytest.raises(KeyboardInterrupt):
        shell.make(settings, tmp_path / "missing")
    shell = HalfWritten()
    shell.status, shell.rows = ROWS_MISSING, 0
    with pytest.raises(ValueError, match=r"status 3.* pass some with --dataset, and another --output"):
        shell.make(settings, tmp_path / "nothing")


def test_prompts_of_which_none_was_answered_can_be_mended(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    settings = MakeSettings(str(target), hours=HOURS, dataset=str(prompts))
    prompts.write_text("".join(json.dumps({"prompt": f"old {n}"}) + "\n" for n in range(12)))
    shell = HalfWritten()
    shell.rows = 0
    with pytest.raises(ValueError, match="writing text failed"):
        shell.make(settings, tmp_path / "out")
    prompts.write_text("".join(json.dumps({"prompt": f"new {n}"}) + "\n" for n in range(12)))
    with pytest.raises(KeyboardInterrupt):
        TextShell().make(settings, tmp_path / "out")
    written = (tmp_path / "out" / "text" / "train.jsonl").read_text()
    assert "new" in written
    assert "old" not in written


def test_for_more_the_same_is_asked_for():
    settings = MakeSettings(
        "org/target",
        kind="pard",
        hours=2.0,
        dataset="my prompts.jsonl",
        base="org/base",
        bf16=False,
        chat_template_kwargs={"enable_thinking": False},
        seed=3,
        trust_remote_code=True,
    )
    asked = []
    stand_in = typer.Typer()
    stand_in.command()(lambda: None)
    stand_in.command("make")(functools.wraps(make)(lambda **options: asked.append(options)))
    stand_in(make_command(settings, "out"), standalone_mode=False)
    (options,) = asked
    assert str(options.pop("output")) == "out"
    assert json.loads(options.pop("chat_template_kwargs")) == settings.chat_template_kwargs
    expected = settings.as_json() | {"kind": options["kind"]}
    del expected["chat_template_kwargs"]
    assert options == expected
    assert make_command(MakeSettings("t"), "o") == [
        "make",
        "--target",
        "t",
        "--kind",
        "dflare",
        "--hours",
        "4",
        "--output",
        "o",
    ]


def test_who_made_a_drafter_is_told_to_write_the_text_that_it_learned():
    """A completion without the chat template is warned about, and drafted badly, where chats were learned."""
    settings = MakeSettings("org/target", chat_template_kwargs={"enable_thinking": False}, trust_remote_code=True)
    models = ["--target", "org/target", "--drafter", "made/d"]
    of_chats = ["chat", *models, "--chat-template-kwargs", '{"enable_thinking": false}', "--trust-remote-code"]
    assert try_it(settings, "made/d", is_of_chats=True) == of_chats
    of_prompts = ["generate", *models, "--stats", "Tell me a story.", "--trust-remote-code"]
    assert try_it(settings, "made/d", is_of_chats=False) == of_prompts


def test_more_hours_are_not_proposed_for_prompts_that_are_all_answered(tmp_path):
    capped = {"steps": 20, "eval_steps": 4, "epochs": 20.0, "is_capped": True}
    text = {"train": 8, "held_out": 4, "tokens": 155}
    for is_all, expected in ((True, "--dataset MORE_PROMPTS"), (False, "--dataset prompts.jsonl")):
        folder = tmp_path / str(is_all)
        making = making_of(folder, text={**text, "is_all": is_all}, training=capped)
        command, reason = what_to_do_for_more(making.commands, making.state)
        assert expected in command
        assert ("all prompts of prompts.jsonl are answered" in reason) == is_all
        assert ("--hours 16 " in command) != is_all


def test_a_card_tells_of_each_file_that_its_commands_read_and_none_writes(made):
    for kind in ("dflare", "pard"):
        _, _, output = made(kind)
        recipe = (output / "recipe.md").read_text()
        for option in ("--dataset", "--eval-dataset", "--base"):
            for command in (line.split() for line in recipe.splitlines() if line.startswith("pardraft ")):
                if option in command:
                    assert f" {of(command, option)}: " in recipe


def test_given_prompts_are_answered_from_all_over(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is {n}", "level": n}) + "\n" for n in range(20)))
    shell = Shell()
    shell.make(MakeSettings(str(target), hours=HOURS, dataset=str(prompts)), tmp_path / "out")
    text = tmp_path / "out" / "text"
    first = [json.loads(line)["prompt"] for line in (text / "prompts-000.jsonl").read_text().splitlines()]
    assert len(first) == 8
    assert first != [f"what is {n}" for n in range(8)]
    rows = [json.loads(line) for name in ("train", "held-out") for line in (text / f"{name}.jsonl").open()]
    assert sorted(row["prompt"] for row in rows) == sorted(f"what is {n}" for n in range(20))
    # Of texts that were cut off it is said, since nobody wrote their ends.
    assert all(row.keys() - {"truncated"} == {"prompt", "completion"} for row in rows)
    assert all(row.get("truncated", True) is True for row in rows)
    # Prompts that are texts are gone on with as they are, in training, and so when it is measured.
    (measuring,) = (words for words in shell.commands if words[0] == "eval")
    assert "--no-chat-template" in measuring


def test_bfloat16_is_asked_of_every_command(target, tmp_path):
    shell = Shell()
    shell.make(MakeSettings(str(target), hours=HOURS, bf16=True), tmp_path / "out")
    by_name = {words[0]: words for words in shell.commands}
    assert of(by_name["regenerate"], "--dtype") == of(by_name["eval"], "--dtype") == "bfloat16"
    assert (of(by_name["train"], "--target-dtype"), of(by_name["train"], "--bf16")) == ("bfloat16", "true")
    # A machine decides by itself.
    settings = MakeSettings(str(target))
    assert CPU.dtype(settings) == "float32"
    assert Machine(True, True).dtype(settings) == "bfloat16"
    assert Machine(True, True).dtype(MakeSettings(str(target), bf16=False)) == "float32"


def refused(*words) -> str:
    return in_process.pardraft("make", *words).error


def test_what_can_not_be_is_refused_before_any_work(target, tmp_path):
    common, out = ["--target", target], tmp_path / "out"
    assert "expected a kind of drafter (dflare, dflash, dart, pard), got 'dflair'" in refused(
        *common, "--output", out, "--kind", "dflair"
    )
    assert "--hours above 0, got 0" in refused(*common, "--output", out, "--hours", 0)
    for hours in ("nan", "inf"):
        assert f"a finite --hours above 0, got {hours}" in refused(*common, "--output", out, "--hours", hours)
    assert "for dflare: leave it out" in refused(*common, "--output", out, "--base", target)
    assert "nowhere" in refused("--target", "nowhere", "--output", out)
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "hello"}\n' * 7)
    assert "expected 8 prompts or more" in refused(*common, "--output", out, "--dataset", few)
    few.write_text('{"messages": "hello"}\n' * 9)
    assert "none of the first 8 prompts in" in refused(*common, "--output", out, "--dataset", few)
    assert "leave it out" not in refused(*common, "--output", out, "--dataset", few)
    few.write_text('{"code": "hello"}\n' * 9)
    assert "expected a column of prompts" in refused(*common, "--output", out, "--dataset", few)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    assert "is not empty (thesis.txt)" in refused(*common, "--output", full)
    assert not out.exists()


def test_a_target_that_can_not_be_tapped_or_cut_down_is_refused_before_any_work(target, tmp_path):
    falcon = tmp_path / "falcon"
    FalconForCausalLM(
        FalconConfig(vocab_size=304, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ).save_pretrained(falcon)
    tiny_chat_tokenizer().save_pretrained(falcon)
    common = ["--target", falcon, "--output", tmp_path / "out"]
    assert "FalconForCausalLM can't select hidden states" in refused(*common)
    assert "name one with --base" in refused(*common, "--kind", "pard")
    shallow = tmp_path / "shallow"
    tiny_target("qwen3", vocab_size=304, num_hidden_layers=1).save_pretrained(shallow)
    tiny_chat_tokenizer().save_pretrained(shallow)
    for kind in ("dflare", "dflash", "dart"):
        told = refused("--target", shallow, "--output", tmp_path / "out", "--kind", kind)
        assert "a target needs at least 2 layers to be tapped, got 1" in told
    assert not (tmp_path / "out").exists()


def test_a_base_of_another_vocabulary_is_refused_before_any_work(target, tmp_path):
    tiny_target("qwen3", vocab_size=80).save_pretrained(tmp_path / "other")
    told = refused("--target", target, "--output", tmp_path / "out", "--kind", "pard", "--base", tmp_path / "other")
    assert f"vocabulary mismatch: the base {tmp_path / 'other'} has 80 tokens and the target 304" in told
    assert "Name another --base" in told
    assert "resize_token_embeddings(304)" in told
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_chat_template_is_asked_for_prompts(tiny_family, tmp_path):
    told = refused("--target", tiny_family / "target", "--output", tmp_path / "out")
    assert "Pass prompts with --dataset" in told


def test_a_begun_run_goes_on_with_its_own_settings_only(target, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Shell(killed_at=0).make(MakeSettings(str(target), hours=HOURS), tmp_path / "out")
    told = refused("--target", target, "--output", tmp_path / "out", "--kind", "dart", "--hours", HOURS)
    assert "begun with kind 'dflare' (now 'dart'): use the same settings to go on, or choose another --output" in told


def end_while_waiting(number: int, script: Path, text: str, begun: Path, monkeypatch) -> None:
    """Send a signal to a process that runs a script as its command, once the script has made a file."""
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    process = os.fork()
    if process == 0:
        try:
            run_command(["demo"], lambda: None)
        finally:
            os._exit(0)
    while not begun.exists():
        time.sleep(0.01)
    os.kill(process, number)
    os.waitpid(process, 0)


def test_a_command_ends_with_the_process_that_waits_for_it(tmp_path, monkeypatch):
    noted = tmp_path / "pid"
    text = f"#!/bin/sh\necho $$ > {noted}.part; mv {noted}.part {noted}; exec sleep 1000\n"
    end_while_waiting(signal.SIGTERM, tmp_path / "command", text, noted, monkeypatch)
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


WAITING = """
import sys, time
from hf_pardraft.making.runner import end_with_parent
end_with_parent()
open(sys.argv[-1], "w").close()
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux can be asked to end a process with its parent")
def test_a_command_ends_even_with_a_process_that_is_killed(tmp_path, monkeypatch):
    noted, waiting = tmp_path / "pid", tmp_path / "waiting"
    text = f"#!/bin/sh\necho $$ > {noted}\nexec {sys.executable} -c '{WAITING}' {waiting}\n"
    end_while_waiting(signal.SIGKILL, tmp_path / "command", text, waiting, monkeypatch)
    command = int(noted.read_text())
    for _ in range(3000):
        if not is_running(command):
            break
        time.sleep(0.01)
    assert not is_running(command)


def is_running(process: int) -> bool:
    """Whether there is such a process, and not just its end that nobody has asked for yet."""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return told.stdout.strip()[:1] not in ("", "Z")


def test_the_time_of_a_command_is_noted_while_it_runs(tmp_path, monkeypatch):
    script, beats = tmp_path / "command", []
    # It ends when it is told that somebody was told.
    script.write_text(f"#!/bin/sh\nwhile [ ! -e {tmp_path}/told ]; do sleep 0.01; done; exit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(runner, "HEARTBEAT", 0.01)
    assert run_command(["demo"], lambda: beats.append((tmp_path / "told").touch())) == 3
    assert beats


def making_of(folder, rows=(), settings=None, **decided) -> Making:
    """A run whose target has written these rows, in answer to prompts, and whose commands do nothing."""
    settings = settings or MakeSettings("tiny", kind="dflash", dataset="prompts.jsonl")
    commands = Commands(settings, RunFolder(folder, "tiny", "DFlash"), True, False, "float32", 304)
    chunks = [{"upto": len(rows), "rows": len(rows), "seconds": 1.0}]
    state = MakeState(folder / "make.json", settings.as_json(), "float32", chunks=chunks, decided=decided)
    commands.folder.text.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"index": index, **row}) + "\n" for index, row in enumerate(rows)]
    (commands.folder.text / "answers-000.jsonl").write_text("".join(lines))
    ran = []
    making = Making(commands, state, lambda words, tick: ran.append(words) or 0, lambda: 0.0, lambda line: None)
    making.ran = ran
    return making


def asked(text, answer="a", **columns):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def parts_of(making) -> tuple[list[dict], list[dict]]:
    """What is learned and what is held out."""
    Text(making.commands, making.state).split()
    files = making.folder.train, making.folder.held_out
    return tuple([json.loads(line) for line in file.open()] for file in files)


def test_what_training_has_to_know_of_a_row_gets_there(tmp_path):
    given = {"truncated": True, "chat_template_kwargs": {"enable_thinking": False}, "tools": [{"type": "function"}]}
    making = making_of(tmp_path, [asked(f"what is {n}", **given, level=3) for n in range(8)])
    for row in (row for part in parts_of(making) for row in part):
        assert {name: row[name] for name in given} == given
        assert "level" not in row
    whole = making_of(tmp_path / "whole", [asked(f"what is {n}", truncated=False) for n in range(8)])
    assert all(row.keys() == {"messages"} for part in parts_of(whole) for row in part)


def test_no_prompt_is_learned_from_that_is_held_out(tmp_path):
    making = making_of(tmp_path, [asked(f"what is {n % 10}", f"answer {n}") for n in range(40)])
    learned, held_out = parts_of(making)
    prompts = [[row["messages"][0]["content"] for row in part] for part in (learned, held_out)]
    assert len(held_out) == 5
    assert len({*prompts[1]}) == 5
    assert not {*prompts[0]} & {*prompts[1]}
    assert len(learned) == 20
    # Where there is one prompt alone, answers to it are all that can be held out.
    learned, held_out = parts_of(making_of(tmp_path / "one", [asked("hi", f"answer {n}") for n in range(8)]))
    assert (len(learned), len(held_out)) == (4, 4)


def test_calls_of_tools_are_counted_and_asked(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    answered = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    row = {"messages": [{"role": "user", "content": "2 + 2"}, call, *answered]}
    assert written_texts(row, prompts_too=False) == ["four"]
    assert written_texts({"messages": [{**call, "content": None}]}, prompts_too=True) == []


def test_whether_states_are_stored_is_decided_once(tmp_path, monkeypatch):
    free = [100e9, 65e9]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
    making = making_of(tmp_path, bytes_per_token=40e3, text={"tokens": 1_000_000})
    making.store_states()
    # A kill later, half of the states are there, and the disk is fuller for that.
    making.store_states()
    assert [words[0] for words in making.ran] == ["cache-features"] * 2
    assert making.state.decided["stored_states"]


def test_without_room_for_states_steps_are_tried_without_them(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e6))
    making = making_of(tmp_path, bytes_per_token=40e3, text={"tokens": 1_000_000})

    def run(words, tick):
        making.ran.append(words)
        making.folder.probe.mkdir()
        history = {"log_history": [{"train_runtime": 20.0}]}
        (making.folder.probe / "trainer_state.json").write_text(json.dumps(history))
        (making.folder.probe / "eval_results.json").write_text(json.dumps({"eval_runtime": 4.0}))
        return 0

    making.run = run
    making.store_states()
    (words,) = making.ran
    assert words[0] == "train"
    assert "--features-folder" not in words
    assert not making.state.decided["stored_states"]
    assert making.state.decided["costs"]["step"] == 16.0 / PROBE_STEPS


def test_a_published_command_names_no_folder_of_this_machine(tmp_path):
    settings = MakeSettings(str(tmp_path / "t"), kind="pard", base=str(tmp_path / "homes" / "base"))
    (tmp_path / "homes" / "base").mkdir(parents=True)
    making = making_of(tmp_path / "made", settings=settings)
    typed = public_command(making.commands, making.commands.train(TrainingPlan(4, 2, 1.0, False), resume=False))
    assert str(tmp_path) not in typed
    assert "--base base" in typed
    assert inside("made/", "other/homemade/x") == "other/homemade/x"
    assert inside("made/", "DFlash=made/x") == "DFlash=x"
