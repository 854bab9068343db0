"""Masks that have an id each in training: batches against a triple loop, and what a trained drafter has learned of them."""

import json

import pytest
import torch

from hf_pardraft import AutoDrafter, PardDrafter
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training.layouts import DroppedMasks
from hf_pardraft.training.recipe import training_run
from tiny_models import tiny_target
from training.tiny_training import losses, trainer_for

MASKS = [63, 40, 52]


def queries_by_hand(ids, labels, documents, masks) -> set[tuple]:
    """What each query is fed, where it is and what it predicts: as at inference (arXiv 2504.18583, eq. 7); nothing dropped."""
    rows = set()
    for place in range(len(ids)):
        inside = place + 1 < len(ids) and documents[place + 1] == documents[place] and labels[place + 1] != -100
        rows.add((0, place, ids[place], labels[place + 1] if inside else -100))
    for anchor in range(len(ids)):
        # The prefix ends at the anchor; after it come m_0, m_1, ..., and mask j - 1 drafts the (j + 1)-th token.
        for block in range(1, len(masks) + 1):
            drafted = anchor + block + 1
            span = range(anchor, drafted + 1)
            if (
                drafted < len(ids)
                and all(labels[t] != -100 for t in span[1:])
                and len({documents[t] for t in span}) == 1
            ):
                rows.add((block, anchor + block, masks[block - 1], labels[drafted]))
    return rows


@pytest.mark.parametrize("case", range(6))
def test_a_batch_is_fed_what_a_triple_loop_feeds(case):
    generator = torch.Generator().manual_seed(case)
    length, prompt = (int(torch.randint(*span, (1,), generator=generator)) for span in ((3, 15), (0, 4)))
    ids = torch.randint(3, 39, (length,), generator=generator).tolist()
    labels = [-100 if t < min(prompt, length - 2) else i for t, i in enumerate(ids)]
    documents = [0] * (length // 2) + [1] * (length - length // 2) if case % 2 else [0] * length
    example = {"input_ids": ids, "labels": labels, "document_ids": documents}
    rows = DroppedMasks(MASKS, num_tokens=4, retention=1.0).lay_out(example)
    columns = zip(*(rows[name].tolist() for name in ("query_block", "query_index", "input_ids", "labels")), strict=True)
    assert set(columns) == queries_by_hand(ids, labels, documents, MASKS)


def test_one_id_and_a_list_of_it_lay_out_the_same_queries():
    example = {"input_ids": list(range(3, 30)), "labels": list(range(3, 30))}
    shared, distinct = (DroppedMasks(masks, num_tokens=4, seed=3).lay_out(example) for masks in (63, MASKS))
    assert all(torch.equal(shared[name], distinct[name]) for name in shared if name != "input_ids")
    assert (shared["input_ids"][shared["query_block"] > 0] == 63).all()
    assert (DroppedMasks(63, num_tokens=1).lay_out(example)["input_ids"] < 30).all()


def test_training_sees_what_drafting_sees():
    drafter = PardDrafter.from_causal_lm(tiny_target("llama"), mask_token_id=MASKS)
    torch.nn.init.normal_(drafter.get_input_embeddings().weight, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(3, 39, (1, 12), generator=torch.Generator().manual_seed(2))
    batch = DroppedMasks(MASKS, num_tokens=4, retention=1.0)(
        [{"input_ids": ids[0].tolist(), "labels": ids[0].tolist()}]
    )
    with torch.no_grad():
        found = DroppedMasks.forward(drafter, drafter, None, batch, None, lambda head, states: head(states))
    block, index = (batch[name][batch["labels"] != -100] for name in ("query_block", "query_index"))
    for anchor in range(12 - 4):
        context = DraftInputs(ids[:, : anchor + 1], torch.arange(anchor + 1)[None])
        with torch.no_grad():
            drafted = drafter.draft(context, drafter.new_draft_state(None), 4)[0]
        rows = [int(((block == j) & (index == anchor + j)).nonzero()) for j in range(4)]
        assert torch.allclose(found[rows], drafted, atol=1e-4)


def test_it_learns_drafts_as_deep_as_it_was_taught_and_is_loaded_again(target, text, tmp_path):
    drafter = PardDrafter.from_causal_lm(tiny_target("qwen3", seed=1, num_hidden_layers=2), mask_token_id=[*MASKS, 33])
    before = drafter.get_input_embeddings().weight.detach().clone()
    trainer = trainer_for("pard", target, text, tmp_path, drafter=drafter, draft_tokens=4, max_steps=4)
    trainer.train()
    found = losses(trainer)
    assert found[-1] < found[0]
    moved = (drafter.get_input_embeddings().weight.detach() - before).abs().sum(1) > 0
    assert moved[MASKS].all()
    trainer.save_model(tmp_path / "trained")
    loaded = AutoDrafter.from_pretrained(tmp_path / "trained")
    assert (loaded.config.mask_token_ids, loaded.draft_depth, loaded.max_draft_depth) == ([*MASKS, 33], 4, 5)


def test_more_tokens_than_masks_are_refused_before_training(target, text, tmp_path):
    drafter = PardDrafter.from_causal_lm(tiny_target("qwen3", seed=1), mask_token_id=MASKS)
    with pytest.raises(ValueError, match=r"draft 5 tokens takes 4 masks, and this drafter has ids for 3"):
        trainer_for("pard", target, text, tmp_path, drafter=drafter, draft_tokens=5)
    with pytest.raises(ValueError, match=r"drafted with 4 masks, got ids for 3"):
        DroppedMasks(MASKS, num_tokens=5)


def test_an_adapter_trains_the_embeddings_of_all_masks(target, text, tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_target("llama", seed=3)
    base.save_pretrained(tmp_path / "base")
    drafter = PardDrafter.from_causal_lm(str(tmp_path / "base"), mask_token_id=MASKS)
    options = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = trainer_for(
        "pard", target, text, tmp_path / "run", drafter=drafter, trainer_options=options, max_steps=2, keep_adapter=True
    )
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "config.json").read_text())["pard_tokens"] == MASKS
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    merged = trainer.model.merge_and_unload()
    assert loaded.config.mask_token_ids == MASKS
    mean = base.get_input_embeddings().weight.detach().mean(0)
    assert ((loaded.get_input_embeddings().weight[MASKS] - mean).abs().sum(1) > 0).all()
    assert torch.allclose(loaded.get_input_embeddings().weight[MASKS], merged.get_input_embeddings().weight[MASKS])


def test_the_command_line_and_recipes_take_one_id_or_several(tmp_path):
    needed = ["--target", "t", "--dataset", "d", "--output", "o"]
    for words, expected in ((["63"], [63]), (["63", "40", "52"], MASKS), (["none"], None)):
        said = training_run([*needed, "--kind", "pard", "--base", "b", "--mask-token-id", *words])
        assert said.drafter.mask_token_id == expected
    for text, expected in (("63", [63]), ("[63, 40, 52]", MASKS), ("null", None)):
        (tmp_path / "own.yaml").write_text(f"kind: pard2\nbase: b\nmask_token_id: {text}\n")
        assert training_run([*needed, "--recipe", str(tmp_path / "own.yaml")]).drafter.mask_token_id == expected
    with pytest.raises(ValueError, match=r"a dflash drafter has one mask token, got mask_token_id \[63, 40\]"):
        training_run([*needed, "--kind", "dflash", "--mask-token-id", "63", "40"])
