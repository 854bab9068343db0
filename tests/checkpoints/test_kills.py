"""Killed anywhere, by SIGKILL: nothing lost, nothing mixed, and the same command goes on to what it would have made."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tqdm.std import tqdm

from datagen.test_regenerate import conversations, read
from hf_pardraft import AutoDrafter, NgramModel
from hf_pardraft.checkpoints.atomic_folders import stale_weights
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.locks import LOCK
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.regenerate import regenerate
from hf_pardraft.training.run_folder import checkpoints_in, incompleteness
from hf_pardraft.training.target.feature_store import FeatureStore
from hf_pardraft.training.target.feature_writing import cache_features
from processes import in_a_process, kill_before_change, num_changes
from progress_lock import take_own_progress_lock
from published_checkpoints import LAYOUTS
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import tiny_chat_tokenizer
from training.tiny_training import trainer_for, written_text

KILLS = 4


@dataclass(frozen=True)
class Operation:
    """Something that writes into a folder.

    Attributes:
        work: writes; called again, it goes on.
        found: what a reader finds when it is done, to be compared.
        check: looks at what there is after a kill, given what is found before and after.
        prepare: puts there what is there before, if anything is.
    """

    work: Callable[[Path], Any]
    found: Callable[[Path], Any]
    check: Callable[[Path, Any, Any], None]
    prepare: Callable[[Path], Any] | None = None


def weights_found(folder: Path) -> list:
    drafter = AutoDrafter.from_pretrained(folder)
    sums = {name: weight.double().sum().item() for name, weight in sorted(drafter.state_dict().items())}
    fields = drafter.config.to_dict()
    told = {name: fields.get(name) for name in ("model_type", "rms_norm_eps", "pard2_scale")}
    return [sums, told, drafter.generation_config.num_assistant_tokens]


def old_or_new(found: Callable[[Path], Any]) -> Callable[[Path, Any, Any], None]:
    def check(folder: Path, before: Any, after: Any) -> None:
        assert found(folder) in (before, after)

    return check


# Training


def training(target, text) -> Operation:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}

    def work(folder):
        trainer = trainer_for("dflash", target, text, folder, **settings)
        trainer.train(resume_from_checkpoint=True if checkpoints_in(folder) else None)
        trainer.save_model()

    def check(folder, before, after):
        assert [incompleteness(checkpoint) for checkpoint in checkpoints_in(folder)] == [None] * len(
            checkpoints_in(folder)
        )
        for checkpoint in checkpoints_in(folder):
            AutoDrafter.from_pretrained(checkpoint)
        if (folder / "config.json").exists():
            assert weights_found(folder) == after[0]

    return Operation(
        work, lambda folder: (weights_found(folder), [path.name for path in checkpoints_in(folder)]), check=check
    )


# Data


def regenerating(target) -> Operation:
    rows, tokenizer = conversations(6), tiny_chat_tokenizer()

    def work(folder):
        writer = LocalWriter(target, tokenizer, temperature=0.0, max_tokens=3, batch_size=2)
        regenerate(rows, folder / "out.jsonl", writer, "tiny", progress=False)

    def check(folder, before, after):
        file = folder / "out.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        assert len(lines) - len(whole) <= 1
        kept = read(file) if len(lines) == len(whole) and lines else []
        assert all(row in after for row in kept)

    return Operation(work, lambda folder: sorted(read(folder / "out.jsonl"), key=lambda row: row["index"]), check=check)


def caching(target, text) -> Operation:
    taps = tiny_drafter("dflash", target).taps_for(target)

    def work(folder):
        cache_features(target, taps, text, folder, dtype="float32", tokens_per_shard=64)

    def found(folder):
        store = FeatureStore(folder)
        return [store.states(row["input_ids"]).tolist() for row in text]

    def check(folder, before, after):
        try:
            assert found(folder) == after
        except ValueError as error:
            assert "no stored states" in str(error) or "are not complete" in str(error)  # noqa: PT017 (both may be)

    return Operation(work, found, check=check)


def cached_arange() -> Operation:
    def build(seed):
        return lambda folder: NgramModel.from_token_stream(
            [random.Random(seed).choices(range(9), k=60)], vocab_size=9, save_directory=folder
        )

    def found(folder):
        model = NgramModel.from_pretrained(folder)
        return [tensor.tolist() for tensor in (model.table.heads, model.table.rests, model.table.unigrams)]

    return Operation(build(1), found, old_or_new(found), build(0))


# Checkpoints


def saving(target) -> Operation:
    def save(seed, scale, depth):
        def work(folder):
            drafter = tiny_drafter("pard2", target, seed=seed)
            drafter.config.pard2_scale, drafter.generation_config.num_assistant_tokens = scale, depth
            drafter.save_pretrained(folder, max_shard_size="40KB" if seed else "5GB")

        return work

    return Operation(save(7, 0.75, 6), weights_found, old_or_new(weights_found), save(0, 0.25, 3))


def converting(target, source: Path) -> Operation:
    return Operation(
        lambda folder: convert(source, folder, "zlab", overwrite=True),
        weights_found,
        old_or_new(weights_found),
        lambda folder: tiny_drafter("dflash", target).save_pretrained(folder),
    )


NAMES = ("train", "regenerate", "cache-features", "ngram build", "save", "convert")


@pytest.fixture(scope="module")
def operations(tmp_path_factory) -> dict[str, Operation]:
    target = tiny_target("qwen3")
    text = written_text(target, rows=4, length=20)
    chatty = tiny_target("qwen3", vocab_size=len(tiny_chat_tokenizer()), max_position_embeddings=512)
    source = LAYOUTS["zlab"](tmp_path_factory.mktemp("source") / "drafter")
    made = training(target, text), regenerating(chatty), caching(target, text), cached_arange(), saving(target)
    return dict(zip(NAMES, (*made, converting(target, source)), strict=True))


def prepared(operation: Operation, folder: Path) -> Path:
    folder.mkdir()
    if operation.prepare is not None:
        operation.prepare(folder)
    (folder / "notes.txt").write_text("mine")
    return folder


def left_behind(folder: Path) -> list[str]:
    """What nobody has a use for once all is done."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    hidden = {name for name in names if name.startswith((".", LOCK)) and not name.endswith(".settings")}
    files = {name for name in names if (folder / name).is_file()}
    return sorted(
        hidden | {name for name in names if name.endswith((".part", "unfinished-checkpoint"))}
    ) + stale_weights(folder, files)


