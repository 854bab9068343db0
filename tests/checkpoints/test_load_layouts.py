"""Every published layout loads, from every kind of file, into the drafter that its weights and config describe."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaForCausalLM

from hf_pardraft import AutoDrafter, DartDrafter, DFlareDrafter, DFlashDrafter, ParallelDrafter, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.published import OTHER_COMPUTATIONS, layer_ids_of
from published_checkpoints import (
    FIXTURES,
    LAYOUTS,
    change_config,
    config_of,
    copy_fixture,
    in_one_pickle,
    in_shards,
    muse_glimmer,
    muse_glimmer_model,
)
from tiny_models import random_prompt, tiny_drafter, tiny_target

CLASSES = {"pard": PardDrafter, "angelslim": DFlareDrafter, "dart": DartDrafter}


def same_weights(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], w) for name, w in expected.items())


def class_of(layout):
    return CLASSES.get(layout.split("_")[0].rstrip("2"), DFlashDrafter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_loads_as_its_kind_by_both_doors(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    drafter = AutoDrafter.from_pretrained(folder)
    assert isinstance(drafter, class_of(layout))
    assert same_weights(class_of(layout).from_pretrained(folder), drafter)
    # And again in our own layout, under our own names.
    drafter.save_pretrained(tmp_path / "ours")
    ours = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert type(ours) is type(drafter)
    assert same_weights(ours, drafter)
    changing = {"transformers_version", "_name_or_path", "architectures", "auto_map"}
    assert {k: v for k, v in ours.config.to_dict().items() if k not in changing} == {
        k: v for k, v in drafter.config.to_dict().items() if k not in changing
    }


@pytest.mark.parametrize("layout", ["pard", "zlab", "speculators", "muse_glimmer", "angelslim", "dart"])
def test_a_config_may_be_a_file_or_folder_elsewhere(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    expected = AutoDrafter.from_pretrained(folder)
    place = shutil.copytree(folder, tmp_path / "elsewhere")
    for config in (place, place / "config.json", str(place / "config.json")):
        for load in (AutoDrafter.from_pretrained, class_of(layout).from_pretrained):
            found = load(folder, config=config)
            assert same_weights(found, expected)
            assert found.config.to_dict() == {**expected.config.to_dict(), "_name_or_path": found.config._name_or_path}


@pytest.mark.parametrize("layout", ["zlab_nested", "speculators"])
@torch.no_grad()
def test_dflash_in_other_layouts_is_the_same_drafter(layout, tmp_path):
    """The reference's numbers, from the same weights under other names and other conventions for taps."""
    drafter = AutoDrafter.from_pretrained(LAYOUTS[layout](tmp_path / "checkpoint"))
    assert (drafter.config.block_size, drafter.config.mask_token_id) == (6, 95)
    assert drafter.config.target_layer_ids == [1, 3, 5]
    assert drafter.tapped_hidden_states == [2, 4, 6]
    inputs, expected = (load_file(FIXTURES / "dflash" / f"{name}.safetensors") for name in ("inputs", "expected"))
    found = drafter(
        noise_embeds=inputs["target.embed_tokens.weight"][inputs["full.block_ids"]],
        context_hidden_states=inputs["full.target_hidden"],
        position_ids=inputs["full.position_ids"],
    ).last_hidden_state
    torch.testing.assert_close(found, expected["full.hidden"], rtol=2e-4, atol=2e-4)


def test_a_speculators_checkpoint_remembers_its_verifier(tmp_path):
    drafter = AutoDrafter.from_pretrained(LAYOUTS["speculators"](tmp_path / "checkpoint"))
    assert drafter.config.target_name_or_path == "someone/target"


@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]])
@torch.no_grad()
def test_transformers_own_drafter_gives_the_same_hidden_states(layer_types, tmp_path):
    theirs = muse_glimmer_model(layer_types)
    theirs.save_pretrained(tmp_path)
    ours = AutoDrafter.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "noise_embeds": torch.randn(1, 5, 32, generator=generator),
        "context_hidden_states": torch.randn(1, 9, 64, generator=generator),
        "position_ids": torch.arange(14)[None],
    }
    assert ours.tapped_hidden_states == [1, 3]
    found, expected = (model(**arguments).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_drafter_without_a_vocabulary_of_its_own_takes_its_targets(tmp_path):
    drafter, target, prompt = (
        AutoDrafter.from_pretrained(muse_glimmer(tmp_path)),
        tiny_target("qwen3"),
        random_prompt(5),
    )
    assert drafter.config.vocab_size == 0
    options = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(prompt)}
    found = target.generate(prompt, assistant_model=drafter, **options)
    assert torch.equal(found, target.generate(prompt, **options))
    assert drafter.config.vocab_size == 64
    small = tiny_target("qwen3", vocab_size=60)
    with pytest.raises(ValueError, match=r"mask_token_id, an unused token in \[0, 60\), got 63"):
        small.generate(prompt % 60, assistant_model=AutoDrafter.from_pretrained(tmp_path), **options)


