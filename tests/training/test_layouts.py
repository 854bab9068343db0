"""What a batch holds: which masks COD keeps, where anchors lie, and that training sees what inference sees."""

import pytest
import torch

from hf_pardraft import DartDrafter, PardDrafter
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training.layouts import AnchoredBlocks, DroppedMasks, SharedPrefixes
from hf_pardraft.training.layouts.base import UNKNOWN
from hf_pardraft.training.target.reading import read_target, target_reading
from tiny_models import MASK_TOKEN_ID, tiny_drafter, tiny_target

EOS = 2


def all_logits(head, states):
    """Reads the logits of all supervised positions at once."""
    return head(states)


def example(prompt: int, answer: int, seed: int = 0, **extra) -> dict:
    """Random ids; the answer is supervised and ends with EOS."""
    ids = torch.randint(3, 62, (prompt + answer,), generator=torch.Generator().manual_seed(seed))
    ids[-1] = EOS
    labels = ids.clone()
    labels[:prompt] = -100
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), **extra}


def kept_per_block(queries: dict, num_tokens: int) -> list[set[int]]:
    """Per block, the indices of the queries that have a label."""
    supervised = queries["labels"] != -100
    return [set(queries["query_index"][supervised & (queries["query_block"] == j)].tolist()) for j in range(num_tokens)]


def test_cod_keeps_the_papers_share_of_the_supervised_positions():
    queries = DroppedMasks(MASK_TOKEN_ID, num_tokens=8).lay_out(example(prompt=40, answer=101))
    counts = [len(kept) for kept in kept_per_block(queries, 8)]
    # N max(r^j, r_min) with N = 101: a share of what is supervised, so the prompt takes nothing from it.
    expected = [int(101 * max(0.7**j, 0.2)) for j in range(8)]
    # A nested subset may run out of candidates near its end, never the other way.
    assert counts[:4] == expected[:4]
    assert all(found <= quota for found, quota in zip(counts, expected, strict=True))
    assert (queries["query_block"] == 0).sum() == 141


def test_kept_masks_are_nested_and_never_reach_into_the_prompt():
    queries = DroppedMasks(MASK_TOKEN_ID, num_tokens=6, retention=0.5).lay_out(example(prompt=9, answer=60))
    kept = kept_per_block(queries, 6)
    for block in range(1, 6):
        assert {index - 1 for index in kept[block]} <= kept[block - 1]
        # The anchor, the last real token a row sees, is the prompt's last token or later.
        assert all(index - block >= 8 for index in kept[block])


def test_end_of_text_is_supervised_even_where_it_is_the_padding_token_too():
    batch = DroppedMasks(MASK_TOKEN_ID, num_tokens=1)([example(3, 5), example(3, 9, seed=1)])
    assert batch["labels"][0][batch["labels"][0] != -100].tolist()[-1] == EOS
    blocks = AnchoredBlocks(MASK_TOKEN_ID, block_size=4).lay_out(example(3, 5))
    assert EOS in blocks["labels"][:, 0]


def test_nothing_is_learned_across_packed_documents():
    one, two = example(2, 6), example(0, 5, seed=1)
    packed = {
        "input_ids": one["input_ids"] + two["input_ids"],
        "labels": one["labels"] + two["labels"],
        "document_ids": [0] * 8 + [1] * 5,
    }
    queries = DroppedMasks(MASK_TOKEN_ID, num_tokens=4, retention=1.0).lay_out(packed)
    supervised = queries["labels"] != -100
    for index, block in zip(queries["query_index"][supervised], queries["query_block"][supervised], strict=True):
        assert (index - block >= 8) == (index + 1 >= 8)
    second = queries["position_ids"][(queries["query_block"] == 0) & (queries["query_document"] == 1)]
    assert second.tolist() == list(range(5))


def test_every_sample_and_every_epoch_has_a_pattern_of_its_own():
    collator = DroppedMasks(MASK_TOKEN_ID, num_tokens=4, retention=0.5)
    examples = [example(2, 40), {**example(2, 40), "input_ids": [5, *example(2, 40)["input_ids"][1:]]}]
    patterns = [kept_per_block(collator.lay_out(sample), 4)[1] for sample in examples]
    assert patterns[0] != patterns[1]
    assert kept_per_block(collator.lay_out(examples[0]), 4)[1] == patterns[0]
    collator.epoch = 1
    assert kept_per_block(collator.lay_out(examples[0]), 4)[1] != patterns[0]


