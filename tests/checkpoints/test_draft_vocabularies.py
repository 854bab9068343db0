"""Checkpoints with a draft vocabulary: what is published is read, kept and written again; a PARD drafter stays a plain model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_pardraft import AutoDrafter, DFlashConfig, DFlashDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.models.modeling_pard import VOCABULARY_FILE
from published_checkpoints import DRAFT_TOKEN_IDS, FIXTURES, LAYOUTS, change_config, config_of
from strict_readers import read_pard, read_speculators, read_zlab
from tiny_models import MASK_TOKEN_ID, StandIn, random_prompt, tiny_drafter, tiny_target

KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
IDS = [2, 3, 5, 8, 13, 21, 34, 55]


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def change_weights(folder, **weights):
    """Set weights of a folder's main file; `None` takes one away."""
    changed = weights_of(folder) | weights
    kept = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_vocabulary_is_saved_with_the_drafter(kind, tmp_path):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.draft_token_ids.tolist() == IDS
    assert loaded.config.draft_vocab_size == len(IDS)
    maps = load_file(tmp_path / VOCABULARY_FILE) if kind.startswith("pard") else weights_of(tmp_path)
    assert (torch.arange(len(IDS)) + maps["d2t"]).tolist() == maps["t2d"].nonzero().flatten().tolist() == IDS
    prompt, options = random_prompt(5), {"max_new_tokens": 10, "do_sample": False}
    texts = [target.generate(prompt, assistant_model=each, **options) for each in (drafter, loaded)]
    assert torch.equal(*texts)
    assert loaded.last_stats.tokens_per_round == drafter.last_stats.tokens_per_round


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_was_taken_back_leaves_nothing_in_the_folder(kind, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    size = drafter.config.draft_vocab_size
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path)
    drafter.set_draft_vocabulary(None)
    after = drafter.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert drafter.config.draft_vocab_size == size
    drafter.save_pretrained(tmp_path)
    assert not (tmp_path / "draft_vocabulary" / "model.safetensors").exists()
    assert AutoDrafter.from_pretrained(tmp_path).draft_token_ids is None


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare"])
def test_a_saved_drafter_can_be_widened_again(kind, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    loaded.set_draft_vocabulary(None)
    assert loaded.draft_token_ids is None
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_a_pard_drafter_stays_a_plain_model_to_others(architecture, tmp_path, as_transformers_loads):
    from hf_pardraft import PardDrafter

    drafter = PardDrafter.from_causal_lm(tiny_target(architecture), MASK_TOKEN_ID).eval()
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path / "native", with_code=False)
    convert(tmp_path / "native", tmp_path / "pard", "pard")
    read_pard(tmp_path / "pard")
    prompt = random_prompt(6)
    for folder in (tmp_path / "native", tmp_path / "pard"):
        plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]
        assert type(plain).__module__.startswith("transformers.")
        assert torch.equal(plain(prompt).logits, drafter(prompt).logits)
        assert AutoDrafter.from_pretrained(folder).draft_token_ids.tolist() == IDS


@torch.no_grad()
def test_a_published_reduced_head_is_what_scores_a_draft(tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "source")
    head = weights_of(folder)["lm_head.weight"]
    # Another than the target's, to tell whose it is.
    change_weights(folder, **{"lm_head.weight": head + 1})
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.draft_token_ids.tolist() == DRAFT_TOKEN_IDS
    target = StandIn(load_file(FIXTURES / "dflash" / "inputs.safetensors"))
    scoring = drafter.new_draft_state(target).lm_head
    assert torch.equal(scoring.weight, head + 1)
    assert not scoring.weight.requires_grad
    drafter.set_draft_vocabulary(drafter.draft_token_ids)
    assert torch.equal(drafter.new_draft_state(target).lm_head.weight, head)


