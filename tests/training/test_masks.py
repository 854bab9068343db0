"""Masks equal triple loops written from the papers."""

import random
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import flex_attention

from hf_pardraft import AutoDrafter
from hf_pardraft.models.masks import additive
from hf_pardraft.training.data.documents import PADDING
from hf_pardraft.training.layouts import AnchoredBlocks, DroppedMasks, SharedPrefixes
from hf_pardraft.training.layouts.dropped_masks import one_place_later
from hf_pardraft.training.layouts.masks import BlockQueries, PrefixQueries, dense_mask, flex_mask

FIXTURES = Path(__file__).parent.parent / "fixtures" / "pard"
PARD2 = FIXTURES.parent / "pard2"


def random_example(rng: random.Random, packed: bool) -> dict:
    """A prompt and an answer, or several of them packed."""
    example = {"input_ids": [], "labels": [], "document_ids": []}
    for document in range(rng.randint(1, 3) if packed else 1):
        prompt, answer = rng.randint(0, 4), rng.randint(1, 9)
        ids = [rng.randint(3, 60) for _ in range(prompt + answer)]
        example["input_ids"] += ids
        example["labels"] += [-100] * prompt + ids[prompt:]
        example["document_ids"] += [document] * len(ids)
    return example


@pytest.mark.parametrize("seed", range(12))
def test_the_pard_mask_is_what_inference_sees(seed):
    """Query (j, p) follows the prefix that ends at a = p - j: real tokens up to a, then masks 1..j right after them."""
    rng = random.Random(seed)
    examples = [random_example(rng, packed=seed % 2 == 0) for _ in range(3)]
    batch = DroppedMasks(63, num_tokens=4, retention=rng.choice([0.5, 0.7, 1.0]), seed=seed)(examples)
    window = rng.choice([None, 2, 5])
    mask = dense_mask(DroppedMasks.queries(batch), window)
    for b in range(mask.shape[0]):
        rows = list(
            zip(*(batch[name][b].tolist() for name in ("query_block", "query_index", "query_document")), strict=True)
        )
        for q, (block, index, document) in enumerate(rows):
            if document == PADDING:
                assert mask[b, q].nonzero().flatten().tolist() == [q]
                continue
            prefix = [(0, i) for i in range(index - block + 1)]
            masks = [(j, index - block + j) for j in range(1, block + 1)]
            expected = {k for k, (j, i, d) in enumerate(rows) if d == document and (j, i) in prefix + masks}
            seen = {k for k in expected if window is None or rows[k][1] > index - window}
            assert set(mask[b, q].nonzero().flatten().tolist()) == seen
            # Every mask before a kept row was kept: its keys and values are whole.
            assert len(expected) == examples[b]["document_ids"][: index - block + 1].count(document) + block


