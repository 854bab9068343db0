"""Damaged, absurd and hostile checkpoints: each gives an error that says what is wrong, and nothing of it is run."""

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_pardraft import AutoDrafter, DFlashDrafter
from hf_pardraft.checkpoints.checksums import METADATA_KEY, add_checksums
from hf_pardraft.checkpoints.config_checks import NAMES
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.tensor_files import describe_safetensors
from hf_pardraft.checkpoints.weights import all_finite
from published_checkpoints import LAYOUTS, change_config, config_of, copy_fixture, in_one_pickle, in_shards, pard2
from tiny_models import tiny_drafter, tiny_target


@pytest.fixture
def folder(tmp_path):
    return copy_fixture("dflash", tmp_path / "checkpoint")


def damage(file: Path, position: int, mask: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= mask
    file.write_bytes(bytes(content))


def header_length(file: Path) -> int:
    return struct.unpack("<Q", file.read_bytes()[:8])[0]


def change_weights(folder: Path, **changes) -> None:
    weights = load_file(folder / "model.safetensors") | changes
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Harmful:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


# Weight files


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1, -5000])
def test_a_file_that_is_cut_off(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file .*get it again"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"\xff" * 4096]
)
def test_a_file_that_is_something_else(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        AutoDrafter.from_pretrained(folder)


def test_a_flipped_bit_in_a_header_is_an_error_or_harmless(folder):
    """Wherever it is: no load gives other weights than those that were published."""
    file, expected = folder / "model.safetensors", load_file(folder / "model.safetensors")
    content, draw = file.read_bytes(), random.Random(0)
    for position in draw.sample(range(8 + header_length(file)), 24):
        damage(file, position, 1 << draw.randrange(8))
        try:
            loaded = AutoDrafter.from_pretrained(folder).state_dict()
        except ValueError as error:
            assert str(folder) in str(error)  # noqa: PT017 (some flips are harmless)
        else:
            assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
        file.write_bytes(content)


@pytest.mark.parametrize("kind", ["dflash", "pard2"])
def test_a_flipped_bit_in_weights_that_we_saved_is_found_by_their_checksums(kind, tmp_path):
    tiny_drafter(kind, tiny_target("qwen3")).save_pretrained(tmp_path)
    draw, files = random.Random(1), list(tmp_path.rglob("*.safetensors"))
    assert len(files) == (2 if kind == "pard2" else 1)
    for file in files:
        content = file.read_bytes()
        for _ in range(3):
            damage(file, draw.randrange(8 + header_length(file), len(content)), 1 << draw.randrange(8))
            with pytest.raises(ValueError, match=r"is damaged: the checksums of 1 tensors \(.*\) are not those"):
                AutoDrafter.from_pretrained(tmp_path)
            file.write_bytes(content)
    AutoDrafter.from_pretrained(tmp_path)


def test_every_layout_that_we_write_has_checksums(tmp_path):
    convert(copy_fixture("dflash", tmp_path / "source"), tmp_path / "out", "zlab")
    file = tmp_path / "out" / "model.safetensors"
    damage(file, file.stat().st_size - 3)
    with pytest.raises(ValueError, match="checksums"):
        AutoDrafter.from_pretrained(tmp_path / "out")


def test_checksums_change_nothing_else_and_are_replaced(folder):
    file = folder / "model.safetensors"
    weights, facts = load_file(file), describe_safetensors(file)
    for _ in range(2):
        add_checksums(file)
        assert describe_safetensors(file) == facts
        assert all(torch.equal(found, weights[name]) for name, found in load_file(file).items())
    assert json.loads(file.read_bytes()[8 : 8 + header_length(file)])["__metadata__"].keys() == {"format", METADATA_KEY}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("text", ["x", "", "null", "1", "[1]", '"text"', "[" * 5000])
def test_checksums_that_are_no_object(folder, text):
    file = folder / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", METADATA_KEY: text})
    with pytest.raises(
        ValueError, match=r"model.safetensors is damaged: pardraft.crc32 .*should hold a checksum for each"
    ):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(folder, value):
    weight = load_file(folder / "model.safetensors")["norm.weight"]
    weight[3] = value
    change_weights(folder, **{"norm.weight": weight})
    with pytest.raises(ValueError, match=r"infinities or NaN \(norm.weight\)"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_numbers_are_numbers(dtype):
    weight = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(weight)
    for value in (float("inf"), float("-inf"), float("nan")):
        weight[2, 1] = value
        assert not all_finite(weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_another_kind_of_number(folder, dtype):
    weight = load_file(folder / "model.safetensors")["fc.weight"]
    change_weights(folder, **{"fc.weight": weight.to(dtype)})
    with pytest.raises(ValueError, match=r"fc.weight has dtype .*expected floating-point numbers of 16 bits or more"):
        AutoDrafter.from_pretrained(folder)


def test_a_vocabulary_map_of_floats(tmp_path):
    folder = copy_fixture("dart_vocab", tmp_path / "checkpoint")
    change_weights(folder, d2t=torch.zeros(48))
    with pytest.raises(ValueError, match="d2t has dtype float32, expected int64"):
        AutoDrafter.from_pretrained(folder)


def test_weights_of_another_shape(folder):
    change_weights(folder, **{"fc.weight": torch.zeros(48, 96)})
    with pytest.raises(ValueError, match=r"fc.weight has shape \(48, 96\), and config.json asks for \(48, 144\)"):
        AutoDrafter.from_pretrained(folder)


def test_a_projection_of_whole_numbers_or_without_numbers(tmp_path):
    folder = pard2(tmp_path / "repository") / "pard_model"
    for weight, match in (
        (torch.zeros(48, 64, dtype=torch.int32), "should hold floating-point numbers"),
        (torch.full((48, 64), float("nan")), "infinities or NaN"),
    ):
        torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")
        with pytest.raises(ValueError, match=match):
            AutoDrafter.from_pretrained(folder)


# Pickles


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("layout", ["pard", "zlab", "dart"])
def test_a_pickle_that_holds_a_program_is_not_run(layout, shards, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    if shards:
        in_shards(folder, pickled=True)
        file = folder / "pytorch_model-00002-of-00003.bin"
    else:
        file = in_one_pickle(folder) / "pytorch_model.bin"
    torch.save({**torch.load(file), "norm.weight": Harmful(tmp_path / "touched")}, file)
    for load in (AutoDrafter.from_pretrained, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"holds more than tensors.*was not run \(weights_only=True\)"):
            load(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_not_run(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harmful(tmp_path / "touched")}))
    with pytest.raises(ValueError, match=r"pytorch_model.bin"):
        AutoDrafter.from_pretrained(folder)
    assert not (tmp_path / "touched").exists()


def test_reading_pickles_with_programs_can_not_be_asked_for(folder):
    with pytest.raises(ValueError, match="weights_only=True only"):
        AutoDrafter.from_pretrained(in_one_pickle(folder), weights_only=False)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b"garbage" * 100])
def test_a_pickle_that_is_cut_off_or_something_else(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin (is not a whole PyTorch file|holds more than tensors, or is damaged)"
    ):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"fc.weight": 3}, torch.zeros(2)])