@pytest.mark.parametrize("name", NAMES)
def test_a_kill_at_any_place_loses_nothing_and_mixes_nothing(name, operations, tmp_path):
    operation = operations[name]
    whole = prepared(operation, tmp_path / "whole")
    before = None if operation.prepare is None else operation.found(whole)
    count = num_changes(lambda: operation.work(whole), whole)
    after = operation.found(whole)
    assert before != after
    draw = random.Random(f"kills {name}")
    for place in draw.sample(range(1, count + 1), KILLS):
        folder = prepared(operation, tmp_path / f"killed-{place}")
        assert kill_before_change(lambda folder=folder: operation.work(folder), folder, place)
        operation.check(folder, before, after)
        operation.work(folder)
        assert operation.found(folder) == after
        assert (folder / "notes.txt").read_text() == "mine"
        assert left_behind(folder) == []


@pytest.mark.parametrize("name", ["train", "regenerate"])
def test_a_kill_at_any_time_loses_nothing_and_mixes_nothing(name, operations, tmp_path):
    """From outside, wherever the process is: in a forward, in a writer that is not Python's, or between two lines."""
    operation = operations[name]
    whole = prepared(operation, tmp_path / "whole")
    started = time.monotonic()
    operation.work(whole)
    seconds, after = time.monotonic() - started, operation.found(whole)
    draw = random.Random(f"times {name}")
    for number in range(2):
        folder = prepared(operation, tmp_path / f"killed-{number}")
        process = os.fork()
        if process == 0:
            try:
                take_own_progress_lock()
                operation.work(folder)
            finally:
                os._exit(0)
        time.sleep(seconds * draw.uniform(0.2, 0.8))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        operation.check(folder, None, after)
        operation.work(folder)
        assert operation.found(folder) == after
        assert left_behind(folder) == []


def test_a_process_that_is_killed_while_it_shows_progress_does_not_stop_its_parent():
    def doomed() -> None:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    # It is made when it is first asked for, and inherited from then on.
    tqdm.get_lock()
    assert in_a_process(doomed) == -signal.SIGKILL
    # Without the lock, releasing it raises.
    tqdm.get_lock().acquire(timeout=5)
    tqdm.get_lock().release()
