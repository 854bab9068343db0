"""A saved drafter loads, drafts the same, and runs in transformers' own loops where this package is not installed."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_pardraft import PardDrafter
from hf_pardraft.models.base import DrafterServices, ParallelDrafter
from hf_pardraft.models.cache import GrowingCache
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.models.stock_assistant import draft_as_assistant
from hf_pardraft.services import PackageServices
from tiny_models import MASK_TOKEN_ID, random_prompt, tiny_drafter, tiny_target

SCRIPT = Path(__file__).parent / "without_package.py"
CLASSES = {
    "pard-llama": "PardLlama",
    "pard-qwen2": "PardQwen2",
    "pard-qwen3": "PardQwen3",
    "pard2": "PardQwen3",
    "dflash": "DFlashDrafter",
    "dflare": "DFlareDrafter",
    "dart": "DartDrafter",
}
PARDS = [name for name in CLASSES if name.startswith("pard")]
BLOCKS = ["dflash", "dflare"]
DEPTH = 4


def make(name: str, target):
    """A drafter; a PARD drafter of its target's own weights, so that its first draft is always right."""
    if not name.startswith("pard-"):
        return tiny_drafter(name, target, depth=DEPTH)
    base = target if name == "pard-qwen3" else tiny_target(name.removeprefix("pard-"))
    drafter = PardDrafter.from_causal_lm(base, mask_token_id=MASK_TOKEN_ID)
    drafter.generation_config.num_assistant_tokens = DEPTH
    return drafter