@pytest.mark.parametrize("layout", ["speculators", "zlab"])
def test_a_published_reduced_head_is_kept_whoever_brings_the_config(layout, tmp_path):
    convert(LAYOUTS["speculators"](tmp_path / "source"), tmp_path / "out", layout)
    head = weights_of(tmp_path / "out")["lm_head.weight"]
    change_config(tmp_path / "out", draft_vocab_size=...)
    config = DFlashConfig.from_pretrained(tmp_path / "out")
    before = config.to_dict()
    for drafter in (
        DFlashDrafter.from_pretrained(tmp_path / "out", config=config),
        AutoModel.from_pretrained(tmp_path / "out", config=config),
    ):
        assert drafter.draft_token_ids.tolist() == DRAFT_TOKEN_IDS
        assert torch.equal(drafter.lm_head.weight, head)
    assert config.to_dict() == before


@pytest.mark.parametrize("change", [{"lm_head.weight": None}, {"lm_head.weight": torch.zeros(96, 32)}])
def test_maps_without_their_rows_take_those_of_the_target(change, tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "source")
    change_weights(folder, **change)
    drafter = AutoDrafter.from_pretrained(folder)
    target = StandIn(load_file(FIXTURES / "dflash" / "inputs.safetensors"))
    assert not drafter.config.own_head
    assert torch.equal(drafter.new_draft_state(target).lm_head.weight, target.head.weight[DRAFT_TOKEN_IDS])


@pytest.mark.parametrize(("layout", "reader"), [("zlab", read_zlab), ("speculators", read_speculators)])
def test_a_reduced_head_is_written_again(layout, reader, tmp_path):
    source = LAYOUTS["speculators"](tmp_path / "source")
    convert(source, tmp_path / "out", layout)
    reader(tmp_path / "out")
    written, read = weights_of(tmp_path / "out"), weights_of(source)
    assert all(torch.equal(written[name], read[name]) for name in ("d2t", "t2d", "lm_head.weight"))
    assert config_of(tmp_path / "out")["draft_vocab_size"] == len(DRAFT_TOKEN_IDS)
    assert "own_head" not in config_of(tmp_path / "out")


def test_maps_that_the_config_says_nothing_of_are_read_too(tmp_path):
    """z-lab's config has no field for a draft vocabulary, and servers look at the weights."""
    convert(LAYOUTS["speculators"](tmp_path / "source"), tmp_path / "out", "zlab")
    change_config(tmp_path / "out", draft_vocab_size=...)
    assert AutoDrafter.from_pretrained(tmp_path / "out").draft_token_ids.tolist() == DRAFT_TOKEN_IDS


def test_rows_that_the_drafter_does_not_have_are_not_exported_until_it_has(tmp_path):
    target = tiny_target("qwen3")
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path / "borrowing")
    with pytest.raises(ValueError, match=r"set_draft_vocabulary\(drafter.draft_token_ids, target\)"):
        convert(tmp_path / "borrowing", tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    drafter.set_draft_vocabulary(drafter.draft_token_ids, target)
    drafter.save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "out", "speculators")
    read_speculators(tmp_path / "out")
    assert torch.equal(weights_of(tmp_path / "out")["lm_head.weight"], target.lm_head.weight[IDS])


@pytest.mark.parametrize(("kind", "layout"), [("dflash", "muse-glimmer"), ("dflare", "angelslim")])
def test_a_layout_without_a_place_for_it_is_refused(kind, layout, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="no place for a draft vocabulary, and this drafter has one of 8 tokens"):
        convert(tmp_path / "source", tmp_path / "out", layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None, "t2d": None}, "missing keys: d2t, t2d"),
        ({"d2t": torch.zeros(40, dtype=torch.long)}, "d2t maps 40 draft tokens and t2d marks 40"),
        ({"d2t": torch.zeros(39, dtype=torch.long)}, "d2t has shape"),
        ({"t2d": torch.ones(96, dtype=torch.bool)}, "t2d marks 96 target tokens"),
        (
            {"lm_head.weight": torch.zeros(39, 48)},
            r"lm_head.weight .*\(39, 48\), expected rows of the 40 .*or of all 96",
        ),
        ({"lm_head.weight": torch.zeros(())}, r"lm_head.weight .*\(\), expected rows of the 40 .*or of all 96"),
        ({"lm_head.weight": torch.zeros(40, 47)}, r"lm_head.weight has shape \(40, 47\)"),
    ],
)
def test_damaged_maps_of_a_published_drafter_are_refused(change, message, tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "source")
    change_weights(folder, **change)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("shape", [(), (0,), (40, 1), (97,)])