def test_a_pickle_of_other_things_than_tensors_by_name(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="should hold tensors by name"):
        AutoDrafter.from_pretrained(folder)


# Shard indices


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "inner/../../outside.safetensors", "..", "", "..\\outside", "inner/file"],
)
def test_an_index_that_leads_elsewhere(folder, tmp_path, name, pickled):
    save_file(load_file(folder / "model.safetensors"), tmp_path / "outside.safetensors")
    in_shards(folder, pickled=pickled)
    file = next(folder.glob("*.index.json"))
    index = json.loads(file.read_text())
    index["weight_map"]["fc.weight"] = name
    file.write_text(json.dumps(index))
    for load in (AutoDrafter.from_pretrained, DFlashDrafter.from_pretrained):
        with pytest.raises(ValueError, match=r"names the file .*, which is not beside it"):
            load(folder)


def test_a_shard_that_is_a_link_out_of_the_folder(folder, tmp_path):
    in_shards(folder)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match=r"is a link to .*outside of its folder"):
        AutoDrafter.from_pretrained(folder)


def test_links_of_the_hubs_cache_are_followed(folder, tmp_path):
    """A snapshot's files are links to blobs beside it, and a path to it may be given as a folder."""
    in_shards(folder)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert AutoDrafter.from_pretrained(snapshot).config.block_size == 6


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"fc.weight": 3}}', "{"])
def test_an_index_that_is_none(folder, index):
    in_shards(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index.json"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": []}, {"metadata": "x"}])
