"""What we write for serving stacks is read by strict readers that know nothing of us, and means the same to them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_pardraft import AutoDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.checkpoints.export import check_weights, config_and_weights, export_drafter
from in_process import pardraft
from published_checkpoints import FIXTURES, LAYOUTS, change_config, config_of
from strict_readers import RefusedError, draft_hidden, read_pard, read_speculators, read_zlab
from tiny_models import MASK_TOKEN_ID, tiny_drafter, tiny_target

READERS = {"zlab": read_zlab, "speculators": read_speculators}


@pytest.mark.parametrize("layout", READERS)
def test_an_export_drafts_the_references_blocks_for_a_strict_reader(layout, tmp_path):
    convert(FIXTURES / "dflash", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", layout)
    config, taps, weights = READERS[layout](tmp_path / "out")
    assert taps == [2, 4, 6]
    inputs, expected = (load_file(FIXTURES / "dflash" / f"{name}.safetensors") for name in ("inputs", "expected"))
    block = inputs["target.embed_tokens.weight"][inputs["full.block_ids"][0]]
    found = draft_hidden(config, weights, inputs["full.target_hidden"][0], block)
    torch.testing.assert_close(found.float(), expected["full.hidden"][0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("layout", READERS)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_layers": 1, "target_layer_ids": [1]},
        {"attention_bias": True, "block_size": 2},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True},
        {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 40},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_of_drafter_passes_the_strict_reader(layout, overrides, dtype, tmp_path):
    drafter = tiny_drafter("dflash", tiny_target("qwen3"), **overrides).to(dtype)
    export_drafter(drafter, tmp_path, layout)
    config, taps, weights = READERS[layout](tmp_path)
    assert taps == drafter.tapped_hidden_states
    assert config["block_size"] == drafter.config.block_size
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in weights.items())


@pytest.mark.parametrize(("depth", "expected"), [(None, 5), (1, 1), (5, 5)])
def test_speculators_are_told_how_many_tokens_the_drafter_drafts(depth, expected, tmp_path):
    drafter = AutoDrafter.from_pretrained(FIXTURES / "dflash")
    drafter.generation_config.num_assistant_tokens = depth
    export_drafter(drafter, tmp_path, "speculators")
    (proposal,) = config_of(tmp_path)["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == expected


@pytest.mark.parametrize("depth", [50, 6, 0, "x", True, 2.5])
def test_no_other_number_is_told_to_speculators(depth, tmp_path):
    source = LAYOUTS["zlab"](tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": depth}))
    with pytest.raises(ValueError, match="num_assistant_tokens must be between 1 and 5 for this DFlashDrafter"):
        convert(source, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_base_of_a_pard_drafter_passes_the_strict_reader(base, tied, tmp_path):
    drafter = PardDrafter.from_causal_lm(tiny_target(base, tie_word_embeddings=tied), mask_token_id=MASK_TOKEN_ID)
    export_drafter(drafter, tmp_path, "pard")
    weights = read_pard(tmp_path)
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in weights.items())
    assert config_of(tmp_path)["pard_token"] == MASK_TOKEN_ID


def test_the_strict_reader_refuses_what_it_should(tmp_path):
    """A reader that lets everything pass would prove nothing."""
    export_drafter(tiny_drafter("dflash", tiny_target("qwen3")), tmp_path, "zlab")
    for change in (
        {"architectures": ["DFlashDrafter"]},
        {"model_type": "dflash"},
        {"dflash_config": {"mask_token_id": 99, "target_layer_ids": [1]}},
        {"block_size": 1},
        {"layer_types": ["full_attention"]},
        {"num_target_layers": 2},
    ):
        before = (tmp_path / "config.json").read_text()
        change_config(tmp_path, **change)
        with pytest.raises(RefusedError):
            read_zlab(tmp_path)
        (tmp_path / "config.json").write_text(before)
    weights = load_file(tmp_path / "model.safetensors")
    for change in ({"extra.weight": torch.zeros(1)}, {"norm.weight": torch.zeros(7)}):
        save_file({**weights, **change}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RefusedError):
            read_zlab(tmp_path)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("kind", ["dflare", "dart", "pard"])
def test_other_kinds_are_refused_with_what_does_serve_them(kind, layout):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    said = {"pard": "native or pard", "dflare": "No serving stack runs DFlare", "dart": "No serving stack runs DART"}
    with pytest.raises(ValueError, match=said[kind]):
        config_and_weights(drafter, layout)


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart", "pard"])
def test_no_other_weights_are_exported_than_those_of_the_kind(kind):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    weights = drafter.state_dict()
    check_weights(drafter.config, weights)
    name = next(iter(weights))
    for wrong in (
        {**weights, "extra.weight": torch.zeros(1)},
        {n: w for n, w in weights.items() if n != name},
        {**weights, name: torch.zeros(1, 2)},
    ):
        with pytest.raises(ValueError, match="not those of a"):
            check_weights(drafter.config, wrong)


def test_a_class_with_more_weights_is_not_exported(tmp_path):
    class Wider(DFlashDrafter):
        def add_fusion(self):
            super().add_fusion()
            self.extra = torch.nn.Linear(2, 2)

    drafter = Wider(tiny_drafter("dflash", tiny_target("qwen3")).config)
    with pytest.raises(ValueError, match=r"extra.bias: found \(2,\), expected None"):
        export_drafter(drafter, tmp_path, "zlab")


def test_the_command_converts_and_says_what_it_did(tmp_path):
    source = LAYOUTS["speculators"](tmp_path / "source")
    done = pardraft("convert", source, tmp_path / "out", "--to", "zlab")
    assert done.code == 0, done.out
    assert "drafter: dflash" in done.out
    assert "SGLang" in done.out
    assert "not read, embed_tokens.weight: the target's embedding" in done.out
    read_zlab(tmp_path / "out")
    assert "--overwrite" in pardraft("convert", source, tmp_path / "out", "--to", "native").error
    assert pardraft("convert", source, tmp_path / "out", "--to", "native", "--overwrite").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "dflash"
    assert AutoDrafter.from_pretrained(tmp_path / "out").config.target_name_or_path == "someone/target"
    refused = pardraft("convert", source, tmp_path / "other", "--to", "dart")
    assert "holds dart drafters, and this is a dflash drafter" in refused.error
