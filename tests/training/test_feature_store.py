"""Stored hidden states train a drafter as live ones do, and states of something else are refused."""

import json
import os
import random
import resource
import shutil
import signal
from collections import namedtuple

import pytest
import torch
from accelerate import cpu_offload
from safetensors import safe_open

from hf_pardraft.training.target import feature_store, feature_writing
from hf_pardraft.training.target.feature_store import FeatureStore
from hf_pardraft.training.target.feature_writing import cache_features, shards_of, texts_of
from processes import in_a_process
from tiny_models import tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for, written_text

READING = ("pard2", "dflash", "dflare", "dart")


@pytest.fixture(scope="module")
def text(target):
    """Texts of different lengths, so that batches are padded."""
    rows = written_text(target)
    return rows.map(lambda row, index: {name: row[name][: 32 - index] for name in row}, with_indices=True)


def stored(kind, target, text, folder, **options) -> FeatureStore:
    taps = tiny_drafter(kind, target).taps_for(target)
    return cache_features(target, taps, text, folder, **{"dtype": "float32", "tokens_per_shard": 64, **options})


@pytest.mark.parametrize("kind", READING)
def test_losses_are_those_of_the_live_target_and_its_layers_are_not_run(kind, target, text, tmp_path):
    """To 1e-5 in float32: batches of another size round sums of another order."""
    live = trainer_for(kind, target, text, tmp_path / "live")
    live.train()
    live_loss = live.evaluate()["eval_loss"]
    stored(kind, target, text, tmp_path / "states", with_last=kind == "dart")
    read = trainer_for(kind, target, text, tmp_path / "read", features_folder=str(tmp_path / "states"))

    def refuse(*arguments):
        raise AssertionError("the target's layers are run")

    handle = target.model.layers[0].register_forward_hook(refuse)
    try:
        read.train()
        read_loss = read.evaluate()["eval_loss"]
    finally:
        handle.remove()
    assert losses(read) == pytest.approx(losses(live), abs=1e-5)
    assert read_loss == pytest.approx(live_loss, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_states_train_nearly_as_well(dtype, target, text, tmp_path):
    live = trainer_for("dflash", target, text, tmp_path / "live")
    live.train()
    stored("dflash", target, text, tmp_path / "states", dtype=dtype)
    read = trainer_for(
        "dflash", target, text, tmp_path / "read", features_folder=str(tmp_path / "states"), dataloader_num_workers=1
    )
    read.train()
    assert losses(read) == pytest.approx(losses(live), rel=0.05)
    with safe_open(tmp_path / "states" / "00000.safetensors", "pt") as file:
        assert file.get_tensor("states").dtype == getattr(torch, dtype)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_states_are_those_of_each_text_alone(architecture, tmp_path):
    target = tiny_target(architecture)
    rows = [{"input_ids": list(range(3, 3 + length))} for length in (9, 5, 12)]
    store = cache_features(target, [1, 2, -1], rows, tmp_path, dtype="float32", batch_size=2, tokens_per_shard=15)
    assert len(store) == 3
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        states = target(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[1], states[2], states[-1]], dim=-1)[0]
        torch.testing.assert_close(store.states(ids[0]), expected, rtol=1e-4, atol=1e-5)


def test_an_offloaded_target_gives_the_states_that_it_has_in_one_place(target, tmp_path):
    offloaded, rows = cpu_offload(tiny_target("qwen3")), [{"input_ids": list(range(3, 12))}]
    assert offloaded.device.type == "meta"
    stores = [
        cache_features(each, [1], rows, tmp_path / str(each.device), with_last=True) for each in (target, offloaded)
    ]
    ids = torch.tensor(rows[0]["input_ids"])
    assert torch.equal(*(store.states(ids) for store in stores))


def test_a_text_is_stored_once_and_shards_hold_whole_texts():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]
    assert texts_of(rows) == [[1, 2, 3], [4, 5]]
    texts = [[0] * length for length in (3, 3, 5, 1, 9, 2)]
    assert [[len(text) for text in shard] for shard in shards_of(texts, 6)] == [[3, 3], [5, 1], [9], [2]]


