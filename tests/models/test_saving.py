"""Saving and loading: bit-exact, in the layouts that others read, and never a silent random weight."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
)

from hf_pardraft import AutoDrafter, DartDrafter, DFlareDrafter, DFlashConfig, DFlashDrafter, PardConfig, PardDrafter
from hf_pardraft.pairing.mask_token import choose_mask_token_id
from tiny_models import MASK_TOKEN_ID, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_round_trips_bit_exactly(target, tmp_path, kind, dtype):
    drafter = tiny_drafter(kind, target).to(dtype)
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.tree_budget = 7
    drafter.save_pretrained(tmp_path, with_code=False)
    files = ["config.json", "generation_config.json", "model.safetensors"]
    if kind == "pard2":
        files.append("target_projection")
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    loaded = AutoDrafter.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is type(drafter)
    assert loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.tree_budget == 7
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        # A map of the vocabulary holds whole numbers in every dtype.
        assert loaded.state_dict()[name].dtype == (dtype if weight.is_floating_point() else weight.dtype)
        assert torch.equal(loaded.state_dict()[name], weight)
    changing = {"transformers_version", "_name_or_path"}
    assert {name: value for name, value in loaded.config.to_dict().items() if name not in changing} == {
        name: value for name, value in drafter.config.to_dict().items() if name not in changing
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_drafter_is_the_one_that_is_loaded_from_what_it_saved(target, tmp_path, kind, dtype):
    drafter = tiny_drafter(kind, target).to(dtype)
    drafter.save_pretrained(tmp_path, with_code=False, max_shard_size="20KB")
    loaded = dict(AutoDrafter.from_pretrained(tmp_path, dtype="auto").named_buffers())
    frequencies = {name: buffer for name, buffer in drafter.named_buffers() if name.endswith("inv_freq")}
    assert frequencies
    assert all(torch.equal(buffer, loaded[name]) for name, buffer in frequencies.items())


def test_a_pard_drafter_made_of_a_model_in_half_precision_computes_what_that_does(tmp_path):
    tiny_target("qwen3", max_position_embeddings=4096).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    drafter = PardDrafter.from_causal_lm(base, mask_token_id=MASK_TOKEN_ID)
    ids, positions = torch.arange(3, 12)[None], 3000 + torch.arange(9)[None] ** 2
    assert torch.equal(drafter(ids, position_ids=positions).logits, base(ids, position_ids=positions).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_to_publish_carries_the_code_that_loads_it(target, tmp_path, kind):
    drafter = tiny_drafter(kind, target)
    drafter.config.auto_map = {"AutoModel": "someone/drafter--dflash.DFlashDraftModel", "AutoTokenizer": "of.Another"}
    drafter.save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    expected = {"AutoConfig": type(drafter.config)} | dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM"), type(drafter)
    )
    assert {auto: path.split(".")[1] for auto, path in auto_map.items()} == {
        auto: cls.__name__ for auto, cls in expected.items()
    }
    for path in auto_map.values():
        assert (tmp_path / f"{path.split('.')[0]}.py").exists()
    source = Path(__file__).parents[2] / "src" / "hf_pardraft" / "models"
    code = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert code == {name: (source / name).read_text() for name in code}
    assert (tmp_path / "custom_generate" / "generate.py").read_text() == (source / "generate_anywhere.py").read_text()
    drafter.save_pretrained(tmp_path / "bare", with_code=False)
    assert "auto_map" not in json.loads((tmp_path / "bare" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["dflash", "pard2"])
@pytest.mark.parametrize(
    "step", ["hf_pardraft.checkpoints.saving.write_code", "transformers.modeling_utils.safe_save_file"]
)
def test_a_save_that_fails_leaves_the_folder_as_it_was(target, tmp_path, monkeypatch, kind, step):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    tiny_drafter(kind, target).save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(step, fail)
    with pytest.raises(OSError, match="No space left"):
        tiny_drafter(kind, target, seed=7).save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_state_dict_without_the_projection_is_refused_and_nothing_is_written(target, tmp_path):
    drafter = tiny_drafter("pard2", target)
    weights = {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("target_proj")}
    with pytest.raises(ValueError, match=r"needs its projection \(target_proj\.weight\)"):
        drafter.save_pretrained(tmp_path, state_dict=weights)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_an_earlier_save_in_other_shards_do_not_stay(target, tmp_path):
    first, second = tiny_drafter("dflash", target), tiny_drafter("dflash", target, seed=7)
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(w, second.state_dict()[name]) for name, w in loaded.state_dict().items())
    first.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("model*safetensors*")] == ["model.safetensors"]
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(w, first.state_dict()[name]) for name, w in loaded.state_dict().items())


def test_a_variant_takes_the_place_of_itself_alone(target, tmp_path):
    first, second = tiny_drafter("dflash", target), tiny_drafter("dflash", target, seed=7)
    first.save_pretrained(tmp_path)
    for size in ("5GB", "20KB", "5GB"):
        first.save_pretrained(tmp_path, variant="non-ema", max_shard_size=size)
        second.save_pretrained(tmp_path, variant="fp16", max_shard_size=size)
        assert all((tmp_path / name).exists() for name in ("model.safetensors", "config.json"))
        for variant, drafter in ((None, first), ("non-ema", first), ("fp16", second)):
            loaded = AutoDrafter.from_pretrained(tmp_path, variant=variant)
            assert all(torch.equal(w, drafter.state_dict()[name]) for name, w in loaded.state_dict().items())
    weights = {path.name for path in tmp_path.glob("model*.safetensors*")}
    assert weights == {"model.safetensors", "model.non-ema.safetensors", "model.fp16.safetensors"}


def test_the_class_that_fsdp_makes_is_saved_as_the_drafters_own(target, tmp_path):
    drafter = tiny_drafter("dflash", target)
    drafter.__class__ = type("FSDPDFlashDrafter", (DFlashDrafter,), {"__module__": "torch.distributed.fsdp"})
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDrafter"
    assert (tmp_path / "modeling_dflash.py").exists()


def test_a_class_of_a_script_is_saved_without_code(target, tmp_path):
    class Mine(DFlashDrafter):
        pass

    Mine.__module__ = "__main__"
    Mine(tiny_drafter("dflash", target).config).save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("*.py"))


def test_a_dart_folder_has_the_published_names_and_no_embedding(target, tmp_path):
    tiny_drafter("dart", target).save_pretrained(tmp_path)
    published = load_file(Path(__file__).parent.parent / "fixtures" / "dart" / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == published.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["draft_length"], config["double_norm"]) == ("dart", 3, False)
    assert type(AutoModel.from_pretrained(tmp_path)) is DartDrafter


def test_a_dflash_folder_has_neither_embedding_nor_head(target, tmp_path):
    tiny_drafter("dflash", target).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not [name for name in names if "embed" in name or "lm_head" in name]
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= names
    assert type(AutoModel.from_pretrained(tmp_path)) is DFlashDrafter


def test_a_dflare_folder_has_the_published_names(target, tmp_path):
    tiny_drafter("dflare", target).save_pretrained(tmp_path)
    published = load_file(Path(__file__).parent.parent / "fixtures" / "dflare" / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == published.keys()
    assert type(AutoModel.from_pretrained(tmp_path)) is DFlareDrafter


def test_a_pard_folder_is_an_ordinary_causal_lm_to_transformers(tmp_path, as_transformers_loads):
    drafter = PardDrafter.from_causal_lm(tiny_target("llama"), mask_token_id=MASK_TOKEN_ID)
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["pard_token"], config["spd_type"]) == (MASK_TOKEN_ID, "pard")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(plain) is LlamaForCausalLM
    ids = torch.arange(9)[None]
    assert torch.equal(plain(ids).logits, drafter(ids).logits)


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3"])
def test_the_base_architecture_is_found_from_the_config(tmp_path, base):
    drafter = PardDrafter.from_causal_lm(tiny_target(base), mask_token_id=MASK_TOKEN_ID)
    drafter.save_pretrained(tmp_path)
    assert PardConfig.from_pretrained(tmp_path).model_type == base
    assert type(PardDrafter.from_pretrained(tmp_path)) is type(drafter)
    assert type(PardDrafter(drafter.config)) is type(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_weight_is_named(target, tmp_path, kind):
    tiny_drafter(kind, target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("self_attn.o_proj.weight"))
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing keys: {name}"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_left_over_weight_is_named(target, tmp_path, kind):
    tiny_drafter(kind, target).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["left_over.weight"] = torch.zeros(2, 3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected keys: left_over.weight"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"},
        {"pard_token": 5, "spd_type": "pard3"},
    ],
)
def test_an_unknown_layout_is_refused_with_what_was_found(tmp_path, fields):
    config = {**Qwen3Config(vocab_size=64, hidden_size=32).to_dict(), **fields}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ValueError, match=r"no drafter that this package reads: found .*qwen3"):
        AutoDrafter.from_pretrained(tmp_path)


def test_the_published_nested_layout_is_understood(target):
    flat = DFlashConfig(dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 3], "block_size": 7}, vocab_size=64)
    assert (flat.mask_token_id, flat.target_layer_ids, flat.block_size) == (5, [1, 3], 7)
    assert DFlashConfig(block_size=4, dflash_config={"mask_token_id": 5, "block_size": 7}).block_size == 4


def test_from_causal_lm_leaves_the_model_alone_and_gives_the_mask_a_mean_embedding():
    base = tiny_target("qwen2")
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    drafter = PardDrafter.from_causal_lm(base, mask_token_id=MASK_TOKEN_ID)
    assert all(torch.equal(base.state_dict()[name], weight) for name, weight in before.items())
    table = before["model.embed_tokens.weight"]
    torch.testing.assert_close(drafter.get_input_embeddings().weight[MASK_TOKEN_ID], table.mean(0))
    assert torch.equal(drafter.get_input_embeddings().weight[:MASK_TOKEN_ID], table[:MASK_TOKEN_ID])


@pytest.mark.parametrize("wrong", [-1, 64, 0, 1])
def test_a_mask_token_in_use_or_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="mask_token_id"):
        PardDrafter.from_causal_lm(tiny_target("llama"), mask_token_id=wrong)


def test_a_mask_token_is_picked_from_what_the_tokenizer_leaves_free(tiny_family):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    used = set(json.loads((tiny_family / "target" / "tokenizer.json").read_text())["model"]["vocab"].values())
    for drafter, mask in (
        (PardDrafter.from_causal_lm(tiny_family / "target"), "pard_token"),
        (DFlashDrafter.for_target(target, 1, 4), "mask_token_id"),
    ):
        assert drafter.config.to_dict()[mask] == max(used) + 1


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match=r"llama, qwen2, qwen3.*phi3"):
        PardDrafter.from_causal_lm(tiny_target("phi3"), mask_token_id=MASK_TOKEN_ID)


def test_a_real_tokenizer_gives_the_published_choice():
    """The first id after the last token: for this tokenizer 151669, which the published DFlash drafters use."""
    folder = Path(__file__).parents[3] / "shared" / "tokenizers" / "qwen2.5"
    if not folder.exists():
        pytest.skip("the Qwen2.5 tokenizer is not part of the repository")
    config = Qwen2Config(vocab_size=151936)
    assert choose_mask_token_id(config, None, AutoTokenizer.from_pretrained(folder)) == 151669


def test_a_published_config_names_no_path_of_this_machine(tiny_family, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    DFlashDrafter.for_target(target, 1, 4).save_pretrained(tmp_path / "dflash")
    DFlareDrafter.for_target(target, 1, 4).save_pretrained(tmp_path / "dflare")
    PardDrafter.from_causal_lm(tiny_family / "target").save_pretrained(tmp_path / "pard")
    DartDrafter.for_target(target).save_pretrained(tmp_path / "dart")
    PardDrafter.from_causal_lm(tiny_family / "target", target=target).save_pretrained(tmp_path / "pard2")
    for kind in KINDS:
        assert str(tiny_family) not in (tmp_path / kind / "config.json").read_text()
    assert json.loads((tmp_path / "dflash" / "config.json").read_text())["target_name_or_path"] == "target"