def test_full_masks_are_never_built_before_dropping():
    queries = DroppedMasks(MASK_TOKEN_ID, num_tokens=16).lay_out(example(0, 400))
    assert queries["input_ids"].shape[0] < 400 * 6


def test_anchors_lie_in_the_response_and_tails_are_kept():
    blocks = AnchoredBlocks(MASK_TOKEN_ID, block_size=4, num_anchors=100).lay_out(example(5, 7))
    assert blocks["anchors"].tolist() == [5, 6, 7, 8, 9, 10]
    assert (blocks["labels"][-1] != -100).tolist() == [True, False, False]
    assert (blocks["block_ids"][:, 1:] == MASK_TOKEN_ID).all()


def test_a_block_is_not_trained_after_a_token_that_the_target_did_not_write():
    sample = example(0, 8)
    sample["labels"][4] = -100
    blocks = AnchoredBlocks(MASK_TOKEN_ID, block_size=5, num_anchors=100).lay_out(sample)
    first = blocks["anchors"].tolist().index(1)
    assert (blocks["labels"][first] != -100).tolist() == [True, True, False, False]
    assert 3 not in blocks["anchors"].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_an_attention_mask_marks_is_no_text(side):
    """Also where padding and end of text are one token, and where nobody made labels."""
    ids, padding = [5, 6, 7, 8, 2], [2, 2, 2]
    plain = {"input_ids": ids, "labels": [-100, 6, 7, 8, 2]}
    for given in (plain, {"input_ids": ids}):
        padded = [{**given, "attention_mask": [1] * 5}]
        for name, filled in (("input_ids", padding), ("labels", padding), ("attention_mask", [0] * 3)):
            if name in padded[0]:
                padded[0][name] = filled + padded[0][name] if side == "left" else padded[0][name] + filled
        for collator in (DroppedMasks(63, 4), AnchoredBlocks(63, 4), SharedPrefixes(4)):
            found, expected = collator(padded), collator([given])
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bad_examples_are_refused():
    with pytest.raises(ValueError, match="of one length"):
        DroppedMasks(MASK_TOKEN_ID)([{"input_ids": [1, 2, 3], "labels": [1]}])
    with pytest.raises(ValueError, match="nothing to draft"):
        AnchoredBlocks(MASK_TOKEN_ID)([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])
    with pytest.raises(ValueError, match="nothing to draft"):
        SharedPrefixes()([{"input_ids": [1, 2, 3], "labels": [-100] * 3}])
    # Two tokens in a row, but of two documents.
    for collator in (AnchoredBlocks(MASK_TOKEN_ID), SharedPrefixes()):
        with pytest.raises(ValueError, match="nothing to draft"):
            collator([{"input_ids": [1, 2], "labels": [1, 2], "document_ids": [0, 1]}])


@pytest.mark.parametrize("shifted", [True, False])
def test_shared_prefixes_teach_every_draft_after_every_anchor_once(shifted):
    """Anchor a, which the target writes itself, and position t: the token a + t, as far as the answer goes."""
    examples = [example(5, 7), example(0, 9, seed=2), example(3, 4, seed=3)]
    examples[1]["labels"][4] = -100
    batch = SharedPrefixes(num_tokens=4, shifted=shifted, num_anchors=100)(examples)
    for b, sample in enumerate(examples):
        labels = sample["labels"]
        expected = {}
        for anchor in range(1, len(labels)):
            if labels[anchor] == -100:
                continue
            for t in range(1, 5):
                if anchor + t >= len(labels) or labels[anchor + t] == -100:
                    break
                expected[(anchor, t)] = (labels[anchor + t], anchor + t - 1)
        found = {}
        for row in (batch["labels"][b] != -100).nonzero().flatten().tolist():
            anchor = int(batch["query_index"][b, row]) - int(batch["query_block"][b, row]) + 1
            key = (anchor, int(batch["draft_positions"][b, row]))
            assert key not in found
            found[key] = (int(batch["labels"][b, row]), int(batch["target_index"][b, row]))
        assert found == expected
    assert EOS in batch["labels"]


def test_few_prefixes_get_masks_and_all_predict_their_first_token():
    batch = SharedPrefixes(num_tokens=4, num_anchors=3)([example(4, 30)])
    positions = batch["draft_positions"][batch["labels"] != -100].tolist()
    assert positions.count(1) == 29
    # The last anchor has one token after it, and so needs no mask.
    assert 2 <= positions.count(2) <= 3
    again = SharedPrefixes(num_tokens=4, num_anchors=3, seed=1)([example(4, 30)])
    assert again["query_index"].tolist() != batch["query_index"].tolist()