@pytest.mark.parametrize("layout", ["pard", "zlab", "speculators", "muse_glimmer", "angelslim", "dart_vocab"])
@pytest.mark.parametrize(
    "rewrite",
    [in_shards, in_one_pickle, lambda folder: in_shards(folder, pickled=True)],
    ids=["shards", "bin", "bin_shards"],
)
def test_weights_are_read_from_every_kind_of_file(layout, rewrite, tmp_path):
    expected = AutoDrafter.from_pretrained(LAYOUTS[layout](tmp_path / "one"))
    assert same_weights(AutoDrafter.from_pretrained(rewrite(LAYOUTS[layout](tmp_path / "other"))), expected)


def test_a_pard2_drafter_is_read_from_pickles(tmp_path):
    folder = LAYOUTS["pard2"](tmp_path / "checkpoint")
    expected = AutoDrafter.from_pretrained(folder)
    in_shards(folder / "pard_model", pickled=True)
    assert same_weights(AutoDrafter.from_pretrained(folder), expected)


@pytest.mark.parametrize("layout", ["pard", "pard2", "speculators", "muse_glimmer", "angelslim", "dart"])
def test_dtype_device_map_and_subfolder_are_those_of_transformers(layout, tmp_path):
    LAYOUTS[layout](tmp_path / "inner" / "drafter")
    subfolder = "inner/drafter/pard_model" if layout == "pard2" else "inner/drafter"
    drafter = AutoDrafter.from_pretrained(tmp_path, subfolder=subfolder, dtype=torch.bfloat16, device_map="meta")
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16}
    assert drafter.device.type == "meta"
    assert AutoDrafter.from_pretrained(tmp_path / subfolder, dtype="auto").dtype == torch.float32


def test_fields_of_the_config_may_be_given_and_the_loading_info_asked_for(tmp_path):
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    drafter, info = AutoDrafter.from_pretrained(folder, block_size=4, output_loading_info=True)
    assert drafter.config.block_size == 4
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare", "dart"])
def test_settings_that_are_given_are_the_drafters(kind, tmp_path):
    tiny_drafter(kind, tiny_target("qwen3")).save_pretrained(tmp_path)
    given = GenerationConfig(num_assistant_tokens=2, tree_budget=6)
    loaded = AutoDrafter.from_pretrained(tmp_path, generation_config=given)
    given.num_assistant_tokens = 3
    assert (loaded.draft_depth, loaded.generation_config.tree_budget) == (2, 6)


@pytest.mark.parametrize("layout", ["pard", "speculators", "muse_glimmer"])
def test_weights_under_other_names_load_by_a_key_mapping(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    expected, weights = AutoDrafter.from_pretrained(folder), load_file(folder / "model.safetensors")
    save_file({f"drafter.{name}": w for name, w in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected keys: drafter\."):
        AutoDrafter.from_pretrained(folder)
    assert same_weights(AutoDrafter.from_pretrained(folder, key_mapping={r"^drafter\.": ""}), expected)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("zlab", "embed_tokens.weight"),
        ("zlab", "lm_head.weight"),
        ("zlab", "rotary_emb.inv_freq"),
        ("angelslim", "embed_tokens.weight"),
        ("speculators", "verifier_norm.weight"),
        ("dart", "embed_tokens.weight"),
        ("dart", "rotary_emb.inv_freq"),
        ("pard", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_what_a_layout_may_carry_and_we_do_not_read_is_let_pass(layout, name, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    expected = AutoDrafter.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_weights(AutoDrafter.from_pretrained(folder), expected)


@pytest.mark.parametrize("layout", ["pard", "zlab", "speculators", "muse_glimmer", "angelslim", "dart"])
def test_every_other_weight_is_named(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("q_proj.weight"))
    changed = {f"{name}_": weights.pop(name), **weights}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"do not fit .*missing keys: {name}; unexpected keys: {name}_"):
        AutoDrafter.from_pretrained(folder)


def test_all_weights_of_another_drafter_are_named_by_kind(tmp_path):
    folder = copy_fixture("dflare", tmp_path / "checkpoint")
    change_config(folder, architectures=["DFlashDraftModel"])
    with pytest.raises(ValueError, match=r"missing keys: fc.weight; unexpected keys: layer_fusion_weights"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"speculators_model_type": "eagle3"}, "no drafter that this package reads: found .*eagle3"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, "index 0 holds the embeddings"),
        ({"aux_hidden_state_layer_ids": ...}, "needs transformer_layer_config and aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": ...}, "needs transformer_layer_config and aux_hidden_state_layer_ids"),
    ],
)
def test_a_speculators_checkpoint_that_is_no_such_drafter_is_refused(change, match, tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "checkpoint")
    change_config(folder, **change)
    with pytest.raises(ValueError, match=match):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("change", [{"causal": True}, {"projector_type": "domino"}, {"final_logit_softcapping": 30.0}])
