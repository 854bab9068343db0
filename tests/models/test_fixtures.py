"""Drafters give the outputs of the published implementations, from the published checkpoints as they are."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft import AutoDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.models.cache import GrowingCache
from hf_pardraft.models.configuration_dflash import default_target_layer_ids
from hf_pardraft.models.inputs import DraftInputs, DraftState
from tiny_models import StandIn

FIXTURES = Path(__file__).parent.parent / "fixtures"


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


BLOCK_DRAFTERS = {"dflash": DFlashDrafter, "dflare": DFlareDrafter}


@torch.no_grad()
@pytest.mark.parametrize("kind", BLOCK_DRAFTERS)
def test_block_drafters_equal_the_reference_at_once_and_in_rounds(kind):
    drafter = AutoDrafter.from_pretrained(FIXTURES / kind)
    assert type(drafter) is BLOCK_DRAFTERS[kind]
    inputs, expected = (load_file(FIXTURES / kind / f"{name}.safetensors") for name in ("inputs", "expected"))
    state, target = None, StandIn(inputs)
    for call in ("full", "round1", "round2", "round3"):
        if call in ("full", "round1"):
            state = drafter.new_draft_state(target)
        features, positions = inputs[f"{call}.target_hidden"], inputs[f"{call}.position_ids"]
        new = features.shape[1]
        context = DraftInputs(
            inputs[f"{call}.block_ids"][:, :1], positions[:, new : new + 1], features, positions[:, :new]
        )
        before = state.cache.get_seq_length()
        logits = drafter.draft(context, state, depth=5)
        assert_close(logits, expected[f"{call}.logits"][:, 1:])
        assert torch.equal(logits.argmax(-1), expected[f"{call}.draft_ids"])
        assert state.cache.get_seq_length() == before + new


@torch.no_grad()
@pytest.mark.parametrize("kind", BLOCK_DRAFTERS)
def test_context_and_layers_of_block_drafters_equal_the_reference(kind):
    drafter = AutoDrafter.from_pretrained(FIXTURES / kind)
    inputs, expected = (load_file(FIXTURES / kind / f"{name}.safetensors") for name in ("inputs", "expected"))
    features = inputs["full.target_hidden"]
    if kind == "dflash":
        assert_close(drafter.hidden_norm(drafter.fc(features)), expected["full.context"])
    else:
        assert_close(drafter.fusion_weights(), expected["fusion_probs"])
        for call in ("full", "round1", "round2", "round3"):
            contexts = drafter.layer_contexts(inputs[f"{call}.target_hidden"])
            assert_close(torch.stack(contexts, dim=2), expected[f"{call}.context"])
    seen = {}
    for index, layer in enumerate(drafter.layers):
        layer.register_forward_hook(lambda _module, _args, output, index=index: seen.update({index: output}))
    hidden = drafter(
        noise_embeds=StandIn(inputs).embedding(inputs["full.block_ids"]),
        context_hidden_states=features,
        position_ids=inputs["full.position_ids"],
    ).last_hidden_state
    assert_close(hidden, expected["full.hidden"])
    for index, output in seen.items():
        assert_close(output, expected[f"full.layer{index}"])


@torch.no_grad()
def test_pard_equals_the_reference_in_single_calls():
    drafter = AutoDrafter.from_pretrained(FIXTURES / "pard")
    assert isinstance(drafter, PardDrafter)
    inputs, expected = (load_file(FIXTURES / "pard" / f"{name}.safetensors") for name in ("inputs", "expected"))
    for case in json.loads((FIXTURES / "pard" / "cases.json").read_text())["cases"]:
        ids = inputs[f"case{case['case']}.input_ids"][:, : case["n"]]
        state = DraftState(GrowingCache())
        logits = drafter.draft(DraftInputs(ids, torch.arange(case["n"])[None]), state, case["K"])
        assert_close(logits, expected[f"case{case['case']}.logits"])
        assert state.cache.get_seq_length() == case["n"]


@torch.no_grad()
def test_pard_equals_the_reference_in_rounds():
    drafter = AutoDrafter.from_pretrained(FIXTURES / "pard")
    inputs, expected = (load_file(FIXTURES / "pard" / f"{name}.safetensors") for name in ("inputs", "expected"))
    state = DraftState(GrowingCache())
    for case in json.loads((FIXTURES / "pard" / "cases.json").read_text())["rounds"]:
        name, new = f"round{case['round']}", case["new_tokens"]
        assert state.cache.get_seq_length() == case["cache_len"]
        context = DraftInputs(inputs[f"{name}.input_ids"][:, :new], inputs[f"{name}.position_ids"][:, :new])
        logits = drafter.draft(context, state, case["K"])
        assert_close(logits, expected[f"{name}.logits"])
        assert torch.equal(logits.argmax(-1), expected[f"{name}.draft_ids"])


def test_taps_follow_the_published_rules():
    rules = json.loads((FIXTURES / "taps" / "rules.json").read_text())
    for case in rules["default_dflash_ids"]:
        found = default_target_layer_ids(case["num_target_layers"], case["num_draft_layers"])
        assert found == case["target_layer_ids"]
    for case in rules["features"]:
        if "target_layer_ids" in case:
            drafter = SimpleNamespace(config=SimpleNamespace(target_layer_ids=case["target_layer_ids"]))
            assert DFlashDrafter.tapped_hidden_states.fget(drafter) == case["tuple_indices"]


@pytest.mark.parametrize("num_layers", range(2, 9))
def test_default_taps_of_a_shallow_target_can_be_tapped(num_layers):
    for num_draft_layers in range(1, 6):
        taps = default_target_layer_ids(num_layers, num_draft_layers)
        assert len(taps) == (1 if num_layers == 2 else num_draft_layers)
        assert all(0 <= tap <= num_layers - 2 for tap in taps)