def test_a_run_that_was_killed_goes_on_where_it_was(target, text, tmp_path):
    whole = stored("dflash", target, text, tmp_path / "whole")
    write = feature_writing._write_shard

    def write_and_die(folder, name, *arguments):
        write(folder, name, *arguments)
        if name == "00001":
            (folder / "00002.part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        feature_writing._write_shard = write_and_die
        stored("dflash", target, text, tmp_path / "killed")

    assert in_a_process(work) == -signal.SIGKILL
    with pytest.raises(ValueError, match="are not complete"):
        FeatureStore(tmp_path / "killed")
    done = (tmp_path / "killed" / "00001.safetensors").stat().st_mtime_ns
    resumed = stored("dflash", target, text, tmp_path / "killed")
    assert (tmp_path / "killed" / "00001.safetensors").stat().st_mtime_ns == done
    for row in text:
        ids = torch.tensor(row["input_ids"])
        assert torch.equal(resumed.states(ids), whole.states(ids))
    assert not list((tmp_path / "killed").glob("*.part"))


def test_too_little_room_is_noticed_before_the_target_reads_anything(target, text, tmp_path, monkeypatch):
    num_tokens = sum(len(row["input_ids"]) for row in text)
    taps = tiny_drafter("dflash", target).taps_for(target)
    needed = feature_writing.feature_bytes(target, taps, num_tokens, "float16", with_last=True)
    assert needed == num_tokens * 32 * (len(taps) + 1) * 2
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, needed - 1))
    handle = target.model.layers[0].register_forward_hook(lambda *arguments: pytest.fail("the target was run"))
    try:
        with pytest.raises(OSError, match=rf"take {needed} bytes, and .* has {needed - 1} bytes free: make room"):
            cache_features(target, taps, text, tmp_path / "new" / "states", dtype="float16", with_last=True)
    finally:
        handle.remove()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, needed))
    cache_features(target, taps, text, tmp_path / "new" / "states", dtype="float16", with_last=True)