def test_an_index_whose_metadata_is_no_object(folder, metadata, pickled):
    in_shards(folder, pickled=pickled)
    file = next(folder.glob("*.index.json"))
    weight_map = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({"weight_map": weight_map, **metadata}))
    with pytest.raises(
        ValueError, match=r"index.json should hold an object under metadata, got .*: get the file again"
    ):
        AutoDrafter.from_pretrained(folder)
    file.write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    AutoDrafter.from_pretrained(folder)


def test_a_shard_that_is_missing_or_repeats_another(folder):
    in_shards(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(OSError, match=r"names model-00002-of-00003.safetensors, which is missing"):
        AutoDrafter.from_pretrained(folder)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match="once more, after another shard"):
        AutoDrafter.from_pretrained(folder)
    shards[1].write_bytes(content)
    AutoDrafter.from_pretrained(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"holds no weights: expected one of model.safetensors, .*pytorch_model.bin"):
        AutoDrafter.from_pretrained(folder)


def test_a_variant_that_is_not_there_is_named(folder):
    names = r"model\.fp16\.safetensors, model\.safetensors\.index\.fp16\.json, pytorch_model\.fp16\.bin"
    with pytest.raises(OSError, match=f"holds no weights: expected one of {names}"):
        AutoDrafter.from_pretrained(folder, variant="fp16")


# Configs


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", '"text"', "\x00", "not json", '{"a": 1', "[" * 5000])
def test_a_config_that_is_no_object(folder, content):
    (folder / "config.json").write_text(content)
    for load in (AutoDrafter.from_pretrained, DFlashDrafter.from_pretrained):
        with pytest.raises(ValueError, match=r"config.json"):
            load(folder)


def test_a_folder_without_a_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"config.json"):
        AutoDrafter.from_pretrained(folder)


ABSURD = [
    ("hidden_size", -48),
    ("hidden_size", "48"),
    ("hidden_size", 10**15),
    ("hidden_size", 48.5),
    ("hidden_size", True),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 10**9),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 0),
    ("head_dim", 15),
    ("head_dim", [16]),
    ("vocab_size", -1),
    ("intermediate_size", {}),
    ("rms_norm_eps", "small"),
    ("rms_norm_eps", -1.0),
    ("rope_theta", 0),
    ("rope_scaling", [1]),
    ("layer_types", "full_attention"),
    ("layer_types", ["full_attention"]),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("attention_bias", "no"),
    ("auto_map", "dflash.DFlashDraftModel"),
    ("dflash_config", [95]),
    ("dflash_config", {"mask_token_id": "95", "target_layer_ids": [1, 3, 5]}),
    ("dflash_config", {"mask_token_id": 95, "target_layer_ids": "1, 3, 5"}),
    ("dflash_config", {"mask_token_id": 95, "target_layer_ids": [1, None]}),
    ("block_size", 10**9),
    ("block_size", "6"),
    ("num_target_layers", -8),
    ("transformers_weights", "../model.safetensors"),
    ("torch_dtype", "int8"),
    ("dtype", "load"),
    ("dtype", 5),
    ("rope_scaling", {"rope_type": "yarn", "factor": 0}),
    ("rope_scaling", {"rope_type": "linear", "factor": -2.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0, 0], "long_factor": [1.0]}),
    # A repository of kernels is a program.
    ("attn_implementation", "someone/kernel"),
    ("_attn_implementation", {"": "someone/kernel@main:function"}),
    ("experts_implementation", "someone/kernel"),
]


