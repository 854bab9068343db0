"""Compiled steps write what uncompiled ones do, for batches of all sizes, and are done without where they would not."""

import pytest
import torch

from ending_targets import ending_target, ragged_prompts, texts_of
from hf_pardraft.datagen import compiled_steps
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.refilled_batch import Item
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.packing import packed_layers, packed_weights
from tiny_models import tiny_target
from tiny_tokenizers import tiny_chat_tokenizer

MOST = 24
# Dynamo and inductor take seconds for each layer, and what is seen of two is seen of all. With this seed texts are long.
TWO_LAYERS = {"num_hidden_layers": 2, "seed": 1}
ONE_LAYER = {**TWO_LAYERS, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch):
    monkeypatch.setattr(compiled_steps, "SECONDS_BEFORE", 0.0)


def written(writer, num_rows=31, length=None):
    """What follows prompts of many lengths, or of one, by row."""
    prompts = enumerate(ragged_prompts(num_rows, 299, length))
    return texts_of(writer.new_batch(), [Item(row, prompt, MOST - row % 3, seed=row) for row, prompt in prompts])


def writer_for(target, temperature=0.0):
    return LocalWriter(target, tiny_chat_tokenizer(), temperature=temperature, top_p=0.9, max_tokens=MOST, batch_size=4)


def uncompiled_texts(target, temperature=0.0, **which):
    writer = writer_for(target, temperature)
    writer.steps.may_compile = False
    return written(writer, **which)


# Phi-3's layers are others by themselves.
@pytest.mark.parametrize(("architecture", "layers"), [("llama", TWO_LAYERS), ("phi3", ONE_LAYER)])
def test_texts_are_the_same_and_nothing_is_compiled_twice(architecture, layers, monkeypatch):
    target = ending_target(architecture, **layers)
    writer = writer_for(target)
    # Full buffers, too, have columns that are not used.
    monkeypatch.setattr("hf_pardraft.datagen.joined_cache.MORE_COLUMNS", 5)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    assert written(writer) == uncompiled_texts(target)
    assert writer.steps.may_compile
    assert writer.steps.num_steps > 10
    compiled = graphs["unique_graphs"]
    assert compiled == before + 1
    sampling = writer_for(target, temperature=0.9)
    assert written(sampling) == uncompiled_texts(target, temperature=0.9)
    assert sampling.steps.num_steps > 10
    assert graphs["unique_graphs"] == compiled
    assert "forward" not in vars(target)


def test_changed_weights_are_multiplied_by():
    target = ending_target("llama", **TWO_LAYERS)
    writer = writer_for(target)
    before = written(writer)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(1.5)
    after = written(writer)
    assert after == uncompiled_texts(target) != before
    assert writer.steps.may_compile


def test_texts_of_one_length_have_no_mask():
    target = ending_target("llama", num_hidden_layers=2)
    writer = writer_for(target)
    assert written(writer, num_rows=4, length=9) == uncompiled_texts(target, num_rows=4, length=9)
    assert writer.steps.num_steps > 0


def test_as_many_items_as_heads_are_no_case_of_their_own():
    target = ending_target("llama", num_key_value_heads=4, **ONE_LAYER)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    writer = writer_for(target)
    assert written(writer) == uncompiled_texts(target)
    assert graphs["unique_graphs"] == before + 1


@pytest.mark.parametrize("what", ["logits", "keys"])
def test_steps_that_would_be_others_are_not_compiled(what, monkeypatch):
    """And leave nothing behind."""

    def wrong(self, step, shape, target, ids, positions, real, layers):
        logits = step(target, ids, positions, real, layers)
        for keys, _ in layers if what == "keys" else []:
            keys[:, :, -1:] += 1
        return logits + (what == "logits")

    target = ending_target("llama", **TWO_LAYERS)
    monkeypatch.setattr(Compiler, "__call__", wrong)
    monkeypatch.setattr(Compiler, "has_compiled", lambda *which: True)
    writer = writer_for(target)
    assert written(writer) == uncompiled_texts(target)
    assert not writer.steps.may_compile
    assert not writer.steps.num_steps


@pytest.mark.parametrize("fails_late", [False, True])
def test_steps_that_cannot_be_compiled_are_not(fails_late, monkeypatch):
    target = ending_target("llama", **TWO_LAYERS)
    expected = uncompiled_texts(target)
    calls, call = [], Compiler.__call__

    def failing(*arguments):
        calls.append(arguments)
        if not fails_late:
            raise ValueError("no such mask")
        return call(*arguments)

    monkeypatch.setattr(Compiler, "__call__", failing)
    monkeypatch.setattr(Compiler, "has_compiled", lambda *which: len(calls) < 3)
    writer = writer_for(target)
    assert written(writer) == expected
    assert not writer.steps.may_compile
    assert len(calls) == (3 if fails_late else 1)


def test_no_copies_are_made_that_there_is_no_memory_for(monkeypatch):
    made = []
    monkeypatch.setattr(compiled_steps, "Compiler", lambda target, config, packs: made.append(packs) or Never())
    monkeypatch.setattr(packed_layers, "free_memory", lambda: 0)
    monkeypatch.setattr(packed_weights, "FEWEST_ELEMENTS", 1)
    target = ending_target("llama", **TWO_LAYERS)
    assert written(writer_for(target)) == uncompiled_texts(target)
    assert made == [False]


class Never:
    """A compiler that compiles nothing."""

    def __call__(self, *arguments):
        raise RuntimeError

    def has_compiled(self, *which):
        return False

    def check_again(self):
        pass


def test_some_minutes_are_written_first_and_hooked_targets_are_left_alone(monkeypatch):
    monkeypatch.setattr(compiled_steps, "SECONDS_BEFORE", 300.0)
    writer = writer_for(ending_target("llama"))
    written(writer)
    assert 0 < writer.steps.seconds < 300
    assert not writer.steps.num_steps
    hooked = tiny_target("llama")
    hooked.model.norm.forward = hooked.model.norm.forward
    assert not compiled_steps.can_compile(hooked)
    assert not compiled_steps.can_compile(tiny_target("mistral"))
    flexible = tiny_target("llama")
    flexible.set_attn_implementation("flex_attention")
    assert not compiled_steps.can_compile(flexible)
