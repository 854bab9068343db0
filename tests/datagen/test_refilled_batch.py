"""Texts written together are those that each would be alone, whoever comes and goes."""

import functools
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from ending_targets import END, ending_target, ragged_prompts, texts_of, with_ends
from hf_pardraft.datagen.fast_steps import FastSteps
from hf_pardraft.datagen.joined_cache import JoinedCache, has_entries_per_token
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.refilled_batch import Item, RefilledBatch
from hf_pardraft.generation.packing import packed_weights, packing_trials
from hf_pardraft.generation.packing.packed_layers import packed_layers
from tiny_models import ARCHITECTURES, tiny_target
from tiny_tokenizers import tiny_chat_tokenizer
from unusual_targets import HYBRIDS, ROPE_TARGETS, fresh, hybrid_target

MOST = 24


def written(
    target, temperature=0.0, batch_size=4, joins_caches=None, num_rows=19, beginnings=((),)
) -> dict[int, list[int]]:
    """What follows prompts of many lengths, by row; they have one of some beginnings each."""
    writer = LocalWriter(
        target, tiny_chat_tokenizer(), temperature=temperature, top_p=0.9, max_tokens=MOST, batch_size=batch_size
    )
    batch = writer.new_batch()
    batch.joins_caches = batch.joins_caches if joins_caches is None else joins_caches
    prompts = ragged_prompts(num_rows, target.config.vocab_size)
    prompts = [[*beginnings[row % len(beginnings)], *ids] for row, ids in enumerate(prompts)]
    assert batch.most_items == batch_size
    texts = texts_of(batch, [Item(row, prompt, MOST - row % 3, seed=row) for row, prompt in enumerate(prompts)])
    assert sorted(texts) == list(range(num_rows))
    for row, ids in texts.items():
        assert END not in ids[:-1]
        assert ids[-1] == END or len(ids) == MOST - row % 3
    if not temperature:
        for row, prompt in enumerate(prompts):
            alone = target.generate(
                torch.tensor([prompt]), max_new_tokens=MOST - row % 3, do_sample=False, pad_token_id=0
            )
            assert alone[0, len(prompt) :].tolist() == texts[row]
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_refilled_batch_writes_what_each_text_would_be_alone_in_fewer_forwards(temperature, monkeypatch):
    target, num_read, texts = ending_target("qwen3"), [], []
    forward = type(target).forward

    @functools.wraps(forward)
    def counting(self, input_ids=None, **options):
        num_read[-1] += input_ids.numel()
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(target), "forward", counting)
    for joins_caches in (True, False):
        num_read.append(0)
        texts.append(written(target, temperature, joins_caches=joins_caches))
    assert texts[0] == texts[1] == written(target, temperature, batch_size=1)
    assert len({len(ids) for ids in texts[0].values()}) > 5
    # Without a cache to be joined what was written is read again.
    assert num_read[0] < 0.8 * num_read[1]


def test_what_prompts_begin_with_is_read_once(monkeypatch):
    target = ending_target("qwen3")
    num_read, forward = [], type(target).forward

    @functools.wraps(forward)
    def counting(self, input_ids=None, **options):
        num_read[-1] += input_ids.numel() if input_ids.shape[1] > 1 else 0
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(target), "forward", counting)
    # Too short to be read by itself, long, and another that begins in the same way.
    for beginnings, most in (((range(3, 6),), 1.0), ((range(3, 103),), 0.3), ((range(3, 103), range(3, 83)), 0.5)):
        monkeypatch.setattr(RefilledBatch, "_num_shared", lambda self, group: 0)
        num_read.append(0)
        apart = written(target, temperature=0.9, beginnings=beginnings)
        monkeypatch.undo()
        monkeypatch.setattr(type(target), "forward", counting)
        num_read.append(0)
        assert written(target, temperature=0.9, beginnings=beginnings) == apart
        assert num_read[-1] <= most * num_read[-2]
        written(target, beginnings=beginnings)
    # Whole prompts that are the same leave a token to be read.
    monkeypatch.setattr(type(target), "forward", forward)
    writer = LocalWriter(target, tiny_chat_tokenizer(), temperature=0.0, max_tokens=MOST, batch_size=3)
    texts = texts_of(writer.new_batch(), [Item(row, [*range(3, 30)], MOST, seed=row) for row in range(5)])
    alone = target.generate(torch.tensor([[*range(3, 30)]]), max_new_tokens=MOST, do_sample=False, pad_token_id=0)
    assert texts == dict.fromkeys(range(5), alone[0, 27:].tolist())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_of_many_kinds_write_the_same_text(architecture):
    """Some have windows of 6 tokens, some experts, some attention sinks."""
    target = ending_target(architecture)
    assert has_entries_per_token(target)
    for beginnings in ([()], [range(3, 33)]):
        written(target, num_rows=9, beginnings=beginnings)
        written(target, temperature=0.9, num_rows=9, beginnings=beginnings)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_a_cpu_are_those_of_the_target_to_rounding(attention, dtype):
    target = tiny_target("llama", vocab_size=299, hidden_size=256, intermediate_size=512).to(dtype)
    target.set_attn_implementation(attention)
    ids = torch.randint(3, 299, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for context in (nullcontext(), FastSteps(), packed_layers(target, wanted=True)):
        cache = DynamicCache()
        with torch.no_grad(), context:
            target(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
            cache = JoinedCache(cache, 3, [8] * 3, num_shared=0)
            step = target(ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache)
        logits.append(step.logits.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    for others in logits[1:]:
        torch.testing.assert_close(others, logits[0], atol=tolerance, rtol=tolerance)


def test_weights_are_packed_for_the_steps_of_a_batch(monkeypatch):
    target = tiny_target("llama", vocab_size=299, hidden_size=256, intermediate_size=512)
    packed_for, usual = [], packed_weights.faster_layout

    def noted(matrix):
        packed_for.append(packing_trials._num_expected())
        return usual(matrix)

    monkeypatch.setattr(packed_weights, "faster_layout", noted)
    monkeypatch.setattr(packing_trials, "NUM_TRIALS", 0)
    monkeypatch.setattr(packing_trials, "_trials", {})
    written(with_ends(target), batch_size=19)
    assert {*packed_for} == {19}


@pytest.mark.parametrize("name", [*HYBRIDS, *ROPE_TARGETS])
def test_targets_that_remember_more_than_entries_read_again(name):
    target = with_ends(hybrid_target(name) if name in HYBRIDS else ROPE_TARGETS[name]())
    assert not has_entries_per_token(target)
    if name in HYBRIDS:
        written(target, num_rows=9)
    else:
        # Their texts do depend on the longest of a batch.
        assert written(fresh(target), temperature=0.9, num_rows=9).keys() == set(range(9))