@pytest.mark.parametrize(("name", "value"), ABSURD)
def test_an_absurd_field_is_named_before_anything_is_built(folder, name, value, monkeypatch):
    monkeypatch.setattr(DFlashDrafter, "__init__", lambda *_: pytest.fail("a model was built"))
    change_config(folder, **{name: value})
    field = name if name != "dflash_config" or isinstance(value, list) else "mask_token_id|target_layer_ids"
    field = "the rope" if name.startswith("rope_") and isinstance(value, dict) else field
    for load in (AutoDrafter.from_pretrained, DFlashDrafter.from_pretrained):
        with pytest.raises(ValueError, match=rf"({field}).* should .*mend config.json"):
            load(folder)


@pytest.mark.parametrize(
    ("layout", "name", "match"),
    [
        ("zlab", "dflash_config", "needs mask_token_id"),
        ("zlab", "hidden_size", r"has shape .* and config.json asks for"),
        ("zlab", "num_attention_heads", r"has shape .* and config.json asks for"),
        ("zlab", "architectures", None),
        ("zlab", "model_type", None),
        ("pard", "pard_token", "no drafter that this package reads"),
        ("pard", "model_type", "model_type"),
        ("pard", "hidden_size", r"has shape .* and config.json asks for"),
        ("dart", "draft_length", "no drafter that this package reads"),
        ("dart", "vocab_size", r"has shape|draft_vocab_size"),
        ("angelslim", "num_hidden_layers", r"missing keys|layer_types"),
    ],
)
def test_a_field_that_is_missing(layout, name, match, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    change_config(folder, **{name: ...})
    if match is None:
        assert AutoDrafter.from_pretrained(folder).config.block_size == 6
        return
    with pytest.raises(ValueError, match=match):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "nonsense"),
        ("hidden_act", 5),
        ("initializer_range", "wide"),
        ("rope_scaling", {"rope_type": "nonsense"}),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("eos_token_id", "end"),
    ],
)
def test_a_field_of_which_nothing_can_be_built(folder, name, value):
    change_config(folder, **{name: value})
    with pytest.raises(ValueError, match=r"no DFlashDrafter can be built of the config of .*mend config.json"):
        AutoDrafter.from_pretrained(folder)


CHATS = {"template_hash": "x", "template_kwargs": {}, "prompt_end": "a", "prompt_end_ids": [1]}
REMEMBERED_OTHERWISE = [
    *((name, value) for name in NAMES for value in (7, ["x"], {})),
    ("target_fingerprint", "x"),
    ("target_fingerprint", [0.5, None]),
    ("chat_format", "chatml"),
    ("chat_format", {}),
    *(("chat_format", {name: value for name, value in CHATS.items() if name != gone}) for gone in CHATS),
    *(("chat_format", {**CHATS, name: 7}) for name in CHATS),
    ("chat_format", {**CHATS, "prompt_end_ids": "z"}),
    ("chat_format", {**CHATS, "prompt_end_ids": ["z"]}),
]


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart", "adapter"])
def test_what_is_remembered_of_training_has_a_form(kind, tmp_path, saved_drafters):
    folder = shutil.copytree(saved_drafters / kind, tmp_path / "drafter")
    for name, value in REMEMBERED_OTHERWISE:
        change_config(folder, **{name: value})
        with pytest.raises(ValueError, match=rf"{name} in the config of .* should be .*mend config.json"):
            AutoDrafter.from_pretrained(folder)
        change_config(folder, **{name: None})
    # And what is as it should be.
    change_config(folder, **dict.fromkeys(NAMES, "x"), target_fingerprint=[1, 0.5], chat_format=CHATS)
    assert AutoDrafter.from_pretrained(folder).config.chat_format == CHATS