def test_a_shard_that_can_not_be_written_is_named_and_the_next_run_goes_on_there(target, text, tmp_path):
    """Under a limit on the size of files, which safetensors meets in a way of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"shard 00000 could not be written to .*run it again"):
            stored("dflash", target, text, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    assert len(stored("dflash", target, text, tmp_path)) == len(text)


def test_states_of_something_else_are_refused_before_training(target, text, tmp_path):
    stored("dflash", target, text, tmp_path / "states")
    folder = {"features_folder": str(tmp_path / "states")}
    other = tiny_target("qwen3", seed=5)
    with pytest.raises(ValueError, match="are another model's"):
        trainer_for("dflash", other, text, tmp_path, **folder)
    with pytest.raises(ValueError, match="are hidden states"):
        trainer_for("dflare", target, text, tmp_path, drafter=tiny_drafter("dflare", target), **folder)
    with pytest.raises(ValueError, match="reads token ids only"):
        trainer_for("pard", target, text, tmp_path, **folder)
    with pytest.raises(ValueError, match="pardraft cache-features"):
        trainer_for("dflash", target, text, tmp_path, features_folder=str(tmp_path))
    changed = text.map(lambda row: {"input_ids": [5, *row["input_ids"][1:]]})
    with pytest.raises(ValueError, match="has no states of a text of"):
        trainer_for("dflash", target, changed, tmp_path, **folder).train()
    # The folder belongs to the first data, taps and target.
    for arguments in ((target, changed), (other, text)):
        with pytest.raises(ValueError, match="holds the states of another run"):
            stored("dflash", *arguments, tmp_path / "states")


def test_one_store_serves_every_drafter_whose_taps_are_in_it(target, text, tmp_path):
    taps = sorted({tap for kind in ("dflash", "dart") for tap in tiny_drafter(kind, target).taps_for(target)})
    folder = str(tmp_path / "states")
    cache_features(target, taps, text, folder, dtype="float32", with_last=True)
    for kind in ("dflash", "dart"):
        found = []
        for settings in ({}, {"features_folder": folder}):
            trainer = trainer_for(kind, target, text, tmp_path / f"{kind}{len(settings)}", **settings)
            trainer.train()
            found.append(losses(trainer))
        assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_logits_need_the_last_hidden_state(target, text, tmp_path):
    stored("dart", target, text, tmp_path / "states")
    with pytest.raises(ValueError, match="objective"):
        trainer_for("dart", target, text, tmp_path, features_folder=str(tmp_path / "states"))


def test_a_target_that_caps_its_logits_teaches_with_capped_ones(text, tmp_path):
    capped = tiny_target("gemma3", final_logit_softcapping=2.0)
    live = trainer_for("dart", capped, text, tmp_path / "live")
    live.train()
    stored("dart", capped, text, tmp_path / "states", with_last=True)
    read = trainer_for("dart", capped, text, tmp_path / "read", features_folder=str(tmp_path / "states"))
    read.train()
    assert losses(read) == pytest.approx(losses(live), abs=1e-5)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"batch_size": 0}, {"tokens_per_shard": 0}])
def test_settings_out_of_range_are_refused(options, target, text, tmp_path):
    with pytest.raises(ValueError, match="expected a dtype of"):
        stored("dflash", target, text, tmp_path, **options)
    with pytest.raises(ValueError, match="0 texts"):
        stored("dflash", target, [], tmp_path)


def test_states_beyond_float16_are_not_stored_as_infinities(text, tmp_path):
    target = tiny_target("llama")
    target.get_input_embeddings().weight.data *= 1e6
    with pytest.raises(ValueError, match="store them as bfloat16"):
        cache_features(target, [0, 1], text, tmp_path / "narrow", dtype="float16")
    cache_features(target, [0, 1], text, tmp_path / "wide", dtype="bfloat16")


@pytest.mark.parametrize("kind", ["pard2", "dflash", "dart"])
def test_packed_texts_find_the_states_of_each_document(kind, target, text, tmp_path):
    packed = {"packing": True, "max_length": 70}
    live = trainer_for(kind, target, text, tmp_path / "live", **packed)
    live.train()
    # Stored from the single texts, whatever rows they are packed into later.
    stored(kind, target, text, tmp_path / "states", with_last=kind == "dart")
    read = trainer_for(kind, target, text, tmp_path / "read", features_folder=str(tmp_path / "states"), **packed)
    read.train()
    assert losses(read) == pytest.approx(losses(live), abs=1e-5)
    assert len(texts_of(read.train_dataset)) == len(text)
    assert len(read.train_dataset) < len(text)


def test_the_index_says_whose_states_they_are(target, text, tmp_path):
    stored("dflash", target, text, tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["complete"]
    assert index["taps"] == tiny_drafter("dflash", target).taps_for(target)
    assert len(index["target_fingerprint"]) > 1


def read_all(folder, text) -> None:
    store = FeatureStore(folder)
    for row in text:
        store.states(row["input_ids"])


@pytest.mark.parametrize("checked_bytes", [feature_store.CHECKED_BYTES, 0])
def test_a_changed_byte_is_found_before_training_or_when_its_text_is_read(
    checked_bytes, target, text, tmp_path, monkeypatch
):
    store = stored("dflash", target, text, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text())["shards"].keys() == {
        path.stem for path in tmp_path.glob("*.safetensors")
    }
    monkeypatch.setattr(feature_store, "CHECKED_BYTES", checked_bytes)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    content, draw = file.read_bytes(), random.Random(3)
    head = int.from_bytes(content[:8], "little") + 8
    # Of the states, and of the tables beside them.
    for position in (len(content) - 1, *(draw.randrange(head, len(content)) for _ in range(8))):
        file.write_bytes(content[:position] + bytes([content[position] ^ 8]) + content[position + 1 :])
        with pytest.raises(ValueError, match=rf"{file.name} is (damaged|not the shard).*write it anew"):
            read_all(tmp_path, text)
    file.write_bytes(content)
    assert len(FeatureStore(tmp_path)) == len(store)


def test_a_shard_that_is_missing_or_comes_from_elsewhere_is_found(target, text, tmp_path):
    stored("dflash", target, text, tmp_path / "states")
    shards = sorted((tmp_path / "states").glob("*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"should hold {len(shards)} shards, and holds {len(shards) - 1} .*00001"):
        FeatureStore(tmp_path / "states")
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=r"00001.safetensors is not the shard that index.json speaks of"):
        FeatureStore(tmp_path / "states")
    shards[1].write_bytes(content)
    (tmp_path / "states" / "00099.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="of something else: 00099"):
        FeatureStore(tmp_path / "states")


def test_a_shard_that_was_damaged_meanwhile_is_written_again(target, text, tmp_path):
    store = stored("dflash", target, text, tmp_path)
    expected = [store.states(row["input_ids"]).clone() for row in text]
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    content = first.read_bytes()
    # Others have them mapped.
    for file, damaged in ((first, content[:100]), (second, content)):
        file.unlink()
        file.write_bytes(damaged)
    again = stored("dflash", target, text, tmp_path)
    assert all(torch.equal(again.states(row["input_ids"]), states) for row, states in zip(text, expected, strict=True))