@torch.no_grad()
@pytest.mark.parametrize("retention", [1.0, 0.6])
def test_pard_training_equals_inference_with_the_same_prefix(retention):
    target = tiny_target("qwen3")
    drafter = tiny_drafter("pard", target)
    collator = DroppedMasks(MASK_TOKEN_ID, num_tokens=5, retention=retention, min_retention=0.1)
    examples = [example(3, 12), example(1, 7, seed=4)]
    batch = collator(examples)
    supervised = DroppedMasks.supervised(batch, drafter)
    logits = DroppedMasks.forward(drafter, drafter, target, batch, None, all_logits)
    where = (batch["labels"] != -100).nonzero().tolist()
    assert len(where) == len(supervised.labels)
    for position, (item, query) in enumerate(where):
        block, index = int(batch["query_block"][item, query]), int(batch["query_index"][item, query])
        prefix = torch.tensor([examples[item]["input_ids"][: index - block + 1]])
        context = DraftInputs(prefix, torch.arange(prefix.shape[1])[None])
        drafted = drafter.draft(context, drafter.new_draft_state(target), 5)
        torch.testing.assert_close(logits[position], drafted[0, block], rtol=1e-4, atol=1e-4)
        assert int(supervised.labels[position]) == examples[item]["input_ids"][index + 1]
        assert int(supervised.draft_positions[position]) == block + 1