@pytest.mark.parametrize("seed", range(10))
def test_the_block_mask_is_context_before_the_anchor_and_the_own_block(seed):
    rng = random.Random(seed)
    examples = [random_example(rng, packed=seed % 2 == 0) for _ in range(3)]
    examples[0]["labels"] = list(examples[0]["input_ids"])
    examples[0]["input_ids"] += [5, 6, 7]
    examples[0]["labels"] += [5, 6, 7]
    examples[0]["document_ids"] += [examples[0]["document_ids"][-1]] * 3
    batch = AnchoredBlocks(63, block_size=4, num_anchors=5, seed=seed)(examples)
    anchors, length = batch["anchors"], batch["input_ids"].shape[1]
    num_blocks = anchors.shape[1]
    window = rng.choice([None, 2, 5])
    mask = dense_mask(AnchoredBlocks.queries(batch), window)
    for b in range(3):
        document = examples[b]["document_ids"]
        for n in range(num_blocks):
            for k in range(4):
                for column in range(length + num_blocks * 4):
                    if column < length:
                        expected = column < anchors[b, n] and column < len(document)
                        expected = expected and document[column] == document[anchors[b, n]]
                    else:
                        expected = (column - length) // 4 == n
                    if window is not None:
                        other = anchors[b, n] + (column - length) % 4 if column >= length else column
                        expected = expected and abs(anchors[b, n] + k - other) <= window
                    assert bool(mask[b, n * 4 + k, column]) == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_shared_prefix_mask_is_three_causal_parts(seed):
    """Figure 4 of arXiv 2601.19278: the prompt is causal, a group of masks sees its prefix, and is causal in itself."""
    rng = random.Random(seed)
    examples = [random_example(rng, packed=seed % 4 < 2) for _ in range(3)]
    examples[0] = {
        "input_ids": list(range(5, 15)),
        "labels": [-100] * 2 + list(range(7, 15)),
        "document_ids": [0] * 10,
    }
    shifted = seed % 2 == 0
    batch = SharedPrefixes(num_tokens=4, shifted=shifted, num_anchors=4, seed=seed)(examples)
    mask = dense_mask(SharedPrefixes.queries(batch))
    num_prefix = batch["input_ids"].shape[1] - 1
    num_rows = batch["labels"].shape[1]
    assert mask.shape == (3, num_rows, num_rows)
    for b, example in enumerate(examples):
        # Walk over the masks as they lie: a group begins wherever the count begins again.
        group_of, anchors = {}, []
        for row in range(num_prefix, num_rows):
            if batch["query_document"][b, row] == PADDING:
                continue
            if batch["query_block"][b, row] == 1:
                anchors.append(int(batch["query_index"][b, row]))
            group_of[row] = len(anchors) - 1
            place = row - min(r for r, group in group_of.items() if group == len(anchors) - 1)
            assert int(batch["query_index"][b, row]) == anchors[-1] + place
        length, document = len(example["input_ids"]), example["document_ids"]
        for q in range(num_rows):
            for k in range(num_rows):
                q_is_prompt, k_is_prompt = q < length - 1, k < length - 1
                prompt_causal = q_is_prompt and k_is_prompt and k <= q
                # Row i of the prompt reads token i + 1 too, so an anchor's prefix ends one row before it.
                mask_preceding = q in group_of and k_is_prompt and k <= anchors[group_of[q]] - 1
                mask_causal = q in group_of and k in group_of and group_of[q] == group_of[k] and k <= q
                # A row's document is that of the token whose states it reads; a group's is that of its anchor.
                owners = [
                    document[row] if row < length - 1 else document[anchors[group_of[row]]]
                    for row in (q, k)
                    if row < length - 1 or row in group_of
                ]
                together = len(owners) == 2 and owners[0] == owners[1]
                expected = (together and (prompt_causal or mask_preceding or mask_causal)) or q == k
                assert bool(mask[b, q, k]) == expected, (b, q, k)


def random_queries(seed: int) -> PrefixQueries | BlockQueries:
    """Rows of a random packed and padded batch, of PARD's layout or of anchored blocks."""
    rng = random.Random(seed)
    examples = [random_example(rng, packed=True) for _ in range(3)]
    examples[0] = {"input_ids": list(range(5, 15)), "labels": list(range(5, 15)), "document_ids": [0] * 4 + [1] * 6}
    if seed % 2:
        batch = DroppedMasks(63, num_tokens=4, seed=seed)(examples)
        return DroppedMasks.queries(batch)
    return AnchoredBlocks.queries(AnchoredBlocks(63, block_size=4, num_anchors=5, seed=seed)(examples))


