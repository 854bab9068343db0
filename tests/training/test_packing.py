"""Several documents in one example: each is read, drafted and learned as if it stood alone."""

import shutil

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_pardraft.training.layouts import AnchoredBlocks, DroppedMasks, SharedPrefixes, layout_of
from hf_pardraft.training.layouts.attention import attending_with
from hf_pardraft.training.target.reading import read_target, takes_document_masks, target_reading
from tiny_models import ARCHITECTURES, MASK_TOKEN_ID, tiny_drafter, tiny_target

COMMON = {"vocab_size": 64, "hidden_size": 32, "eos_token_id": None}


def document(prompt: int, answer: int, seed: int) -> dict:
    ids = torch.randint(3, 62, (prompt + answer,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def packed(*documents: dict) -> dict:
    row = {"input_ids": [], "labels": [], "document_ids": []}
    for number, part in enumerate(documents):
        row["input_ids"] += part["input_ids"]
        row["labels"] += part["labels"]
        # Any numbers that differ from neighbour to neighbour do.
        row["document_ids"] += [7 - number] * len(part["input_ids"])
    return row


DOCUMENTS = [document(3, 14, 0), document(0, 9, 1), document(5, 12, 2), document(2, 6, 3)]
ROWS = [packed(*DOCUMENTS[:3]), packed(DOCUMENTS[3])]


def padded_batch(rows: list[dict]) -> dict[str, torch.LongTensor]:
    return AnchoredBlocks(MASK_TOKEN_ID, block_size=4)(rows)


def check_reading(target, taps):
    batch = padded_batch(ROWS)
    inputs = (batch["input_ids"], batch["attention_mask"])
    reading = read_target(target, taps, *inputs, with_states=True, documents=batch["document_ids"])
    for row, start, alone in ((0, 0, 0), (0, 17, 1), (0, 26, 2), (1, 0, 3)):
        ids = torch.tensor([DOCUMENTS[alone]["input_ids"]])
        expected = read_target(target, taps, ids, torch.ones_like(ids), with_states=True)
        part = slice(start, start + ids.shape[1])
        torch.testing.assert_close(reading.features[row, part], expected.features[0], rtol=1e-4, atol=1e-4)
        places = torch.arange(ids.shape[1])
        found = reading.logits(torch.full_like(places, row), places + start)
        torch.testing.assert_close(found, expected.logits(torch.zeros_like(places), places), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_target_reads_packed_documents_as_if_each_stood_alone(architecture, implementation):
    if architecture == "gpt_oss" and implementation == "sdpa":
        pytest.skip("gpt_oss has no sdpa attention")
    target = tiny_target(architecture)
    target.set_attn_implementation(implementation)
    assert takes_document_masks(target)
    check_reading(target, [1, 3])


class WrappedGPT2(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, WrappedGPT2])
def test_positions_start_anew_with_each_document(kind):
    """Rotary embeddings only see distances, so a target with a table of positions has to show it."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    target = kind(GPT2Config(vocab_size=64, **sizes)).eval()
    assert takes_document_masks(target)
    check_reading(target, [1, 3])


def test_targets_that_masks_can_not_keep_apart_read_each_document_by_itself():
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(**COMMON, n_layer=2, n_head=4, initializer_range=0.2)).eval()
    hybrid = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **COMMON,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            initializer_range=0.2,
        )
    ).eval()
    for target in (bloom, hybrid):
        assert not takes_document_masks(target)
        batch = padded_batch(ROWS)
        documents, inputs = batch["document_ids"], (batch["input_ids"], batch["attention_mask"])
        if target is hybrid:
            check_reading(target, [1, 3])
            continue
        # This family has no selection of hidden states, so its logits are compared.
        reading = read_target(target, [], *inputs, with_states=True, documents=documents)
        found = reading.logits(torch.zeros(9, dtype=torch.long), torch.arange(17, 26))
        alone = target(torch.tensor([DOCUMENTS[1]["input_ids"]])).logits[0]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def supervised_logits(drafter, target, collator, examples) -> list[tuple]:
    """Draft position, label and logits of each supervised position, sorted by the first two."""
    batch = collator(examples)
    reading = target_reading(drafter, target, batch)
    layout = layout_of(drafter)
    found = layout.supervised(batch, drafter)
    logits = layout.forward(drafter, drafter, target, batch, reading.features, lambda head, states: head(states))
    columns = zip(found.draft_positions.tolist(), found.labels.tolist(), logits, strict=True)
    return sorted(columns, key=lambda column: column[:2])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pard", "pard2", "dflash", "dflare", "dart"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_packed_documents_are_drafted_as_if_each_stood_alone(architecture, kind):
    target = tiny_target(architecture)
    drafter = tiny_drafter(kind, target)
    collator = {
        "dropped_masks": DroppedMasks(MASK_TOKEN_ID, num_tokens=4, retention=1.0),
        "anchored_blocks": AnchoredBlocks(MASK_TOKEN_ID, block_size=5),
        "shared_prefix": SharedPrefixes(num_tokens=4, shifted=True),
    }[drafter.training_layout]
    together = supervised_logits(drafter, target, collator, ROWS)
    apart = supervised_logits(drafter, target, collator, DOCUMENTS)
    assert [row[:2] for row in together] == [row[:2] for row in apart]
    assert len(together) > 100
    # Rows that agree in position and label may come in any order, so each finds its nearest.
    for position, label in {row[:2] for row in together}:
        mine, others = (
            torch.stack([logits for *key, logits in rows if key == [position, label]]) for rows in (together, apart)
        )
        distances = (mine[:, None] - others[None]).abs().amax(dim=2)
        assert distances.amin(dim=1).max() < 1e-3
        assert distances.amin(dim=0).max() < 1e-3


@torch.no_grad()
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="transformers compiles flex attention")
def test_drafters_attend_with_flex_as_with_dense_masks():
    target = tiny_target("qwen3")
    drafter = tiny_drafter("dart", target).eval()
    collator = SharedPrefixes(num_tokens=4)
    dense = supervised_logits(drafter, target, collator, ROWS)
    with attending_with(drafter, "flex_attention"):
        assert drafter.config._attn_implementation == "flex_attention"
        flex = supervised_logits(drafter, target, collator, ROWS)
    assert drafter.config._attn_implementation != "flex_attention"
    for expected, found in zip(dense, flex, strict=True):
        assert expected[:2] == found[:2]
    total = [torch.stack([row[2] for row in rows]).sum(dim=0) for rows in (dense, flex)]
    torch.testing.assert_close(total[1], total[0], rtol=1e-3, atol=1e-2)
