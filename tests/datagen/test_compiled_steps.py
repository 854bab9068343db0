"""Compiled steps write what uncompiled ones do, for batches of all sizes, and are done without where they would not."""

import pytest
import torch
from transformers import CompileConfig

from ending_targets import ending_target
from hf_pardraft.datagen import compiled_steps
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.refilled_batch import Item
from tiny_models import tiny_target
from tiny_tokenizers import tiny_chat_tokenizer

MOST = 24


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch):
    monkeypatch.setattr(compiled_steps, "SECONDS_BEFORE", 0.0)


def texts_of(writer, num_rows=31):
    """What follows prompts of many lengths, by row."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 299, (3 + 7 * row % 23,), generator=generator).tolist() for row in range(num_rows)]
    waiting = [Item(row, prompt, MOST - row % 3, seed=row) for row, prompt in enumerate(prompts)]
    batch, texts = writer.new_batch(), {}
    while waiting or batch.items:
        batch.refill(waiting)
        texts |= {item.row: item.written for item in batch.write_on()}
    return texts


def writer_for(target, temperature=0.0):
    return LocalWriter(target, tiny_chat_tokenizer(), temperature=temperature, top_p=0.9, max_tokens=MOST, batch_size=4)


def uncompiled_texts(target, temperature=0.0):
    writer = writer_for(target, temperature)
    writer.steps.may_compile = False
    return texts_of(writer)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_texts_are_the_same_and_nothing_is_compiled_twice(architecture, monkeypatch):
    target = ending_target(architecture)
    writer = writer_for(target)
    # Full buffers, too, have columns that are not used.
    monkeypatch.setattr("hf_pardraft.datagen.joined_cache.MORE_COLUMNS", 5)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    assert texts_of(writer) == uncompiled_texts(target)
    assert writer.steps.may_compile
    assert writer.steps.num_steps > 10
    assert graphs["unique_graphs"] == before + 1
    sampling = writer_for(target, temperature=0.9)
    assert texts_of(sampling) == uncompiled_texts(target, temperature=0.9)
    assert sampling.steps.num_steps > 10
    assert graphs["unique_graphs"] == before + 1
    assert "forward" not in vars(target)


def test_changed_weights_are_multiplied_by():
    target = ending_target("llama")
    writer = writer_for(target)
    before = texts_of(writer)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(1.5)
    after = texts_of(writer)
    assert after == uncompiled_texts(target) != before
    assert writer.steps.may_compile


def test_steps_that_would_be_others_are_not_compiled(monkeypatch):
    target = ending_target("llama")
    monkeypatch.setattr(compiled_steps, "is_close", lambda *logits: False)
    writer = writer_for(target)
    assert texts_of(writer) == uncompiled_texts(target)
    assert not writer.steps.may_compile
    assert not writer.steps.num_steps


def test_steps_that_cannot_be_compiled_are_not(monkeypatch):
    def failing(graph, inputs):
        raise RuntimeError("no compiler here")

    target = ending_target("llama")
    monkeypatch.setattr(compiled_steps, "CompileConfig", lambda dynamic: CompileConfig(backend=failing))
    writer = writer_for(target)
    assert texts_of(writer) == uncompiled_texts(target)
    assert not writer.steps.may_compile
    assert not writer.steps.num_steps


def test_some_minutes_are_written_first_and_hooked_targets_are_left_alone(monkeypatch):
    monkeypatch.setattr(compiled_steps, "SECONDS_BEFORE", 300.0)
    writer = writer_for(ending_target("llama"))
    texts_of(writer)
    assert 0 < writer.steps.seconds < 300
    assert not writer.steps.num_steps
    hooked = tiny_target("llama")
    hooked.model.norm.forward = hooked.model.norm.forward
    assert not compiled_steps.can_compile(hooked)
    assert not compiled_steps.can_compile(tiny_target("mistral"))