@torch.no_grad()
def draft(drafter, target, ids, states) -> torch.Tensor:
    positions = torch.arange(ids.shape[1])[None]
    taps = drafter.tapped_hidden_states
    features = torch.cat([states[i] for i in taps], dim=-1) if taps else None
    context = DraftInputs(ids, positions, features, positions[:, :-1])
    return drafter.draft(context, drafter.new_draft_state(target), DEPTH)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What a process without the package found, and what is expected of it."""
    work = tmp_path_factory.mktemp("published")
    target, ids = tiny_target("qwen3"), random_prompt(7)
    target.save_pretrained(work / "target")
    with torch.no_grad():
        states = torch.stack(target(ids, output_hidden_states=True).hidden_states)[:, :, :-1].contiguous()
    save_file({"ids": ids, "states": states}, work / "inputs.safetensors")
    expected = {}
    for name in CLASSES:
        drafter = make(name, target)
        drafter.generation_config.tree_budget = 5
        drafter.save_pretrained(work / name)
        expected[name] = draft(drafter, target, ids, states)
    environment = {**os.environ, "HF_MODULES_CACHE": str(work / "modules")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(work)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return work, json.loads((work / "found.json").read_text()), load_file(work / "drafts.safetensors"), expected


def test_the_package_was_really_out_of_reach(elsewhere):
    _, found, _, _ = elsewhere
    assert (found["importable"], found["loaded"]) == (False, [])


@pytest.mark.parametrize("name", CLASSES)
def test_the_code_in_the_folder_drafts_the_same(elsewhere, name):
    _, found, drafts, expected = elsewhere
    assert (found[name]["class"], found[name]["remote"]) == (CLASSES[name], True)
    assert found[name]["config"].endswith("Config")
    assert found[name]["settings"] == 5
    assert torch.equal(drafts[name], expected[name])


@pytest.mark.parametrize("name", CLASSES)
def test_a_drafter_saved_there_again_still_carries_its_code(elsewhere, name):
    work, found, _, _ = elsewhere
    assert found[name]["same_again"]
    saved = sorted(str(path.relative_to(work / name)) for path in (work / name).rglob("*") if path.is_file())
    # The card is the one thing that only the package can write.
    assert found[name]["files"] == [file for file in saved if file != "README.md"]
    assert "custom_generate/generate.py" in saved


@pytest.mark.parametrize("name", BLOCKS)
def test_the_stock_loop_runs_block_drafters(elsewhere, name):
    _, found, _, _ = elsewhere
    assert found[name]["stock"]["same"]
    assert set(found[name]["stock"]["drafter_rows"]) == {DEPTH + 1}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_stock_loop_keeps_a_block_drafters_cache_right_when_parts_are_accepted(elsewhere, name):
    _, found, _, _ = elsewhere
    right = found[name]["right"]
    assert right["same"]
    # 16 tokens: a forward for the prompt, and then up to five tokens a forward, fewer where a wrong one comes early.
    assert right["target_forwards"] <= 10 < found[name]["stock"]["target_forwards"]
    assert right["worst"] < 1e-4


@pytest.mark.parametrize("name", PARDS)
def test_the_stock_assisted_loop_gets_its_tokens_from_one_forward(elsewhere, name):
    _, found, _, _ = elsewhere
    stock = found[name]["stock"]
    assert stock["same"]
    # One forward of the drafter for one of the target, each for four positions, but for the end of the text.
    assert len(stock["drafter_rows"]) <= stock["target_forwards"]
    assert stock["drafter_rows"][:3] == [DEPTH] * 3
    assert found[name]["sampled"] == 7 + 8
    assert found[name]["alone"]


def test_a_drafter_that_is_right_saves_the_stock_loop_forwards(elsewhere):
    _, found, _, _ = elsewhere
    assert found["pard-qwen3"]["stock"]["target_forwards"] <= 9


@pytest.mark.parametrize("name", [*BLOCKS, *PARDS])
def test_custom_generate_runs_what_it_can_and_tells_how_to_get_the_rest(elsewhere, name):
    _, found, _, _ = elsewhere
    assert found[name]["by_file"]["same"]
    assert found[name]["by_file"]["drafter_rows"] == found[name]["stock"]["drafter_rows"]
    (warning,) = found[name]["by_file"]["warnings"]
    assert "pip install hf-pardraft" in warning


def test_custom_generate_says_what_dart_needs(elsewhere):
    _, found, _, _ = elsewhere
    assert "pip install hf-pardraft" in found["dart"]["refusal"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_code_in_the_folder_refuses_what_would_draft_wrongly(elsewhere, name):
    _, found, _, _ = elsewhere
    refusals = found[name]["refusals"]
    assert f"missing keys: {refusals['lost']}" in refusals["missing"]
    assert "vocabulary mismatch: the drafter has 64 tokens and the target 65" in refusals["check_target"]
    # Transformers' loops can't run DART, so custom_generate asks for the package first.
    assert ("pip install hf-pardraft" if name == "dart" else "vocabulary mismatch") in refusals["other_target"]
    if name == "pard2":
        assert "without its projection (target_projection/model.safetensors)" in refusals["no_projection"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_fresh_drafter_takes_the_package(elsewhere, name):
    _, found, _, _ = elsewhere
    assert found[name]["refusals"]["fresh"].startswith("ImportError")
    assert "pip install hf-pardraft" in found[name]["refusals"]["fresh"]


@pytest.mark.parametrize("name", PARDS)
def test_a_pard_folder_is_its_base_architecture_to_whom_trusts_no_code(elsewhere, name):
    work, found, _, _ = elsewhere
    config = json.loads((work / name / "config.json").read_text())
    base = {"pard-llama": "Llama", "pard-qwen2": "Qwen2"}.get(name, "Qwen3")
    assert config["architectures"] == [f"{base}ForCausalLM"]
    assert config["model_type"] == base.lower()
    assert found[name]["plain"] == f"{base}ForCausalLM"
    assert found[name]["causal_lm"] == CLASSES[name]


def test_the_package_does_all_that_the_code_in_a_folder_asks_of_it():
    asked = {name: call for name, call in vars(DrafterServices).items() if callable(call) and not name.startswith("_")}
    assert isinstance(ParallelDrafter.services, PackageServices)
    assert "load" in asked
    for name, call in asked.items():
        assert [*inspect.signature(getattr(PackageServices, name)).parameters] == [*inspect.signature(call).parameters]


# A PARD drafter as an assistant, by itself


@pytest.fixture(scope="module")
def pard():
    return PardDrafter.from_causal_lm(tiny_target("qwen3"), mask_token_id=MASK_TOKEN_ID)


def from_scratch(drafter, ids, depth):
    with torch.no_grad():
        masks = torch.full((1, depth - 1), drafter.config.pard_token)
        return drafter(torch.cat([ids, masks], dim=1)).logits[:, -depth:]


@pytest.mark.parametrize("cropped", [0, 1, 3])
def test_an_answer_goes_on_from_the_last_one(pard, cropped):
    ids, longer = random_prompt(6), random_prompt(9)
    longer[:, :6] = ids
    first = draft_as_assistant(pard, ids, 4)
    first.past_key_values.crop(-cropped)
    second = draft_as_assistant(pard, longer, 5, past_key_values=first.past_key_values)
    assert torch.allclose(torch.stack(second.scores, 1), from_scratch(pard, longer, 5), atol=1e-4)
    assert second.past_key_values.get_seq_length() == 9


def test_the_same_text_again_is_answered_the_same(pard):
    ids = random_prompt(6)
    first = draft_as_assistant(pard, ids, 4)
    second = draft_as_assistant(pard, ids, 4, past_key_values=first.past_key_values)
    assert torch.equal(first.sequences, second.sequences)


def test_padding_on_the_left_makes_no_difference(pard):
    ids = random_prompt(6)
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = (torch.arange(9) >= 3).long()[None]
    found = draft_as_assistant(pard, padded, 4, attention_mask=mask)
    expected = draft_as_assistant(pard, ids, 4)
    assert torch.equal(found.sequences[:, 3:], expected.sequences)
    longer = torch.cat([padded, torch.tensor([[5, 6]])], dim=1)
    found = draft_as_assistant(pard, longer, 4, attention_mask=mask, past_key_values=found.past_key_values)
    assert torch.allclose(torch.stack(found.scores, 1), from_scratch(pard, longer[:, 3:], 4), atol=1e-4)


def test_each_draft_goes_through_the_processors_behind_the_drafts_before_it(pard):
    ids, seen = random_prompt(6), []

    def forbid_repeats(sequences, scores):
        seen.append(sequences.tolist())
        return scores.scatter(1, sequences, -torch.inf)

    found = draft_as_assistant(pard, ids, 4, [forbid_repeats], do_sample=True)
    drafted = found.sequences[0, 6:].tolist()
    assert len({*drafted, *ids[0].tolist()}) == 4 + len(set(ids[0].tolist()))
    assert [len(sequence[0]) for sequence in seen] == [6, 7, 8, 9]
    assert all(scores[0, ids[0]].isinf().all() for scores in found.scores)


def test_a_draft_ends_with_the_text(pard):
    ids = random_prompt(6)
    drafted = draft_as_assistant(pard, ids, 4).sequences[0, 6:].tolist()
    end = drafted.index(drafted[1]) + 1
    assert draft_as_assistant(pard, ids, 4, end_ids=[drafted[1]]).sequences[0, 6:].tolist() == drafted[:end]


def test_a_batch_is_refused(pard):
    with pytest.raises(ValueError, match="a batch of 2"):
        draft_as_assistant(pard, random_prompt(3).repeat(2, 1), 4, past_key_values=GrowingCache())
