"""A PARD drafter whose masks have an id each: which ids may, what it drafts, how deep, and what becomes of it on disk."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from hf_pardraft import AutoDrafter, PardConfig, PardDrafter
from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.models.stock_assistant import draft_as_assistant
from hf_pardraft.pairing.mask_token import check_mask_token_id, choose_mask_token_id, unused_token_ids
from tiny_models import random_prompt, tiny_target

MASKS = [63, 40, 52]
DEPTH = len(MASKS) + 1


def distinct(architecture: str = "qwen3", masks=MASKS, **options) -> PardDrafter:
    """Of a target's own weights, so that the first token that it drafts is right."""
    return PardDrafter.from_causal_lm(tiny_target(architecture), mask_token_id=masks, **options)


@torch.no_grad()
def from_scratch(drafter, ids, masks) -> torch.Tensor:
    tail = torch.tensor([masks], dtype=torch.long).expand(len(ids), -1)
    return drafter(torch.cat([ids, tail], dim=1)).logits[:, -len(masks) - 1 :]


def byte_fallback_tokenizer(words=(), unk="<unk>") -> PreTrainedTokenizerFast:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], unk_token=unk, byte_fallback=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


# What it drafts


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2"])
def test_each_place_has_its_own_mask_in_the_first_round_and_later_ones(architecture):
    drafter, text = distinct(architecture), random_prompt(11)
    state = drafter.new_draft_state(tiny_target(architecture))
    for start, end, depth in ((0, 6, 4), (5, 8, 3), (7, 11, 4), (10, 11, 1)):
        positions = torch.arange(start, end)[None]
        with torch.no_grad():
            found = drafter.draft(DraftInputs(text[:, start:end], positions), state, depth)
        assert torch.allclose(found, from_scratch(drafter, text[:, :end], MASKS[: depth - 1]), atol=1e-4)
        state.cache.forget_from(end - 1)


def test_the_order_of_the_masks_matters():
    drafter, text = distinct(), random_prompt(6)
    with torch.no_grad():
        drafter.get_input_embeddings().weight[MASKS] = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    drafts = [from_scratch(drafter, text, masks)[:, 1:] for masks in (MASKS, MASKS[::-1])]
    assert not torch.allclose(*drafts, atol=1e-2)


@pytest.mark.parametrize("options", [{}, {"tree_budget": 6}])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_the_targets_own(batch, options):
    target = tiny_target("qwen3")
    drafter, prompt = distinct(), torch.cat([random_prompt(7, seed) for seed in range(batch)])
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(
        target.generate(prompt, assistant_model=drafter, **arguments), target.generate(prompt, **arguments)
    )
    assert drafter.last_stats.tau > 1.3
    assert drafter.draft_depth == DEPTH


# How deep


def test_drafting_deeper_than_the_masks_reach_is_refused_before_any_work():
    target, drafter, prompt = tiny_target("qwen3"), distinct(), random_prompt(5)
    target.register_forward_pre_hook(lambda *_: pytest.fail("the target was run"))
    with pytest.raises(ValueError, match=r"num_assistant_tokens must be between 1 and 4 .*got 5"):
        target.generate(prompt, assistant_model=drafter, num_assistant_tokens=5)
    drafter.generation_config.num_assistant_tokens = 9
    with pytest.raises(ValueError, match=r"between 1 and 4 .*got 9"):
        target.generate(prompt, assistant_model=drafter)
    context = DraftInputs(prompt, torch.arange(5)[None])
    with pytest.raises(ValueError, match=r"3 mask token ids, .*at most 4 tokens .*got 5"):
        drafter.draft(context, drafter.new_draft_state(tiny_target()), 5)


def test_transformers_own_loop_gets_as_many_tokens_as_there_are_masks_for():
    drafter, ids = distinct(), random_prompt(6)
    drafter.generation_config.is_assistant = True
    found = drafter.generate(input_ids=ids, generation_config=drafter.generation_config, max_new_tokens=20)
    expected = draft_as_assistant(drafter, ids, DEPTH)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.allclose(torch.stack(found.scores, 1), from_scratch(drafter, ids, MASKS), atol=1e-4)


# Making one


def test_the_masks_begin_as_a_single_one_does():
    base = tiny_target("llama")
    table = base.get_input_embeddings().weight.detach()
    embedding = distinct("llama").get_input_embeddings().weight.detach()
    torch.testing.assert_close(embedding[MASKS], table.mean(0).expand(3, -1))
    others = [i for i in range(64) if i not in MASKS]
    assert torch.equal(embedding[others], table[others])


def test_a_drafter_that_is_adapted_again_keeps_the_masks_that_it_has_learned():
    first = distinct()
    torch.nn.init.normal_(first.get_input_embeddings().weight, generator=torch.Generator().manual_seed(1))
    learned = first.get_input_embeddings().weight.detach()
    assert PardDrafter.from_causal_lm(first).config.mask_token_ids == MASKS
    more = PardDrafter.from_causal_lm(first, mask_token_id=[*MASKS, 33])
    assert torch.equal(more.get_input_embeddings().weight[MASKS], learned[MASKS])
    torch.testing.assert_close(more.get_input_embeddings().weight[33].detach(), learned.mean(0))
    shared = PardDrafter.from_causal_lm(first, mask_token_id=MASKS[1])
    assert (shared.config.pard_token, shared.config.pard_tokens, shared.max_draft_depth) == (MASKS[1], None, None)
    assert torch.equal(shared.get_input_embeddings().weight, learned)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "at least one"),
        ([5, 6, 5], "all different"),
        ([63, 64], r"in \[0, 64\), got 64"),
        ([63, -1], r"in \[0, 64\), got -1"),
        ([63, 1], "1 is in use"),
        ([63, "5"], "the id of one token"),
        ([63, True], "the id of one token"),
        ([[63], [62]], "unhashable|the id of one token"),
    ],
)
def test_wrong_lists_are_refused(masks, message):
    with pytest.raises((ValueError, TypeError), match=message):
        distinct(masks=masks)