@torch.no_grad()
@pytest.mark.parametrize("seed", range(8))
def test_flex_attention_computes_what_the_dense_mask_computes(seed):
    rows, window = random_queries(seed), (None, None, 3, 2)[seed % 4]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 2, rows.block.shape[1], 16, generator=generator)
    key, value = (torch.randn(3, 2, rows.num_keys, 16, generator=generator) for _ in range(2))
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(rows, window)[:, None]
    )
    with warnings.catch_warnings():
        # It says that it is slow when it isn't compiled.
        warnings.simplefilter("ignore")
        flex = flex_attention(query, key, value, block_mask=flex_mask(rows, window))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def test_flex_attention_skips_tiles_that_see_nothing():
    """Two documents of 256 tokens are a quarter of the square below each other's diagonal blocks."""
    documents = torch.arange(2).repeat_interleave(256)[None]
    rows = PrefixQueries(torch.zeros_like(documents), torch.arange(512)[None], documents)
    # Of 4 x 4 tiles of 128, each document needs the 3 of its own triangle.
    assert flex_mask(rows).kv_num_blocks.sum() + flex_mask(rows).full_kv_num_blocks.sum() == 6


@torch.no_grad()
@pytest.mark.parametrize("layout", ["layout", "cod"])
def test_masks_labels_and_logits_equal_the_reference_collator(layout):
    """On queries that are supervised and see a real token; the reference's others wrap into unrelated columns."""
    drafter = AutoDrafter.from_pretrained(FIXTURES)
    given = load_file(FIXTURES / "layout_inputs.safetensors")
    expected = load_file(FIXTURES / f"{layout}_expected.safetensors")
    tokens, labels = given["tokens"], given["base_labels"]
    batch, length = tokens.shape
    kept = expected.get("retained", torch.arange(4 * length))
    block, index = kept // length, kept % length
    rows = PrefixQueries(*(part.expand(batch, -1) for part in (block, index, torch.zeros_like(kept))))
    input_ids = torch.where(block == 0, tokens[:, index], drafter.config.pard_token)
    assert torch.equal(input_ids, expected["input_ids"])
    mask = dense_mask(rows)
    logits = drafter(
        input_ids=input_ids, position_ids=index.expand(batch, -1), attention_mask=additive(mask, torch.float32)
    ).logits
    next_labels = torch.cat([labels[:, 1:], torch.full((batch, 1), -100)], dim=1)[:, index]
    compared = expected["supervised"] & (index >= block)
    assert compared.sum() >= 20
    assert torch.equal(mask[compared], expected["attention_mask"][:, 0][compared])
    torch.testing.assert_close(logits[compared], expected["logits"][compared], rtol=2e-4, atol=2e-4)
    reference_labels = torch.cat([expected["labels"][:, 1:], torch.full((batch, 1), -100)], dim=1)
    assert torch.equal(next_labels[compared], reference_labels[compared])


@torch.no_grad()
@pytest.mark.parametrize("layout", ["train", "train_cod"])
def test_pard2_queries_get_their_anchors_features_and_the_references_logits(layout):
    """On the queries of the test above; the reference's features are shifted already."""
    drafter = AutoDrafter.from_pretrained(PARD2)
    given = load_file(PARD2 / "train_inputs.safetensors")
    expected = load_file(PARD2 / f"{layout}_expected.safetensors")
    tokens, features = given["tokens"], given["target_feat"]
    unshifted = torch.cat([features[:, 1:], torch.randn(2, 1, 64)], dim=1)
    assert torch.equal(one_place_later(unshifted), features)
    batch, length = tokens.shape
    kept = expected.get("retained", torch.arange(4 * length))
    block, index = kept // length, kept % length
    rows = PrefixQueries(*(part.expand(batch, -1) for part in (block, index, torch.zeros_like(kept))))
    compared = expected["supervised"] & (index >= block)
    assert compared.sum() >= 12
    anchors = (index - block).clamp(min=0).expand(batch, -1)
    gathered = features.gather(1, anchors[:, :, None].expand(-1, -1, 64))
    assert torch.equal(gathered[compared], expected["target_feat"][compared])
    logits = drafter(
        input_ids=torch.where(block == 0, tokens[:, index], drafter.config.pard_token),
        position_ids=index.expand(batch, -1),
        attention_mask=additive(dense_mask(rows), torch.float32),
        target_features=features,
        feature_rows=anchors,
    ).logits
    torch.testing.assert_close(logits[compared], expected["student_logits"][compared], rtol=2e-4, atol=2e-4)
