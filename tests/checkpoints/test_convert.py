"""Converting there and back is bit-exact, a layout that can't hold a drafter is refused, and folders are written in one piece."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_pardraft import AutoDrafter, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.export import export_drafter
from hf_pardraft.checkpoints.layouts import LAYOUTS as WRITTEN
from hf_pardraft.checkpoints.staging import replaced_checkpoint
from published_checkpoints import LAYOUTS, config_of, copy_fixture, in_shards
from tiny_models import MASK_TOKEN_ID, tiny_drafter, tiny_target

resource = pytest.importorskip("resource")
# Layouts that hold each published one.
HOLDS = {
    "pard": ["pard"],
    "zlab": ["zlab", "speculators", "muse-glimmer"],
    "zlab_nested": ["zlab", "speculators"],
    "speculators": ["zlab", "speculators"],
    "whole_speculators": ["zlab", "speculators", "muse-glimmer"],
    "muse_glimmer": ["muse-glimmer"],
    "angelslim": ["angelslim"],
    "dart": ["dart"],
    "dart_vocab": ["dart"],
}
CHANGING = ("transformers_version", "_name_or_path", "architectures", "auto_map")


def weights_of(folder):
    weights = {}
    for path in Path(folder).glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def facts_of(folder):
    """What has to be the same after a conversion there and back."""
    drafter = AutoDrafter.from_pretrained(folder)
    return {name: value for name, value in drafter.config.to_dict().items() if name not in CHANGING}


def identical(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == weight.dtype and torch.equal(found[name], weight) for name, weight in expected.items()
    )


@pytest.mark.parametrize(("layout", "other"), [(layout, other) for layout, others in HOLDS.items() for other in others])
def test_a_conversion_there_and_back_is_bit_exact(layout, other, tmp_path):
    source = LAYOUTS[layout](tmp_path / "source")
    convert(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "there", other)
    convert(tmp_path / "there", tmp_path / "back", "native")
    assert identical(weights_of(tmp_path / "back"), weights_of(tmp_path / "native"))
    assert (
        facts_of(tmp_path / "there") == facts_of(tmp_path / "back") == facts_of(tmp_path / "native") == facts_of(source)
    )
    direct = convert(source, tmp_path / "direct", other)
    assert identical(weights_of(tmp_path / "direct"), weights_of(tmp_path / "there"))
    assert direct.layout == other


@pytest.mark.parametrize(
    ("layout", "other"), [("zlab", "zlab"), ("pard", "pard"), ("angelslim", "angelslim"), ("dart", "dart")]
)
def test_a_published_checkpoint_comes_out_as_it_went_in(layout, other, tmp_path):
    source = LAYOUTS[layout](tmp_path / "source")
    convert(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", other)
    assert identical(weights_of(tmp_path / "back"), weights_of(source))
    before, after = config_of(source), config_of(tmp_path / "back")
    # What other tools read has the same place and value; fields of a dtype's older name and of training aside.
    aside = {"transformers_version", "auto_map", "torch_dtype", "pretraining_tp", "use_cache", "dtype"}
    assert {k: after.get(k) for k in before if k not in aside} == {k: v for k, v in before.items() if k not in aside}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart", "pard", "pard2"])
def test_every_weight_keeps_the_dtype_it_has_in_its_file(kind, dtype, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3")).to(dtype)
    drafter.save_pretrained(tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    # One of them in another precision, as some publish norms or heads.
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] = torch.rand(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "source", tmp_path / "native")
    assert identical(weights_of(tmp_path / "native"), weights)
    if kind == "pard2":
        parts = [tmp_path / folder / "target_projection" for folder in ("source", "native")]
        assert identical(weights_of(parts[1]), weights_of(parts[0]))


def test_a_published_pard2_drafter_becomes_native_bit_by_bit(tmp_path):
    source = LAYOUTS["pard2"](tmp_path / "source")
    convert(source, tmp_path / "native")
    assert identical(weights_of(tmp_path / "native"), load_file(source / "pard_model" / "model.safetensors"))
    projection = torch.load(source / "pard_model" / "warp_model.bin", weights_only=True)
    assert identical(weights_of(tmp_path / "native" / "target_projection"), projection)
    with pytest.raises(ValueError, match=r"no place for a PARD-2 drafter's projection"):
        convert(source, tmp_path / "pard", "pard")
    assert not (tmp_path / "pard").exists()


def test_settings_of_drafting_and_the_pairing_survive(tmp_path):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"))
    drafter.config.target_name_or_path = "someone/target"
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.tree_budget = 9
    drafter.save_pretrained(tmp_path / "native")
    for layout in HOLDS["zlab"]:
        convert(tmp_path / "native", tmp_path / layout, layout)
        again = AutoDrafter.from_pretrained(tmp_path / layout)
        assert (again.generation_config.num_assistant_tokens, again.generation_config.tree_budget) == (3, 9)
        assert again.config.target_fingerprint == drafter.config.target_fingerprint
        assert again.config.target_name_or_path == "someone/target"
    speculators = config_of(tmp_path / "speculators")["speculators_config"]
    assert speculators["verifier"] == {"name_or_path": "someone/target", "architectures": ["Qwen3ForCausalLM"]}
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 3


def test_a_target_can_be_named_where_the_config_does_not(tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    convert(source, tmp_path / "out", "speculators", target="someone/target")
    assert config_of(tmp_path / "out")["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    with pytest.raises(ValueError, match=r"made for someone/target, got target 'another/one'"):
        convert(tmp_path / "out", tmp_path / "again", "zlab", target="another/one")
    with pytest.raises(ValueError, match=r"made for every target with its tokenizer"):
        convert(LAYOUTS["pard"](tmp_path / "pard"), tmp_path / "again", "pard", target="someone/target")


def test_scaled_rope_is_written_where_others_read_it(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    drafter = tiny_drafter("dflash", tiny_target("qwen3"), rope_parameters=rope)
    drafter.save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "zlab", "zlab")
    config = config_of(tmp_path / "zlab")
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    assert "rope_parameters" not in config
    assert AutoDrafter.from_pretrained(tmp_path / "zlab").config.rope_parameters == drafter.config.rope_parameters


@pytest.mark.parametrize("layer_types", [["sliding_attention", "full_attention"], ["full_attention"] * 2])
@torch.no_grad()
def test_a_dflash_drafter_becomes_transformers_own(layer_types, tmp_path):
    fields = {"layer_types": layer_types, "sliding_window": 6, "use_sliding_window": True}
    drafter = tiny_drafter("dflash", tiny_target("qwen3"), **fields)
    drafter.save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "muse", "muse-glimmer")
    theirs, info = AutoModel.from_pretrained(tmp_path / "muse", output_loading_info=True)
    assert type(theirs) is MuseGlimmerAssistantModel
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    generator = torch.Generator().manual_seed(0)
    width = 32 * len(drafter.config.target_layer_ids)
    arguments = {
        "noise_embeds": torch.randn(1, 5, 32, generator=generator),
        "context_hidden_states": torch.randn(1, 9, width, generator=generator),
        "position_ids": torch.arange(14)[None],
    }
    found, expected = (model(**arguments).last_hidden_state for model in (theirs, drafter))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart", "pard", "pard2"])
@pytest.mark.parametrize("layout", WRITTEN)
def test_a_kind_that_a_layout_does_not_hold_is_refused(kind, layout, tmp_path):
    if WRITTEN[layout].kind == kind:
        return
    tiny_drafter(kind, tiny_target("qwen3")).save_pretrained(tmp_path / "source")
    serves = {"dflare": "speculation_type='dflash'", "dart": r"assistant_model=\.\.\."}
    match = (
        "no place for a PARD-2"
        if (kind, layout) == ("pard2", "pard")
        else f"holds .* drafters.*native.*{serves.get(kind, '')}"
    )
    with pytest.raises(ValueError, match=match):
        convert(tmp_path / "source", tmp_path / "out", layout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("kind", "overrides", "layout", "match"),
    [
        ("dflare", {"fusion": "linear"}, "angelslim", "fusion.*linear.*native"),
        ("dflare", {"fusion_norm": "per_layer"}, "angelslim", "fusion_norm.*per_layer"),
        ("dflare", {"separate_kv": False}, "angelslim", "separate_kv.*False"),
        ("dart", {}, "dart", "double_norm=False"),
        ("dart", {"double_norm": True, "shifted": False}, "dart", "shifted=False"),
        ("dart", {"double_norm": True, "tapped_hidden_states": [1, 2, 3]}, "dart", r"reads \[1, 2, 3\]"),
        ("dflash", {"attention_bias": True}, "muse-glimmer", "attention_bias"),
    ],
)
def test_what_a_layout_can_not_say_is_refused(kind, overrides, layout, match, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3"), **overrides)
    with pytest.raises(ValueError, match=match):
        export_drafter(drafter, tmp_path, layout)
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_without_a_vocabulary_can_not_be_written_where_one_is_named(tmp_path):
    source = LAYOUTS["muse_glimmer"](tmp_path / "source")
    with pytest.raises(ValueError, match=r"set vocab_size in its config.json"):
        convert(source, tmp_path / "out", "zlab")


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown layout 'eagle': expected one of native, zlab"):
        convert(LAYOUTS["zlab"](tmp_path / "source"), tmp_path / "out", "eagle")


def test_an_adapter_is_refused_and_told_how_to_be_merged(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is an adapter.*merge it first, AutoDrafter.from_pretrained"):
        convert(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_read_and_written(tmp_path):
    source = in_shards(copy_fixture("dflash", tmp_path / "source"))
    export_to = tmp_path / "out"
    convert(source, export_to, "zlab", max_shard_size="40KB")
    index = json.loads((export_to / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert identical(weights_of(export_to), weights_of(source))
    assert AutoDrafter.from_pretrained(export_to).config.block_size == 6


def test_the_tokenizer_and_the_licence_come_along(tiny_family, tmp_path):
    target = tiny_family / "target"
    drafter = PardDrafter.from_causal_lm(target)
    drafter.save_pretrained(tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "source" / name).write_bytes((target / name).read_bytes())
    (tmp_path / "source" / "LICENSE").write_text("do as you like")
    convert(tmp_path / "source", tmp_path / "out", "pard")
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_a_companion_that_is_a_link_out_of_the_folder_is_not_copied(tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    (tmp_path / "secret").write_text("secret")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"LICENSE is a link to .*outside of its folder"):
        convert(source, tmp_path / "out", "zlab")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_read_are_told_with_the_reason(tmp_path):
    done = convert(LAYOUTS["whole_speculators"](tmp_path / "source"), tmp_path / "out", "zlab")
    assert set(done.unread) == {"embed_tokens.weight", "lm_head.weight"}
    assert "read from the target" in done.unread["embed_tokens.weight"]
    assert (done.kind, done.num_weights) == ("dflash", len(weights_of(tmp_path / "out")))


def test_tied_weights_are_written_once(tmp_path):
    PardDrafter.from_causal_lm(tiny_target("llama", tie_word_embeddings=True), MASK_TOKEN_ID).save_pretrained(
        tmp_path / "source"
    )
    convert(tmp_path / "source", tmp_path / "out", "pard")
    assert "lm_head.weight" not in weights_of(tmp_path / "out")
    assert identical(weights_of(tmp_path / "out"), weights_of(tmp_path / "source"))
    assert LlamaConfig.from_pretrained(tmp_path / "out").tie_word_embeddings


# The destination


def test_a_destination_with_something_in_it_is_kept_unless_told_otherwise(tmp_path):
    source, out = LAYOUTS["zlab"](tmp_path / "source"), tmp_path / "out"
    convert(source, out)
    (out / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"not empty.*--overwrite"):
        convert(source, out, "zlab")
    assert config_of(out)["model_type"] == "dflash"
    convert(source, out, "zlab", overwrite=True)
    assert config_of(out)["model_type"] == "qwen3"
    assert (out / "mine.txt").read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    source, out = LAYOUTS["zlab"](tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("keep")
    with pytest.raises(FileExistsError, match="no checkpoint and is not replaced"):
        convert(source, out, overwrite=True)
    assert (out / "thesis.tex").read_text() == "keep"
    (tmp_path / "file").write_text("keep")
    with pytest.raises(FileExistsError, match="is a file: choose another name"):
        convert(source, tmp_path / "file", overwrite=True)


def test_an_empty_folder_a_new_path_and_the_source_itself_are_written(tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    expected = weights_of(source)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "new" / "path"):
        convert(source, out, "zlab")
        assert identical(weights_of(out), expected)
    convert(source, source, "native", overwrite=True)
    assert identical(weights_of(source), expected)
    assert config_of(source)["model_type"] == "dflash"
    assert (tmp_path / "empty").stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("layout", ["native", "zlab"])
def test_a_full_disk_leaves_everything_as_it_was(layout, overwrite, tmp_path):
    """The kernel itself stops the writing, as it does at a quota: no file may grow past 20 kB."""
    source, out = LAYOUTS["zlab"](tmp_path / "source"), tmp_path / "out"
    if overwrite:
        convert(source, out, "zlab")
    before = {path.name: path.read_bytes() for path in out.iterdir()} if overwrite else None
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"can't write .*out .*nothing was changed there"):
            convert(source, out, layout, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "source"] if overwrite else ["source"])
    assert before == ({path.name: path.read_bytes() for path in out.iterdir()} if overwrite else None)


def test_a_place_where_nothing_can_be_written(tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"can't write .*nothing was changed there"):
        convert(source, tmp_path / "file" / "out")
    locked = tmp_path / "locked"
    locked.mkdir()
    if os.geteuid() == 0:
        # Permissions stop nobody here, but the kernel's own folders do.
        locked = Path("/sys/kernel")
    else:
        locked.chmod(0o555)
    with pytest.raises(OSError, match=r"can't write .*nothing was changed there"):
        convert(source, locked / "pardraft_out")


def test_an_interrupted_writing_leaves_nothing(tmp_path):
    def write_half():
        with replaced_checkpoint(tmp_path / "out") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert not any(tmp_path.iterdir())


def test_a_source_that_is_damaged_writes_nothing(tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        convert(source, tmp_path / "out", "zlab")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