def test_a_map_that_says_no_size_is_refused(shape, tmp_path):
    convert(LAYOUTS["speculators"](tmp_path / "source"), tmp_path / "out", "zlab")
    change_config(tmp_path / "out", draft_vocab_size=...)
    change_weights(tmp_path / "out", d2t=torch.zeros(shape, dtype=torch.long), **{"lm_head.weight": None})
    with pytest.raises(ValueError, match=r"d2t|draft_vocab_size"):
        AutoDrafter.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("size", [97, 0, "many"])
def test_a_size_that_can_t_be_is_refused(size, tmp_path):
    folder = LAYOUTS["speculators"](tmp_path / "source")
    change_config(folder, draft_vocab_size=size)
    with pytest.raises(ValueError, match=r"draft_vocab_size|d2t"):
        AutoDrafter.from_pretrained(folder)


def test_a_pard_drafter_without_its_vocabulary_file_is_refused(tmp_path):
    drafter = tiny_drafter("pard", tiny_target("qwen3"))
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / VOCABULARY_FILE
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(ValueError, match=r"a drafter of 8 tokens .* without draft_vocabulary/model.safetensors"):
        AutoDrafter.from_pretrained(tmp_path)
    file.write_bytes(whole[:-4] + b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="is damaged: the checksums"):
        AutoDrafter.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoDrafter.from_pretrained(tmp_path).draft_token_ids is None


MAPS = {"d2t": torch.tensor(IDS) - torch.arange(len(IDS)), "t2d": torch.isin(torch.arange(64), torch.tensor(IDS))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Of tokens that the target doesn't have.
        (
            {"d2t": torch.full((8,), 60), "t2d": torch.cat([torch.zeros(60), torch.ones(8)]).bool()},
            r"t2d.*\(64,\).*\(68,\)",
        ),
        ({"t2d": torch.isin(torch.arange(56), torch.tensor(IDS))}, r"t2d.*\(64,\).*\(56,\)"),
        ({"d2t": MAPS["d2t"].float()}, "d2t.*I64.*float32"),
        ({"d2t": MAPS["d2t"].int()}, "d2t.*I64.*I32"),
        ({"t2d": MAPS["t2d"].long()}, "t2d.*BOOL.*I64"),
        ({"d2t": torch.tensor(1)}, r"d2t.*\(8,\).*\(\)"),
        ({"d2t": MAPS["d2t"][:7].clone()}, r"d2t.*\(8,\).*\(7,\)"),
        ({"d2t": torch.zeros(8, dtype=torch.long)}, "d2t in .* maps 8 draft tokens and t2d marks 8"),
        ({"other": torch.zeros(1)}, "other"),
        ({"t2d": None}, "expected .*t2d"),
    ],
)
@pytest.mark.parametrize("kind", ["pard", "pard2"])
def test_damaged_maps_of_a_pard_drafter_are_refused(kind, change, message, tmp_path):
    drafter = tiny_drafter(kind, tiny_target("qwen3"))
    drafter.set_draft_vocabulary(IDS)
    drafter.save_pretrained(tmp_path)
    maps = {name: values for name, values in {**MAPS, **change}.items() if values is not None}
    save_file(maps, tmp_path / VOCABULARY_FILE)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(tmp_path)
    save_file(MAPS, tmp_path / VOCABULARY_FILE)
    assert AutoDrafter.from_pretrained(tmp_path).draft_token_ids.tolist() == IDS
