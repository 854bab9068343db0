"""Texts written together are those that each would be alone, whoever comes and goes."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPTNeoConfig, OpenAIGPTConfig

from architecture_cases import tiny_model
from ending_targets import END, ending_target, ragged_prompts, texts_of, with_ends
from hf_pardraft.datagen.fast_steps import FastSteps
from hf_pardraft.datagen.joined_cache import JoinedCache, has_entries_per_token, may_have_gaps
from hf_pardraft.datagen.local_writer import LocalWriter
from hf_pardraft.datagen.refilled_batch import Item, RefilledBatch
from hf_pardraft.generation.packing import packed_weights, packing_trials
from hf_pardraft.generation.packing.packed_layers import packed_layers
from tiny_models import ARCHITECTURES, tiny_target
from tiny_tokenizers import tiny_chat_tokenizer
from unusual_targets import HYBRIDS, ROPE_TARGETS, fresh, hybrid_target

MOST = 24


def written(
    target,
    temperature=0.0,
    batch_size=4,
    joins_caches=None,
    num_rows=19,
    beginnings=((),),
    tokenizer=None,
    most_items=None,
) -> dict[int, list[int]]:
    """What follows prompts of many lengths, by row; they have one of some beginnings each."""
    tokenizer = tokenizer or tiny_chat_tokenizer()
    writer = LocalWriter(target, tokenizer, temperature=temperature, top_p=0.9, max_tokens=MOST, batch_size=batch_size)
    batch = writer.new_batch()
    batch.joins_caches = batch.joins_caches if joins_caches is None else joins_caches
    prompts = ragged_prompts(num_rows, target.config.get_text_config().vocab_size)
    prompts = [[*beginnings[row % len(beginnings)], *ids] for row, ids in enumerate(prompts)]
    assert batch.most_items == (most_items or batch_size)
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


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "got_ocr2"])
def test_targets_of_several_media_write_what_they_would_alone(name):
    target = with_ends(tiny_model(name))
    assert not has_entries_per_token(target)
    assert not may_have_gaps(target)
    for temperature in (0.0, 0.9):
        written(target, temperature, num_rows=9)


SETTINGS = {
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "least length": {"min_new_tokens": 9, "min_length": 30},
    "first tokens": {"begin_suppress_tokens": [5, 6, 7], "forced_bos_token_id": 9},
    "last token": {"forced_eos_token_id": 11},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "guidance": {"guidance_scale": 1.5, "encoder_repetition_penalty": 1.3, "repetition_penalty": 1.4},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2, "num_beams": 2},
    "stops": {"stop_strings": ["a"], "token_healing": True},
    "assistance": {"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 4},
}


@pytest.fixture(scope="module")
def usual_texts():
    return written(ending_target("qwen3"), temperature=0.9, num_rows=7)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_targets_own_settings_count_for_nothing_but_its_ends(settings, usual_texts):
    target = ending_target("qwen3")
    own = copy.deepcopy(target.generation_config)
    target.generation_config.update(**settings)
    changed = target.generation_config.to_dict()
    for batch_size in (1, 4):
        assert written(target, temperature=0.9, batch_size=batch_size, num_rows=7) == usual_texts
    assert target.generation_config.to_dict() == changed != own.to_dict()


def test_a_pad_token_that_has_no_row_in_the_embedding_pads_nothing():
    """As in a fine-tune whose tokenizer got one more token than its model."""
    target, tokenizer = ending_target("qwen3"), tiny_chat_tokenizer()
    expected = written(target, num_rows=7)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    while tokenizer.pad_token_id < target.config.vocab_size:
        tokenizer.add_tokens([f"<{len(tokenizer)}>"])
        tokenizer.add_special_tokens({"pad_token": f"[PAD {len(tokenizer)}]"})
    assert written(target, num_rows=7, tokenizer=tokenizer) == expected


@pytest.mark.parametrize("window", [4, 12])
def test_windows_that_count_columns_have_no_gaps_in_them(window):
    config = GPTNeoConfig(
        vocab_size=299,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config)
    assert has_entries_per_token(target)
    assert not may_have_gaps(target)
    written(with_ends(target).double(), num_rows=9, beginnings=[range(3, 30)])


def test_a_target_that_keeps_nothing_of_a_text_reads_it_again():
    config = OpenAIGPTConfig(vocab_size=299, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    torch.manual_seed(0)
    target = with_ends(AutoModelForCausalLM.from_config(config))
    assert not has_entries_per_token(target)
    # Positions are counted from a batch's first column.
    written(target.double(), batch_size=1, num_rows=5)


# Its steps take the wrong part of the mask where the first layer is a linear one, as in MiniMax-Text-01.
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize(("name", "overrides"), [("rwkv", None), ("minimax", LINEAR_FIRST)])
def test_texts_whose_target_would_read_padding_are_written_one_at_a_time(name, overrides):
    target = with_ends(tiny_model(name, overrides))
    for temperature in (0.0, 0.9):
        texts = written(target, temperature, num_rows=5, most_items=1)
        assert texts == written(target, temperature, batch_size=1, num_rows=5)


def test_an_embedding_that_does_not_say_how_many_rows_it_has_is_padded_for_as_the_tokenizer_says():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids)

    target = ending_target("qwen3")
    expected = written(target, num_rows=5)
    target.model.embed_tokens = Wrapped(target.model.embed_tokens)
    assert written(target, num_rows=5) == expected
