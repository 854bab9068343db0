"""Targets whose layers are spread over devices, as `device_map` spreads them, with a drafter on any of them."""

from functools import lru_cache

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from transformers import DynamicCache

from fake_device import CPU, PRETENDED, PretendedDevices
from hf_pardraft import NgramModel
from hf_pardraft.generation.candidate_generator import ParallelCandidateGenerator
from hf_pardraft.generation.decoder import SpeculativeDecoding
from hf_pardraft.generation.target_side.cache import HostLayer
from hf_pardraft.generation.tree.scoring import DART_SCORING
from hf_pardraft.generation.tree.token_tree import build_tree
from hf_pardraft.ngram.lookup import SMOOTHINGS
from tiny_models import VOCAB_SIZE, make_oracle, random_prompt, tiny_drafter, tiny_target

FIRST, SECOND = PRETENDED
PLACES = {"first": FIRST, "second": SECOND, "cpu": CPU}
KINDS = ("pard", "dflash", "dart")
BUDGETS = (0, 14)
RATES = [0.8, 0.7, 0.7, 0.6]
LONGEST = 10
PLAIN = {"do_sample": False, "max_new_tokens": LONGEST}


@pytest.fixture(autouse=True)
def pretended_devices():
    with PretendedDevices():
        yield


def spread(target, **places):
    """Put the embedding and half of the layers on the first device, the rest on the second, or as `places` say."""
    names = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": SECOND}
    names |= {f"model.layers.{layer}": FIRST if layer < 2 else SECOND for layer in range(4)}
    if target.config.tie_word_embeddings:
        # Where device_map="auto" keeps it.
        names["lm_head"] = FIRST
    return dispatch_model(target, {**names, **places}, FIRST, skip_keys=target._skip_keys_device_placement)


def spread_target(architecture="llama"):
    return spread(tiny_target(architecture))