def test_a_dflash_checkpoint_that_is_computed_otherwise_is_refused(change, tmp_path):
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    nested = config_of(folder)["dflash_config"]
    change_config(folder, dflash_config={**nested, **change})
    with pytest.raises(ValueError, match=f"computed in another way .*{next(iter(change))}"):
        AutoDrafter.from_pretrained(folder)
    change_config(folder, dflash_config={**nested, next(iter(change)): None})
    AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("layout", ["zlab", "angelslim", "speculators"])
@pytest.mark.parametrize(
    "change", [{"is_causal": True}, {"logit_scale": 2.0}, {"is_neox_style": False}, {"use_swa": True}]
)
def test_what_is_said_beside_the_nested_config_counts_too(layout, change, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    place = "transformer_layer_config" if layout == "speculators" else None
    change_config(folder, **({place: {**config_of(folder)[place], **change}} if place else change))
    with pytest.raises(ValueError, match=f"computed in another way .*{next(iter(change))}"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("layout", ["zlab", "angelslim", "speculators", "whole_speculators", "muse_glimmer"])
@pytest.mark.parametrize("nested", [False, True])
def test_no_layout_hides_that_something_is_computed_otherwise(layout, nested, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    inner = config_of(folder).get("dflash_config") or {}

    def say(**fields):
        change_config(folder, **({"dflash_config": {**inner, **fields}} if nested else fields))

    for name, usual in OTHER_COMPUTATIONS.items():
        say(**{name: {None: "domino", False: True, True: False}.get(usual, 2.0)})
        for read in (AutoDrafter.from_pretrained, lambda source: convert(source, tmp_path / "out")):
            with pytest.raises(ValueError, match=f"computed in another way .*{name}"):
                read(folder)
        say(**{name: None})
    say(**OTHER_COMPUTATIONS)
    convert(folder, tmp_path / "out")
    # What was written can be read.
    AutoDrafter.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("layout", ["zlab", "speculators", "muse_glimmer"])
def test_no_layout_may_contradict_itself(layout, tmp_path):
    folder = LAYOUTS[layout](tmp_path / "checkpoint")
    nested = config_of(folder).get("dflash_config") or {}
    change_config(folder, block_size=5, dflash_config={**nested, "block_size": 4})
    with pytest.raises(ValueError, match="gives block_size twice"):
        AutoDrafter.from_pretrained(folder)


def test_a_block_that_is_said_to_be_seen_both_ways_is_what_it_is_without_a_word(tmp_path):
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    expected = AutoDrafter.from_pretrained(folder).config.to_dict()
    change_config(folder, is_causal=False)
    assert AutoDrafter.from_pretrained(folder).config.to_dict() == expected


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 6), ("num_target_layers", 8), ("target_layer_ids", [1, 3, 5])]
)
def test_a_field_may_stand_in_either_place_and_must_say_the_same_in_both(name, value, tmp_path):
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    nested = config_of(folder)["dflash_config"]
    change_config(folder, dflash_config={**nested, name: value}, **{name: ...})
    assert AutoDrafter.from_pretrained(folder).config.to_dict()[name] == value
    change_config(folder, **{name: value})
    assert AutoDrafter.from_pretrained(folder).config.to_dict()[name] == value
    change_config(folder, **{name: [0, 2, 4] if isinstance(value, list) else value + 1})
    with pytest.raises(ValueError, match=f"gives {name} twice"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("layers", [[1, 3, 7], [1, 3, 8]])
def test_the_last_layers_output_can_not_be_tapped(layers, tmp_path):
    """A target keeps it after the final norm only, and published drafters say how deep their target is."""
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    change_config(folder, dflash_config={**config_of(folder)["dflash_config"], "target_layer_ids": layers})
    with pytest.raises(ValueError, match=r"at most 6 for a target of 8 layers .*after the final norm"):
        AutoDrafter.from_pretrained(folder)


def test_speculators_sliding_layers_must_see_the_whole_block(tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "checkpoint")
    layers = config_of(folder)["transformer_layer_config"]
    layers |= {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}
    change_config(folder, transformer_layer_config=layers)
    assert AutoDrafter.from_pretrained(folder).config.layer_types == ["sliding_attention"] * 2
    change_config(folder, sliding_window_non_causal=False)
    with pytest.raises(ValueError, match="sliding_window_non_causal false"):
        AutoDrafter.from_pretrained(folder)


def test_tap_indices_turn_into_each_other():
    drafter = SimpleNamespace(config=SimpleNamespace(target_layer_ids=[0, 3, 5]))
    assert DFlashDrafter.tapped_hidden_states.fget(drafter) == [1, 4, 6]
    assert layer_ids_of([1, 4, 6]) == [0, 3, 5]


@pytest.mark.usefixtures("own_modules")
def test_code_beside_a_known_drafter_is_never_run(tmp_path):
    folder = copy_fixture("dflash", tmp_path / "checkpoint")
    (folder / "dflash.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    assert config_of(folder)["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    for options in ({}, {"trust_remote_code": True}):
        assert type(AutoDrafter.from_pretrained(folder, **options)) is DFlashDrafter
    assert not (tmp_path / "touched").exists()


@pytest.mark.usefixtures("own_modules")
def test_a_drafter_of_an_unknown_layout_runs_its_code_only_if_trusted(tmp_path):
    config = {"model_type": "mystery", "auto_map": {"AutoConfig": "mystery.C", "AutoModel": "mystery.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mystery.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    with pytest.raises(ValueError, match=r"no drafter that this package reads: found .*mystery"):
        AutoDrafter.from_pretrained(tmp_path)
    assert not (tmp_path / "touched").exists()
    with pytest.raises((AttributeError, ValueError, TypeError)):
        AutoDrafter.from_pretrained(tmp_path, trust_remote_code=True)
    assert (tmp_path / "touched").exists()


def test_tied_weights_may_be_left_out_or_repeated(tmp_path):
    base = tiny_target("llama", tie_word_embeddings=True)
    PardDrafter.from_causal_lm(base, 63).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    expected = AutoDrafter.from_pretrained(tmp_path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert same_weights(loaded, expected)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert isinstance(loaded, LlamaForCausalLM)


def test_a_head_of_its_own_in_a_config_that_calls_it_tied_is_kept_and_said(tmp_path):
    PardDrafter.from_causal_lm(tiny_target("qwen3", tie_word_embeddings=True), 63).save_pretrained(tmp_path / "source")
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    for layout in ("native", "pard"):
        convert(tmp_path / "source", tmp_path / layout, layout)
        assert config_of(tmp_path / layout)["tie_word_embeddings"] is False
        assert torch.equal(AutoDrafter.from_pretrained(tmp_path / layout).lm_head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("/nowhere/at/all", FileNotFoundError, "no folder here, and no name of a repository"),
        ("", FileNotFoundError, "no folder here"),
        (__file__, NotADirectoryError, "is a file: name the folder"),
        (None, TypeError, "expected a folder or the name of a repository"),
        (5, TypeError, "expected a folder or the name of a repository"),
    ],
)
def test_what_can_be_no_models_name_is_said_so(name, error, match):
    for load in (AutoDrafter.from_pretrained, PardDrafter.from_causal_lm):
        with pytest.raises(error, match=match):
            load(name)


def test_the_drafter_of_a_training_run_reloads_from_its_own_state_dict():
    drafter = tiny_drafter("dflash", tiny_target("qwen3"))
    again = DFlashDrafter.from_pretrained(None, config=drafter.config, state_dict=drafter.state_dict())
    assert same_weights(again, drafter)


@pytest.mark.parametrize(
    ("kind", "named", "other"),
    [
        ("dart", "DartDrafter", DFlashDrafter),
        ("pard", "PardDrafter", DartDrafter),
        ("dflash", "DFlashDrafter", PardDrafter),
    ],
)
def test_a_class_that_is_not_the_drafters_is_named(kind, named, other, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("llama"))
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"holds a {named}, and {other.__name__} was to load it: use {named} or Auto"):
        other.from_pretrained(tmp_path)


def test_what_all_kinds_have_in_common_is_no_drafter_and_says_who_loads_one(tmp_path):
    with pytest.raises(ValueError, match=r"AutoDrafter\.from_pretrained"):
        ParallelDrafter.from_pretrained(tmp_path)