@pytest.mark.parametrize("fields", [{"pard_tokens": []}, {"pard_tokens": [5, 5]}, {"pard_tokens": [5, 99]}])
def test_a_config_that_contradicts_itself_is_refused(fields):
    with pytest.raises(ValueError, match="pard_tokens should be different ids"):
        PardDrafter(PardConfig(vocab_size=64, pard_token=5, **fields))
    with pytest.raises(ValueError, match=r"first is pard_token \(6\)"):
        PardDrafter(PardConfig(vocab_size=64, pard_token=6, pard_tokens=[5, 6]))
    assert PardConfig(vocab_size=64, pard_tokens=[5, 6]).pard_token == 5


# On disk


def test_it_is_saved_loaded_and_converted(tmp_path):
    drafter, ids = distinct("llama"), random_prompt(5)
    drafter.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["pard_token"], config["pard_tokens"]) == (MASKS[0], MASKS)
    convert(tmp_path / "saved", tmp_path / "again", "native")
    for folder in ("saved", "again"):
        loaded = AutoDrafter.from_pretrained(tmp_path / folder)
        assert loaded.config.mask_token_ids == MASKS
        assert torch.equal(draft_as_assistant(loaded, ids, 4).sequences, draft_as_assistant(drafter, ids, 4).sequences)
    with pytest.raises(ValueError, match=r"one mask token, pard_token, .*--to native"):
        convert(tmp_path / "saved", tmp_path / "pard", "pard")
    assert not (tmp_path / "pard").exists()


def test_a_damaged_list_is_refused_by_name(tmp_path):
    distinct("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pard_tokens": "63"}))
    with pytest.raises(ValueError, match=r"pard_tokens in .* should be a list of whole numbers"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_shared_mask_leaves_no_trace_of_the_list(tmp_path):
    drafter = PardDrafter.from_causal_lm(tiny_target("llama"), mask_token_id=63)
    drafter.save_pretrained(tmp_path)
    assert "pard_tokens" not in json.loads((tmp_path / "config.json").read_text())
    assert PardConfig.from_pretrained(tmp_path).mask_token_ids == [63]


def test_the_card_says_how_deep_it_drafts_and_offers_it_to_no_server(tmp_path):
    for masks, depths, is_served in (
        (MASKS, "at most 4, with a mask token for each place", False),
        (63, "any number works", True),
    ):
        distinct(masks=masks).save_pretrained(tmp_path / str(masks))
        card = (tmp_path / str(masks) / "README.md").read_text()
        assert depths in card
        assert ("parallel_drafting" in card) == is_served


# Which ids are free


def test_ids_behind_the_last_token_come_first():
    tokenizer = byte_fallback_tokenizer()
    config = LlamaConfig(vocab_size=264, pad_token_id=260)
    assert unused_token_ids(config, 4, tokenizer) == [259, 261, 262, 263]
    # Then what a byte-fallback tokenizer never writes.
    assert unused_token_ids(config, 7, tokenizer) == [259, 261, 262, 263, 0, 3 + 0xFF, 3 + 0xFE]


def test_bytes_that_no_text_has_are_free_and_the_others_are_not():
    tokenizer = byte_fallback_tokenizer(["leopard", "mask", "e"])
    config = LlamaConfig(vocab_size=262)
    never = [3 + byte for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    found = unused_token_ids(config, 14, tokenizer)
    assert found == [0, *reversed(never)]
    seen = {i for code in (*range(0x300), 0x20AC, 0x10FFFF, 0x1F600) for i in tokenizer(chr(code))["input_ids"]}
    assert not seen & set(never)
    for i in found:
        check_mask_token_id(i, config, tokenizer)
    with pytest.raises(ValueError, match=r"14 of 262 tokens are unused .*15 are needed"):
        unused_token_ids(config, 15, tokenizer)
    for i in (3 + 0xC2, 3 + 0xF4, 259, 260):
        with pytest.raises(ValueError, match="is in use"):
            check_mask_token_id(i, config, tokenizer)


def test_a_word_that_contains_the_name_of_a_placeholder_is_no_placeholder():
    tokenizer = byte_fallback_tokenizer(["mask", "leopard", "reserved"])
    assert choose_mask_token_id(LlamaConfig(vocab_size=262), None, tokenizer) == 0
    named = byte_fallback_tokenizer(["<|reserved_special_token_0|>", "[unused1]", "mask"])
    assert unused_token_ids(LlamaConfig(vocab_size=262), 3, named) == [260, 259, 3 + 0xFF]


def test_without_a_tokenizer_the_special_ids_are_avoided_and_a_warning_says_so():
    config = LlamaConfig(vocab_size=20, bos_token_id=1, eos_token_id=[2, 19], pad_token_id=None)
    with pytest.warns(UserWarning, match="taking 18, 17, 16 as mask token"):
        assert unused_token_ids(config, 3) == [18, 17, 16]


def test_stories260k_has_room_for_the_papers_ablation():
    folder = Path(__file__).parents[3] / "shared" / "weights" / "stories260K"
    if not folder.exists():
        pytest.skip("stories260K is not part of the repository")
    config, tokenizer = LlamaConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = unused_token_ids(config, 11, tokenizer)
    drafter = PardDrafter.from_causal_lm(str(folder), mask_token_id=ids)
    assert (drafter.max_draft_depth, drafter.config.mask_token_ids) == (12, ids)
