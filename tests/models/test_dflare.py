"""DFlare: eq. 3 and 4 of its paper, every switch of its ablations, and DFlash where all of them are at DFlash's value."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_pardraft import AutoDrafter, DFlareConfig, DFlareDrafter, DFlashDrafter
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training.layouts import AnchoredBlocks
from hf_pardraft.training.target.reading import target_reading
from tiny_models import MASK_TOKEN_ID, random_prompt, tiny_target

FIXTURE = Path(__file__).parent.parent / "fixtures" / "dflare"
TAPS = [0, 1, 2]
AS_DFLASH = {"fusion": "fc", "separate_kv": False}
# Table 2 of the paper, DFlare's own settings first, and the norms of its other reading.
ABLATIONS = {
    "dflare": {},
    "no softmax": {"fusion": "linear"},
    "shared key/value projections": {"separate_kv": False},
    "extra fc": {"fusion_fc": True},
    "a norm per layer": {"fusion_norm": "per_layer"},
    "all at once": {"fusion": "linear", "separate_kv": False, "fusion_fc": True, "fusion_norm": "per_layer"},
    "dflash's fusion": {"fusion": "fc"},
    "dflash's fusion, a norm per layer": {"fusion": "fc", "fusion_norm": "per_layer"},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def dflare(target, seed=0, num_layers=3, block_size=5, **overrides):
    torch.manual_seed(seed)
    fields = {"target_layer_ids": TAPS, "mask_token_id": MASK_TOKEN_ID, **overrides}
    return DFlareDrafter.for_target(target, num_layers, block_size, **fields)


def shaken(drafter, scale=0.3):
    """The drafter with all weights, norms and fusion included, away from where training starts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return drafter


def draft_in_rounds(drafter, target, dtype=torch.float32, batch=2):
    """Logits of three rounds, of which the second has items of different lengths."""
    generator = torch.Generator().manual_seed(5)
    state, logits = drafter.new_draft_state(target), []
    lengths = torch.zeros(batch, 1, dtype=torch.long)
    for new, counts in ((6, None), (3, [3, 1]), (2, None)):
        features = torch.randn(batch, new, 32 * len(TAPS), generator=generator).to(dtype)
        num_new = torch.tensor([[new]] * batch if counts is None else [[count] for count in counts])
        positions = (lengths + num_new + torch.arange(-new, 0)).clamp(min=0)
        lengths = lengths + num_new
        anchors = torch.randint(3, 60, (batch, 1), generator=generator)
        context = DraftInputs(anchors, lengths, features, positions, feature_counts=counts)
        logits.append(drafter.draft(context, state, 4))
    return logits


# DFlash is the case in which every switch is off


def twins(target):
    """A DFlash drafter, and a DFlare drafter with its weights."""
    torch.manual_seed(0)
    options = {"num_layers": 3, "block_size": 5, "mask_token_id": MASK_TOKEN_ID, "target_layer_ids": TAPS}
    dflash = shaken(DFlashDrafter.for_target(target, **options))
    twin = DFlareDrafter.for_target(target, **options, **AS_DFLASH)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in dflash.named_parameters()]
    twin.load_state_dict(dflash.state_dict())
    return dflash, twin


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_dflashs_switches_it_drafts_bit_for_bit_as_dflash(target, dtype):
    dflash, twin = (drafter.to(dtype) for drafter in twins(target))
    found, expected = (draft_in_rounds(drafter, target, dtype) for drafter in (twin, dflash))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def learn_once(drafter, target, batch) -> None:
    """Leave the gradients of one batch's cross-entropy."""
    features = target_reading(drafter, target, batch).features
    logits = AnchoredBlocks.forward(drafter, drafter, target, batch, features, lambda head, states: head(states))
    torch.nn.functional.cross_entropy(logits, AnchoredBlocks.supervised(batch, drafter).labels).backward()


def test_with_dflashs_switches_it_learns_bit_for_bit_as_dflash(target):
    ids = random_prompt(20)[0].tolist()
    batch = AnchoredBlocks(MASK_TOKEN_ID, block_size=5)([{"input_ids": ids, "labels": [-100] * 4 + ids[4:]}])
    gradients = []
    for drafter in twins(target):
        learn_once(drafter, target, batch)
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])


@torch.no_grad()
@pytest.mark.parametrize("name", list(ABLATIONS)[1:])
def test_every_switch_changes_what_the_same_weights_draft(target, name):
    drafter, ablated = shaken(dflare(target)), shaken(dflare(target, **ABLATIONS[name]))
    ablated.load_state_dict(drafter.state_dict(), strict=False)
    found, other = (draft_in_rounds(one, target) for one in (ablated, drafter))
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(found, other, strict=True))


# Eq. 3, by loops


def rms_norm(vector, weight, eps):
    return vector * torch.rsqrt((vector * vector).mean() + eps) * weight