@torch.no_grad()
@pytest.mark.parametrize("num_full", [0, 2])
def test_pard_sees_the_windows_that_it_sees_at_inference(num_full):
    """Windows of 6 tokens, in every layer or every layer but two."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": num_full}
    drafter = PardDrafter.from_causal_lm(tiny_target("qwen2", **windows), mask_token_id=MASK_TOKEN_ID)
    assert drafter.config.layer_types.count("full_attention") == num_full
    sample = example(3, 20)
    batch = DroppedMasks(MASK_TOKEN_ID, num_tokens=4)([sample])
    logits = DroppedMasks.forward(drafter, drafter, None, batch, None, all_logits)
    for position, (_, row) in enumerate((batch["labels"] != -100).nonzero().tolist()):
        block, index = int(batch["query_block"][0, row]), int(batch["query_index"][0, row])
        prefix = torch.tensor([sample["input_ids"][: index - block + 1]])
        context = DraftInputs(prefix, torch.arange(prefix.shape[1])[None])
        drafted = drafter.draft(context, drafter.new_draft_state(None), 4)
        torch.testing.assert_close(logits[position], drafted[0, block], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("retention", [1.0, 0.6])
def test_pard2_training_equals_inference_with_the_same_prefix(retention):
    target = tiny_target("gemma3")
    drafter = tiny_drafter("pard2", target)
    collator = DroppedMasks(MASK_TOKEN_ID, num_tokens=5, retention=retention, min_retention=0.1)
    examples = [example(3, 12), example(1, 7, seed=4)]
    batch = collator(examples)
    features = target_reading(drafter, target, batch).features
    supervised = DroppedMasks.supervised(batch, drafter)
    logits = DroppedMasks.forward(drafter, drafter, target, batch, features, all_logits)
    where = (batch["labels"] != -100).nonzero().tolist()
    assert len(where) == len(supervised.labels) > 20
    for position, (item, query) in enumerate(where):
        block, index = int(batch["query_block"][item, query]), int(batch["query_index"][item, query])
        prefix = torch.tensor([examples[item]["input_ids"][: index - block + 1]])
        positions = torch.arange(prefix.shape[1])[None]
        # What the target has read: all but the anchor.
        hidden = target(prefix, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap] for tap in drafter.tapped_hidden_states], dim=-1)[:, :-1]
        context = DraftInputs(prefix, positions, features, positions[:, :-1])
        drafted = drafter.draft(context, drafter.new_draft_state(target), 5)
        torch.testing.assert_close(logits[position], drafted[0, block], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "dflare"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
@pytest.mark.parametrize("window", [None, 3])
def test_anchored_training_blocks_equal_inference_with_the_same_prefix(architecture, kind, window):
    target = tiny_target(architecture)
    sliding = (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window, "use_sliding_window": True}
        if window
        else {}
    )
    drafter = tiny_drafter(kind, target, **sliding)
    examples = [example(3, 12), example(2, 8, seed=4)]
    batch = AnchoredBlocks(MASK_TOKEN_ID, block_size=5, num_anchors=100)(examples)
    features = target_reading(drafter, target, batch).features
    supervised = AnchoredBlocks.supervised(batch, drafter)
    logits = AnchoredBlocks.forward(drafter, drafter, target, batch, features, all_logits)
    where = (batch["labels"] != -100).nonzero().tolist()
    for position, (item, block, k) in enumerate(where):
        anchor = int(batch["anchors"][item, block])
        prefix = torch.tensor([examples[item]["input_ids"][: anchor + 1]])
        positions = torch.arange(anchor + 1)[None]
        read = prefix[:, :-1]
        features = read_target(target, drafter.tapped_hidden_states, read, torch.ones_like(read)).features
        context = DraftInputs(prefix, positions, features, positions[:, :-1])
        drafted = drafter.draft(context, drafter.new_draft_state(target), 4)
        torch.testing.assert_close(logits[position], drafted[0, k], rtol=1e-4, atol=1e-4)
        assert int(supervised.labels[position]) == examples[item]["input_ids"][anchor + 1 + k]
        assert int(supervised.draft_positions[position]) == k + 1


@torch.no_grad()
@pytest.mark.parametrize("draft_token_ids", [None, range(3, 50)])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_dart_training_equals_inference_with_the_same_prefix(architecture, shifted, draft_token_ids):
    target = tiny_target(architecture)
    torch.manual_seed(1)
    fields = {"draft_length": 4, "shifted": shifted, "initializer_range": 0.2}
    drafter = DartDrafter.for_target(target, draft_token_ids=draft_token_ids, **fields)
    depth = drafter.max_draft_depth
    examples = [example(3, 12), example(2, 8, seed=4)]
    batch = SharedPrefixes(num_tokens=depth, shifted=shifted, num_anchors=100)(examples)
    reading = target_reading(drafter, target, batch, with_states=True)
    supervised = SharedPrefixes.supervised(batch, drafter)
    teachers = reading.logits(supervised.items, supervised.places)
    logits = SharedPrefixes.forward(drafter, drafter, target, batch, reading.features, all_logits)
    where = (batch["labels"] != -100).nonzero().tolist()
    assert len(where) == len(supervised.labels) >= 60
    assert logits.shape[1] == drafter.config.draft_vocab_size
    for position, (item, query) in enumerate(where):
        t = int(supervised.draft_positions[position])
        anchor = int(batch["query_index"][item, query]) - int(batch["query_block"][item, query]) + 1
        text = torch.tensor([examples[item]["input_ids"]])
        prefix, positions = text[:, : anchor + 1], torch.arange(anchor + 1)[None]
        read = prefix[:, :-1]
        features = read_target(target, drafter.tapped_hidden_states, read, torch.ones_like(read)).features
        context = DraftInputs(prefix, positions, features, positions[:, :-1])
        drafted = drafter.draft(context, drafter.new_draft_state(target), depth)[0, t - 1]
        torch.testing.assert_close(logits[position], drafted, rtol=1e-4, atol=1e-4)
        truth, label = examples[item]["input_ids"][anchor + t], int(supervised.label_columns[position])
        if supervised.vocabulary is None:
            assert label == truth
        else:
            assert (
                label == UNKNOWN if truth not in supervised.vocabulary else int(supervised.vocabulary[label]) == truth
            )
        # The teacher is the target after the true text before the drafted token.
        teacher = target(text[:, : anchor + t]).logits[0, -1]
        torch.testing.assert_close(teachers[position], teacher, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_what_cod_keeps_is_as_without_dropping():
    target = tiny_target("qwen3")
    drafter = tiny_drafter("pard", target)
    examples = [example(2, 14)]
    found = {}
    for name, retention in (("all", 1.0), ("some", 0.5)):
        batch = DroppedMasks(MASK_TOKEN_ID, num_tokens=5, retention=retention, min_retention=0.1)(examples)
        logits = DroppedMasks.forward(drafter, drafter, target, batch, None, all_logits)
        supervised = batch["labels"] != -100
        keys = zip(batch["query_block"][supervised].tolist(), batch["query_index"][supervised].tolist(), strict=True)
        found[name] = dict(zip(keys, logits, strict=True))
    assert len(found["some"]) < len(found["all"])
    for key, logits in found["some"].items():
        torch.testing.assert_close(logits, found["all"][key], rtol=1e-4, atol=1e-4)