def prompts(batch):
    """A prompt, or a batch of them padded on the left."""
    rows = [random_prompt(length, seed=seed)[0] for seed, length in enumerate((7, 3, 5)[:batch])]
    ids = torch.stack([torch.nn.functional.pad(row, (7 - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def on(device, inputs):
    return {name: value.to(device) for name, value in inputs.items()}


@lru_cache
def plain_text(architecture, batch):
    """What the undivided target writes without a drafter."""
    return tiny_target(architecture).generate(**prompts(batch), **PLAIN)


def new_drafter(kind, target, device):
    """An untrained drafter on `device`; of the layers that it taps, one at least is on either side of the divide."""
    # DART's are the outputs of layers 0, 1 and 2.
    if kind == "dart":
        # Its head begins as a copy of the target's, and one on a pretended device is not taken for a plain one.
        return tiny_drafter(kind, tiny_target(target.config.model_type.removesuffix("_text"))).to(device)
    drafter = tiny_drafter(kind, target, **({"target_layer_ids": [1, 2]} if kind == "dflash" else {}))
    return drafter.to(device)


def oracle(kind, target, place, budget, plain, inputs):
    """An oracle that is right about the text `plain`, on a device."""
    drafter = new_drafter(kind, target, PLACES[place])
    drafter.generation_config.tree_budget = budget
    texts = [text[int((mask == 0).sum()) :] for text, mask in zip(plain, inputs["attention_mask"], strict=True)]
    return make_oracle(drafter, texts, RATES, runner_up=0.7)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("architecture", "place"), [*(("llama", place) for place in PLACES), ("gemma3", "second")])
def test_the_text_is_that_of_the_undivided_target(architecture, kind, place, budget):
    target = spread_target(architecture)
    for batch in (1, 3):
        inputs, plain = prompts(batch), plain_text(architecture, batch)
        drafter = oracle(kind, target, place, budget, plain, inputs)
        out = target.generate(**on(FIRST, inputs), assistant_model=drafter, **PLAIN)
        assert out.device == FIRST
        assert torch.equal(out.cpu(), plain)
        assert drafter.last_stats.tau > 1.4


def recorded_drafts(drafter):
    """The logits of every draft that a drafter makes from now on."""
    drafts, real_draft = [], drafter.draft

    def draft(*args):
        drafts.append(real_draft(*args))
        return drafts[-1]

    drafter.draft = draft
    return drafts


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_drafts_are_those_for_the_undivided_target(kind, place):
    inputs, found = prompts(3), []
    for target, device in ((tiny_target(), CPU), (spread_target("qwen3"), FIRST)):
        drafter = new_drafter(kind, target, CPU if device == CPU else PLACES[place])
        found.append(recorded_drafts(drafter))
        target.generate(**on(device, inputs), assistant_model=drafter, do_sample=False, max_new_tokens=5)
    assert len(found[0]) == len(found[1]) > 1
    for undivided, divided in zip(*found, strict=True):
        torch.testing.assert_close(divided.cpu(), undivided, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_undivided_target(kind, verification):
    inputs, found = prompts(3), []
    for target, device in ((tiny_target(), CPU), (spread_target("qwen3"), FIRST)):
        drafter = new_drafter(kind, target, CPU if device == CPU else SECOND)
        drafter.generation_config.verification = verification
        torch.manual_seed(0)
        options = {"do_sample": True, "temperature": 3.0, "top_k": 20, "max_new_tokens": LONGEST}
        found.append(target.generate(**on(device, inputs), assistant_model=drafter, **options).cpu())
    assert torch.equal(*found)
    assert found[1].shape == (3, 7 + LONGEST)
    assert all(0 <= token < VOCAB_SIZE for token in found[1].flatten().tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_stay_where_the_layers_are(kind):
    target, inputs = spread_target(), prompts(3)
    # This hook brings all outputs back to the device of the inputs.
    remove_hook_from_module(target)
    plain = plain_text("llama", 3)
    drafter = oracle(kind, target, "second", 14, plain, inputs)
    assert torch.equal(target.generate(**on(FIRST, inputs), assistant_model=drafter, **PLAIN).cpu(), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_may_stay_on_the_cpu(kind):
    target, inputs = spread_target(), prompts(3)
    plain = plain_text("llama", 3)
    drafter = oracle(kind, target, "second", 14, plain, inputs)
    out = target.generate(**inputs, assistant_model=drafter, **PLAIN)
    assert out.device == CPU
    assert torch.equal(out, plain)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_end_at_different_times_under_processors_that_read_the_text(kind, budget):
    undivided, target, inputs = tiny_target("llama"), spread_target(), prompts(3)
    plain = undivided.generate(**inputs, repetition_penalty=1.3, **PLAIN)
    options = {**PLAIN, "repetition_penalty": 1.3, "eos_token_id": [int(plain[0, 9]), int(plain[1, 11])]}
    expected = undivided.generate(**inputs, **options)
    assert bool((expected[:, -1] == 0).any())
    drafter = oracle(kind, target, "second", budget, plain, inputs)
    assert torch.equal(target.generate(**on(FIRST, inputs), assistant_model=drafter, **options).cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_and_what_is_recorded_are_those_of_the_undivided_target(kind):
    found = []
    for target, device in ((tiny_target("gemma3"), CPU), (spread_target("gemma3"), FIRST)):
        drafter = new_drafter(kind, target, CPU if device == CPU else SECOND)
        options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
        options |= {"output_scores": True, "output_hidden_states": True}
        turn = target.generate(**on(device, prompts(1)), assistant_model=drafter, **options)
        text = torch.cat([turn.sequences, random_prompt(4, seed=9).to(device)], dim=1)
        options["past_key_values"] = turn.past_key_values
        turn = target.generate(text, attention_mask=torch.ones_like(text), assistant_model=drafter, **options)
        found.append((turn.sequences.cpu(), torch.cat(turn.scores).cpu(), turn.hidden_states[0][3].cpu()))
    for undivided, divided in zip(*found, strict=True):
        torch.testing.assert_close(divided, undivided, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_own_loop_writes_the_same(kind):
    target, inputs = spread_target(), prompts(1)
    plain = plain_text("llama", 1)
    drafter = new_drafter(kind, target, SECOND)
    drafter.generation_config.decode_loop = "stock"
    assert torch.equal(target.generate(**on(FIRST, inputs), assistant_model=drafter, **PLAIN).cpu(), plain)


# The prompt is where its text is, which is what transformers warns of.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize("offloaded", ["ends", "embedding"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_target_may_be_offloaded(kind, offloaded):
    names = {"model.layers.3": "cpu", "lm_head": "cpu"} if offloaded == "ends" else {"model.embed_tokens": "cpu"}
    target, inputs = spread(tiny_target("llama"), **names), prompts(3)
    assert target.get_parameter(f"{next(reversed(names))}.weight").is_meta
    plain = plain_text("llama", 3)
    drafter = oracle(kind, target, "first", 14, plain, inputs)
    assert torch.equal(target.generate(**on(FIRST, inputs), assistant_model=drafter, **PLAIN).cpu(), plain)


def used_devices(layers):
    return [layer.keys.device for layer in layers]


@pytest.mark.parametrize(("architecture", "implementation"), [("llama", "offloaded"), ("gemma3", "offloaded_static")])
def test_an_offloaded_cache_is_in_host_memory_and_comes_back_as_without_offloading(
    architecture, implementation, monkeypatch
):
    held = []
    update = HostLayer.update
    monkeypatch.setattr(
        HostLayer, "update", lambda layer, *args: (update(layer, *args), held.append(layer.key_buffer.device))[0]
    )
    given, plain = prompts(3), plain_text(architecture, 3)
    target = tiny_target(architecture).to(FIRST)
    drafter = oracle("pard", target, "first", 14, plain, given)
    options = {"assistant_model": drafter, "return_dict_in_generate": True, **PLAIN}
    found = target.generate(**on(FIRST, given), **options, cache_implementation=implementation)
    assert torch.equal(found.sequences.cpu(), plain)
    assert set(held) == {CPU}
    cache, other = found.past_key_values, tiny_target(architecture)
    options["assistant_model"] = oracle("pard", other, "cpu", 14, plain, given)
    kind = {"offloaded": "dynamic", "offloaded_static": "static"}[implementation]
    left = other.generate(**given, **options, cache_implementation=kind, disable_compile=True).past_key_values
    # As after a forward: what is read next is where it is read.
    stays = [cache.only_non_sliding and slides for slides in cache.is_sliding]
    first = stays.index(False)
    assert used_devices(cache.layers) == [
        FIRST if stays[layer] or layer == first else CPU for layer in range(len(stays))
    ]
    for layer, expected in zip(cache.layers, left.layers, strict=True):
        torch.testing.assert_close(layer.keys.cpu(), expected.keys)


def test_a_chat_goes_on_from_an_offloaded_cache():
    given, target = prompts(1), tiny_target("llama").to(FIRST)
    plain = plain_text("llama", 1)
    drafter = oracle("dflash", target, "first", 0, plain, given)
    cache = DynamicCache(config=target.config, offloading=True)
    options = {"assistant_model": drafter, "past_key_values": cache, "do_sample": False}
    first = target.generate(given["input_ids"].to(FIRST), max_new_tokens=4, **options)
    assert used_devices(cache.layers) == [FIRST, CPU, CPU, CPU]
    assert torch.equal(target.generate(first, max_new_tokens=LONGEST - 4, **options).cpu(), plain)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("budget", [0, 8])
def test_an_offloaded_cache_keeps_what_windows_leave_behind_in_host_memory(budget, recording, monkeypatch):
    given, target = prompts(1), tiny_target("gemma3").to(FIRST)
    drafter = oracle("dflash", target, "first", budget, plain_text("gemma3", 1), given)
    on_device = []
    round_of = SpeculativeDecoding.round

    def watched(self):
        round_of(self)
        on_device.append([layer.keys.device == FIRST for layer in self.reader.cache.layers])

    monkeypatch.setattr(SpeculativeDecoding, "round", watched)
    caches = []
    # Plain generate can't offload to a device that is pretended.
    for offloading, assistant in ((False, None), (True, drafter)):
        cache = DynamicCache(config=target.config if recording else None, offloading=offloading)
        cache.activate_past_recording()
        options = {"assistant_model": assistant, "past_key_values": cache, **PLAIN}
        text = target.generate(**on(FIRST, given), **options)
        assert torch.equal(text.cpu(), plain_text("gemma3", 1))
        caches.append(cache)
    assert on_device
    assert not any(map(any, on_device))
    for layer, expected in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(layer.keys.cpu(), expected.keys.cpu())


MIXES = {
    "sum": lambda first, second: first + second,
    "product": lambda first, second: first @ second.to(CPU),
    "concatenation": lambda first, second: torch.cat([first, second]),
    "choice": lambda first, second: torch.where(first > 0, first, second),
    "index": lambda first, second: first[second.long()],
    "index of a place": lambda first, second: first.__setitem__(second.long(), 0),
    "gathered index": lambda first, second: first.gather(0, second.long().to(CPU)),
    "value": lambda first, second: first.__setitem__(first.long(), second),
    "target of a sum": lambda first, second: torch.ones((), device=CPU).add_(first.sum()),
    "index of the cpu": lambda first, second: torch.ones(3)[second.long()],
}


@pytest.mark.parametrize("mix", MIXES)
def test_the_pretended_devices_notice_a_mix(mix):
    with pytest.raises(RuntimeError, match="same device"):
        MIXES[mix](torch.ones(2, 2, device=FIRST), torch.ones(2, 2, device=SECOND))


def test_the_pretended_devices_allow_what_torch_allows():
    first, second = torch.zeros(2, 3, device=FIRST), torch.ones(2, 1, device=SECOND)
    first[:, 1:2] = second
    first[:, 2:].copy_(second)
    first[torch.tensor([0]), torch.tensor([0])] = torch.tensor(5.0)
    assert (first * torch.tensor(2.0)).device == FIRST
    assert torch.where(first > 0, torch.tensor(1.0), first)[torch.tensor([1])].tolist() == [[0.0, 1.0, 1.0]]
    assert first.tolist() == [[5.0, 1.0, 1.0], [0.0, 1.0, 1.0]]


def states_left_where_they_are(candidates, hidden_states, rows):
    return torch.cat([hidden_states[tap][:, rows] for tap in candidates.taps], dim=-1)


def test_states_that_are_not_brought_together_are_noticed(monkeypatch):
    target = spread_target()
    remove_hook_from_module(target)
    monkeypatch.setattr(ParallelCandidateGenerator, "tapped", states_left_where_they_are)
    with pytest.raises(RuntimeError, match="at least two devices, maia:0 and maia:1"):
        target.generate(**on(FIRST, prompts(1)), assistant_model=new_drafter("dflash", target, FIRST), **PLAIN)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [2, 4])
def test_ngrams_are_looked_up_on_any_device(smoothing, order):
    model = NgramModel.from_token_stream(random_prompt(400), vocab_size=VOCAB_SIZE, order=order).smoothed(smoothing)
    context, logits = random_prompt(5), torch.randn(1, 4, VOCAB_SIZE)
    candidates = logits.topk(8).indices
    expected = model(context, candidates[:, 0])
    moved = model.to(FIRST)
    assert moved.device == FIRST
    assert moved.to(FIRST) is moved
    # Without anything that waits for the device, or that only a CPU can.
    found = moved(context.to(FIRST), candidates[:, 0].to(FIRST))
    assert found.device == FIRST
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(moved.count(context[:, :2].to(FIRST)).cpu(), model.count(context[:, :2]))
    counted_there = NgramModel.from_token_stream([random_prompt(400)[0].to(FIRST)], vocab_size=VOCAB_SIZE, order=order)
    assert counted_there.info == model.info
    options = {"budget": 20, "beam_width": 6, "top_k": 8, "scoring": DART_SCORING}
    tree = build_tree(logits, ngram=model, ngram_context=context, end_token_id=3, **options)
    for ngram, device in ((moved, FIRST), (moved, SECOND), (moved, CPU), (model, FIRST)):
        on_device = build_tree(
            logits.to(device), ngram=ngram, ngram_context=context.to(device), end_token_id=3, **options
        )
        assert on_device.tokens.device == device
        assert torch.equal(on_device.tokens.cpu(), tree.tokens)
        assert torch.equal(on_device.parents.cpu(), tree.parents)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_with_an_ngram_model_write_the_same_wherever_it_is(kind, place, tmp_path):
    target, inputs, plain = spread_target(), prompts(3), plain_text("llama", 3)
    model = NgramModel.from_token_stream(plain, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path)
    for ngram in (model, model.to(FIRST), str(tmp_path)):
        drafter = oracle(kind, target, place, 14, plain, inputs)
        if isinstance(ngram, str):
            drafter.generation_config.ngram_model = ngram
        else:
            drafter.ngram = ngram
        out = target.generate(**on(FIRST, inputs), assistant_model=drafter, **PLAIN)
        assert torch.equal(out.cpu(), plain)
        assert drafter.last_stats.tau > 1.4