def contexts_by_loops(drafter, features):
    """(batch, new, layers, H): one position, one layer and one tap at a time, in float64."""
    config, weights = drafter.config, {name: w.double() for name, w in drafter.state_dict().items()}
    batch, new, _ = features.shape
    result = torch.zeros(batch, new, config.num_hidden_layers, config.hidden_size, dtype=torch.float64)
    for item in range(batch):
        for position in range(new):
            taps = features[item, position].double().split(config.hidden_size)
            for layer in range(config.num_hidden_layers):
                if config.fusion == "fc":
                    fused = weights["fc.weight"] @ torch.cat(taps)
                else:
                    alpha = weights["layer_fusion_weights"][layer]
                    if config.fusion == "softmax":
                        alpha = alpha.exp() / alpha.exp().sum()
                    fused = sum(alpha[j] * tap for j, tap in enumerate(taps))
                if config.fusion_fc:
                    fused = weights["fusion_fc.weight"] @ fused
                name = "hidden_norm.weight" if config.fusion_norm == "shared" else f"hidden_norm.{layer}.weight"
                result[item, position, layer] = rms_norm(fused, weights[name], config.rms_norm_eps)
    return result


@torch.no_grad()
@pytest.mark.parametrize("name", ABLATIONS)
def test_each_layers_context_is_that_of_the_paper(target, name):
    drafter = shaken(dflare(target, **ABLATIONS[name]))
    features = torch.randn(2, 4, 32 * len(TAPS), generator=torch.Generator().manual_seed(0))
    found = torch.stack(drafter.layer_contexts(features), dim=2)
    torch.testing.assert_close(found.double(), contexts_by_loops(drafter, features), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_fusion_weights_are_computed_in_float32(target):
    drafter = shaken(dflare(target)).to(torch.bfloat16)
    weights = drafter.layer_fusion_weights.double()
    assert drafter.fusion_weights().dtype == torch.float32
    torch.testing.assert_close(drafter.fusion_weights().double(), weights.softmax(dim=1), rtol=1e-6, atol=1e-7)
    assert not torch.equal(drafter.fusion_weights(), drafter.layer_fusion_weights.softmax(dim=1).float())


# Eq. 4


@torch.no_grad()
@pytest.mark.parametrize("separate", [True, False])
def test_context_and_block_have_their_own_projections_or_share_one(target, separate):
    drafter = shaken(dflare(target, separate_kv=separate))
    attention = drafter.layers[1].self_attn
    context, block = torch.randn(1, 3, 32), torch.randn(1, 5, 32)
    keys, values = attention.keys_and_values(context, block)
    weights = attention.state_dict()
    suffix = "_proj_target.weight" if separate else "_proj.weight"
    assert ("k_proj_target.weight" in weights) == ("v_proj_target.weight" in weights) == separate
    for found, letter in ((keys, "k"), (values, "v")):
        torch.testing.assert_close(found[:, :3], context @ weights[letter + suffix].T)
        torch.testing.assert_close(found[:, 3:], block @ weights[f"{letter}_proj.weight"].T)


# At inference


def generate(target, drafter=None, **options):
    prompt = random_prompt(7)
    options = {"do_sample": False, "max_new_tokens": 20, **options}
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options)


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_leaves_the_text_as_it_is(target, name):
    assert torch.equal(generate(target, dflare(target, **ABLATIONS[name])), generate(target))


def test_each_position_of_the_context_is_projected_once(target):
    drafter, widths, positions = dflare(target), [], []
    drafter.layers[1].self_attn.k_proj_target.register_forward_hook(
        lambda _m, args, _o: widths.append(args[0].shape[1])
    )
    drafter.register_forward_pre_hook(
        lambda _m, _a, kwargs: positions.append(kwargs["position_ids"][0, :-5].tolist()), with_kwargs=True
    )
    length = generate(target, drafter).shape[1]
    assert len(widths) > 5
    assert widths == [len(new) for new in positions]
    # All of the text, but what was committed after the last draft.
    assert [position for new in positions for position in new] == list(range(sum(widths)))
    assert sum(widths) >= length - 3


def test_fusion_weights_are_computed_once_a_call_and_follow_training(target, monkeypatch):
    drafter, calls = dflare(target), []
    compute = DFlareDrafter.fusion_weights
    monkeypatch.setattr(DFlareDrafter, "fusion_weights", lambda self: calls.append(1) or compute(self))
    generate(target, drafter)
    assert (len(calls), drafter.last_stats.rounds > 5) == (1, True)
    before = draft_in_rounds(drafter, target)
    with torch.no_grad():
        drafter.layer_fusion_weights.data.copy_(torch.randn(3, len(TAPS)))
    assert not torch.equal(draft_in_rounds(drafter, target)[0], before[0])