@pytest.fixture
def saved_drafters(tmp_path):
    """A folder with a drafter of some kinds, and with an adapter of one of them."""
    work, target = tmp_path / "saved", tiny_target("qwen3")
    for kind in ("pard", "dflash", "dart"):
        tiny_drafter(kind, target).save_pretrained(work / kind, with_code=False)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_drafter("pard", target), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(work / "pard")
    adapted.save_pretrained(work / "adapter")
    shutil.copy(work / "pard" / "config.json", work / "adapter")
    return work


@pytest.mark.parametrize("layout", ["zlab", "speculators", "muse_glimmer", "angelslim", "dart"])
@pytest.mark.parametrize("chat_format", ["chatml", {"type": "chatml"}])
def test_what_others_mean_by_such_a_name_is_not_read(layout, chat_format, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    change_config(folder, **dict.fromkeys(NAMES, 7), target_fingerprint="x", chat_format=chat_format)
    drafter = AutoDrafter.from_pretrained(folder)
    assert {getattr(drafter.config, name) for name in (*NAMES, "target_fingerprint", "chat_format")} == {None}
    drafter.save_pretrained(tmp_path / "ours")
    AutoDrafter.from_pretrained(tmp_path / "ours")


def test_more_layers_than_weights_are_not_built(folder, monkeypatch):
    monkeypatch.setattr(DFlashDrafter, "__init__", lambda *_: pytest.fail("a model was built"))
    change_config(folder, num_hidden_layers=1024, layer_types=...)
    with pytest.raises(ValueError, match=r"do not fit a DFlashDrafter \(1024 layers, and the files hold \d+ weights\)"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("fields", [{"sliding_window": None}, {"sliding_window": 8, "use_sliding_window": False}])
def test_a_layer_with_a_window_needs_its_size(folder, fields):
    change_config(folder, layer_types=["sliding_attention", "full_attention"], use_sliding_window=True)
    change_config(folder, **fields)
    with pytest.raises(
        ValueError, match=r"sliding_window in .* should be a whole number for its sliding_attention layers"
    ):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("layout", ["pard", "zlab", "dart"])
@pytest.mark.parametrize("content", ['{"num_assistant_tokens": 5', "[1]", ""])
def test_a_generation_config_that_is_cut_off_or_none(layout, content, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config.json (is not valid JSON|should hold a JSON object)"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("value", ["five", 2.5, 0])
def test_a_depth_that_is_none_is_named_before_drafting(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": value}))
    with pytest.raises(ValueError, match="num_assistant_tokens must be between 1 and 5"):
        _ = AutoDrafter.from_pretrained(folder).draft_depth


def test_architectures_of_any_form_are_looked_at_calmly(folder):
    for value in ("DFlashDraftModel", [3], {"a": 1}, None):
        change_config(folder, architectures=value, dflash_config=config_of(folder)["dflash_config"])
        assert isinstance(AutoDrafter.from_pretrained(folder), DFlashDrafter)


def test_an_uncommon_file_or_link_in_a_folder_is_left_alone(folder, tmp_path):
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    (folder / "modeling_dflash.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    (folder / "link").symlink_to("/etc")
    change_config(
        folder, auto_map={"AutoConfig": "evil.C", "AutoModel": "modeling_dflash.M", "AutoModelForCausalLM": "evil.M"}
    )
    for load in (
        AutoDrafter.from_pretrained,
        DFlashDrafter.from_pretrained,
        lambda path: convert(path, tmp_path / "out", "zlab"),
    ):
        load(folder)
    assert not (tmp_path / "touched").exists()
    assert "auto_map" not in config_of(tmp_path / "out")
    assert not (tmp_path / "out" / "evil.py").exists()