@torch.no_grad()
def test_the_kept_fusion_weights_draft_what_the_bare_forward_drafts(target):
    """transformers' own loop calls the forward without them."""
    drafter = shaken(dflare(target))
    kept = draft_in_rounds(drafter, target)
    new_draft_state = drafter.new_draft_state

    def without(target):
        state = new_draft_state(target)
        state.constants = {}
        return state

    drafter.new_draft_state = without
    assert all(torch.equal(*pair) for pair in zip(draft_in_rounds(drafter, target), kept, strict=True))


# Defaults


def test_a_fresh_drafter_has_the_papers_size():
    deep = tiny_target("qwen3", num_hidden_layers=36, hidden_size=8, intermediate_size=8)
    drafter = DFlareDrafter.for_target(deep, mask_token_id=MASK_TOKEN_ID)
    config = drafter.config
    assert (config.num_hidden_layers, config.block_size) == (7, 16)
    assert config.target_layer_ids == [1, 5, 9, 13, 17, 21, 25, 29, 33]
    assert drafter.layer_fusion_weights.shape == (7, 9)
    assert DFlareConfig().num_hidden_layers == 7


def test_training_starts_from_the_tap_at_the_layers_own_depth():
    config = DFlareConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        mask_token_id=1,
        target_layer_ids=list(range(9)),
    )
    weights = DFlareDrafter(config).layer_fusion_weights
    assert weights.argmax(dim=1).tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert sorted(weights.unique().tolist()) == [0.0, 2.0]
    config.fusion = "linear"
    torch.testing.assert_close(DFlareDrafter(config).fusion_weights(), weights.softmax(dim=1))


def test_a_published_config_without_taps_has_one_per_draft_layer():
    published = json.loads((FIXTURE / "config.json").read_text())
    published |= {"num_hidden_layers": 7, "num_target_layers": 36, "layer_types": None}
    del published["dflash_config"]["target_layer_ids"]
    assert DFlareConfig.from_dict(published).target_layer_ids == [1, 6, 12, 17, 22, 28, 33]


# Training


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_weight_of_every_ablation_learns(target, name):
    drafter = shaken(dflare(target, **ABLATIONS[name]))
    ids = random_prompt(16)[0].tolist()
    batch = AnchoredBlocks(MASK_TOKEN_ID, block_size=5)([{"input_ids": ids, "labels": ids}])
    learn_once(drafter, target, batch)
    still = [name for name, parameter in drafter.named_parameters() if not parameter.grad.abs().max() > 0]
    assert still == []


# Files


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_round_trips_bit_exactly(target, tmp_path, name):
    drafter = shaken(dflare(target, **ABLATIONS[name]))
    drafter.save_pretrained(tmp_path)
    for loaded in (AutoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is DFlareDrafter
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
        assert all(torch.equal(loaded.state_dict()[key], weight) for key, weight in drafter.state_dict().items())
        found, expected = (draft_in_rounds(one, target) for one in (loaded, drafter))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_published_checkpoint_saved_again_is_the_same(tmp_path):
    drafter = AutoDrafter.from_pretrained(FIXTURE)
    drafter.save_pretrained(tmp_path)
    published, saved = (load_file(folder / "model.safetensors") for folder in (FIXTURE, tmp_path))
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in published.items())
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.config.target_layer_ids == [1, 3, 5]
    assert (again.config.fusion, again.config.separate_kv) == ("softmax", True)


@pytest.mark.parametrize("name", ["layer_fusion_weights", "layers.1.self_attn.k_proj_target.weight"])
def test_a_published_checkpoint_without_one_of_its_weights_is_refused(tmp_path, name):
    shutil.copy(FIXTURE / "config.json", tmp_path)
    weights = load_file(FIXTURE / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing keys: {name}"):
        AutoDrafter.from_pretrained(tmp_path)


def test_neither_drafter_takes_the_others_weights():
    with pytest.raises(ValueError, match=r"missing keys: .*layer_fusion_weights.*unexpected keys: fc\.weight"):
        DFlareDrafter.from_pretrained(FIXTURE.parent / "dflash")
    with pytest.raises(ValueError, match=r"missing keys: fc\.weight.*unexpected keys: layer_fusion_weights"):
        DFlashDrafter.from_pretrained(FIXTURE)


# Bad input


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fusion": "attention"}, "fusion must be one of .*got 'attention'"),
        ({"fusion_norm": "none"}, "fusion_norm must be one of .*got 'none'"),
        ({"fusion": "fc", "fusion_fc": True}, "fusion_fc.*set fusion to 'softmax'"),
        ({"target_hidden_size": 48}, "expected target_hidden_size 32.*got 48"),
        ({"block_size": 1}, "a DFlareDrafter needs block_size >= 2"),
    ],
)
def test_a_configuration_that_cannot_draft_is_refused(target, fields, match):
    with pytest.raises(ValueError, match=match):
        dflare(target, **fields)
