"""Sampled text is plain `generate`'s beside processors, criteria, returned scores and streamers, and over turns of a chat."""

from itertools import permutations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from hf_pardraft import PardDrafter
from hf_pardraft.generation.candidate_generator import evaluating
from pairwise import every_two_meet
from sampled_cases import (
    BUDGETS,
    KINDS,
    NEW,
    SEED,
    assert_every_drafter_writes_it,
    assert_plain_text,
    call,
    double_target,
    knowing,
    seeded,
    unpadded,
    untrained,
)
from tiny_models import batch_of, random_prompt, tiny_drafter, tiny_target

PROCESSING = {
    "repetition penalty": {"repetition_penalty": 1.4, "temperature": 0.8},
    "no n-gram twice": {"no_repeat_ngram_size": 2, "top_k": 12},
    "bad words": {"bad_words_ids": [[5], [9, 13], [20, 21, 22]], "top_p": 0.9},
    "least length": {"min_new_tokens": 9, "eos_token_id": [5, 6, 11, 30], "pad_token_id": 0},
    "forced end": {"forced_eos_token_id": 7, "eos_token_id": [7], "pad_token_id": 0},
    "decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": [7], "pad_token_id": 0},
    "bias": {"sequence_bias": [[[12], 2.0], [[14, 15], -3.0]]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, context_width=1)},
}


@pytest.mark.parametrize(("processing", "lengths", "budget"), every_two_meet(PROCESSING, [(6,), (7, 2, 5)], BUDGETS))
def test_processors_that_read_the_text(processing, lengths, budget):
    target, processing = double_target(), PROCESSING[processing]
    batch = batch_of(*lengths)
    plain = seeded(target, batch, **processing)
    oracle = knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), budget)
    for drafter in (oracle, untrained("dflash", target, budget)):
        assert_plain_text(target, batch, drafter, plain, **processing)
    assert oracle.last_stats.tau > 1.4


class Remembers(LogitsProcessor):
    """Lifts another token at each call, and mixes one item's scores into the next."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores + 0.3 * scores.roll(1, dims=0) * (input_ids.sum() % 3)
        scores[:, 7 * self.calls % 60] += 2
        return scores


class Jitters(LogitsProcessor):
    """Adds noise that it draws from torch's generator, now and then."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.randn_like(scores) if self.calls % 3 else scores


class Gambles(StoppingCriteria):
    """Stops an item with a chance of 1 in 20, by torch's generator."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.rand(len(input_ids)) < 1 / 20


class RunsOut(StoppingCriteria):
    """A clock that ticks once a call, as `max_time` asks one."""

    def __init__(self, ticks):
        self.ticks = ticks

    def __call__(self, input_ids, scores, **kwargs):
        self.ticks -= 1
        return torch.full((len(input_ids),), self.ticks <= 0)


def assert_own_code_sees_the_same(target, batch, budget, **makers):
    """As [`assert_plain_text`] for calls whose options are made anew for each: `makers` of processors and criteria."""

    def options():
        return {name: [make() for make in made] for name, made in makers.items()}

    plain = seeded(target, batch, **options())
    drafter = knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), budget)
    assert_plain_text(target, batch, drafter, plain, **options())
    # A text of a few tokens is over before much was drafted.
    if plain[0].shape[1] > batch["input_ids"].shape[1] + 8:
        assert drafter.last_stats.tau > 1.2
    assert_plain_text(target, batch, untrained("dflash", target, budget), plain, **options())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_a_callers_own_processor(lengths, budget):
    assert_own_code_sees_the_same(double_target(), batch_of(*lengths), budget, logits_processor=[Remembers])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_a_processor_that_returns_another_dtype(lengths, dtype):
    """Plain `generate` draws from what it gets, in that dtype, for which a generator may give other numbers."""

    class Casts(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.to(dtype)

    assert_own_code_sees_the_same(double_target(), batch_of(*lengths), 0, logits_processor=[Casts])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_a_processor_that_draws_from_the_same_generator(lengths, budget):
    """Its numbers and the tokens' come in turns, and so no noise can be drawn ahead."""
    target, batch = double_target(), batch_of(*lengths)
    assert_own_code_sees_the_same(target, batch, budget, logits_processor=[Jitters])
    assert_own_code_sees_the_same(target, batch, budget, logits_processor=[Remembers, Jitters])


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_criterion_that_draws_from_the_same_generator_of_a_batch(budget):
    target, batch = double_target(), batch_of(7, 2, 5)
    for processors in ([], [Jitters]):
        own = {"logits_processor": processors, "stopping_criteria": [Gambles]}
        assert_own_code_sees_the_same(target, batch, budget, **own)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_a_clock_that_runs_out_in_the_middle_of_what_was_accepted(lengths, budget):
    target, batch = double_target(), batch_of(*lengths)
    for ticks in range(2, 12):
        own = {"stopping_criteria": [lambda ticks=ticks: RunsOut(ticks)]}
        assert_own_code_sees_the_same(target, batch, budget, **own)


@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_no_time_leaves_one_token(lengths):
    target, batch = double_target(), batch_of(*lengths)
    plain = seeded(target, batch, max_time=0.0)
    assert plain[0].shape[1] == max(lengths) + 1
    assert_plain_text(target, batch, untrained("pard", target), plain, max_time=0.0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_texts_that_end_inside_an_accepted_run(kind, budget):
    """What was accepted after the end is forgotten, and so is its noise."""
    target, batch = double_target(), batch_of(6)
    free = seeded(target, batch, max_new_tokens=16)[0]
    drafter = knowing(kind, target, [free[0]], budget, rates=[1.0] * 6)
    for place in range(12):
        for ends in ([int(free[0, 6 + place])], [int(free[0, 6 + place]), 63, int(free[0, 17])]):
            options = {"eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": 16}
            plain = seeded(target, batch, **options)
            assert plain[0].shape[1] <= 7 + place
            assert_plain_text(target, batch, drafter, plain, **options)


@pytest.mark.parametrize("budget", BUDGETS)
def test_stop_strings(tiny_family, budget):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target").double()
    for prompts in (["def add(a, b):"], ["def add(a, b):", "class Point:", "x"]):
        batch = dict(tokenizer(prompts, return_tensors="pt", padding=True))
        length = batch["input_ids"].shape[1]
        free = seeded(target, batch, max_new_tokens=24)[0]
        for place in range(1, 20, 3):
            stop = [tokenizer.decode(free[-1, length + place : length + place + 2])]
            options = {"stop_strings": stop, "tokenizer": tokenizer, "max_new_tokens": 24}
            plain = seeded(target, batch, **options)
            drafter = knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), budget)
            assert_plain_text(target, batch, drafter, plain, **options)


@pytest.mark.parametrize("processing", [{}, {"repetition_penalty": 1.3}, {"logits_processor": [Jitters]}])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_returned_scores_and_logits_are_those_of_plain_generate(lengths, budget, processing):
    target, batch = double_target(), batch_of(*lengths)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": 9}
    options |= {"pad_token_id": 0, "top_p": 0.9, "temperature": 0.8}

    def own():
        return {
            **options,
            **processing,
            "logits_processor": [make() for make in processing.get("logits_processor", [])],
        }

    expected, state = seeded(target, batch, **own())
    drafter = knowing("dflash", target, unpadded(expected.sequences, batch["attention_mask"]), budget)
    found, own_state = seeded(target, batch, assistant_model=drafter, **own())
    assert drafter.last_stats.tau > 1.3
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(own_state, state)
    new_tokens = expected.sequences[:, max(lengths) :]
    is_text = new_tokens.eq(9).cumsum(dim=1) - new_tokens.eq(9).long() == 0
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name]) == new_tokens.shape[1]
        for step, (ours, plain) in enumerate(zip(found[name], expected[name], strict=True)):
            assert ours.shape == plain.shape
            torch.testing.assert_close(ours[is_text[:, step]], plain[is_text[:, step]], rtol=1e-5, atol=1e-5)


class Collects(BaseStreamer):
    def __init__(self):
        self.tokens, self.is_over = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.is_over = True


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_streamer_gets_the_same_tokens(budget):
    target, batch = double_target(), batch_of(6)
    streamers = [Collects(), Collects()]
    plain = seeded(target, batch, streamer=streamers[0])
    drafter = knowing("dart", target, [plain[0][0]], budget)
    assert_plain_text(target, batch, drafter, plain, streamer=streamers[1])
    assert streamers[0].tokens == streamers[1].tokens == plain[0][0].tolist()
    assert streamers[1].is_over


def test_whoever_waits_for_the_end_of_the_stream_may_seed_the_generator():
    """As a server does for the next request, in another thread."""

    class Seeds(Collects):
        def end(self):
            super().end()
            torch.manual_seed(77)

    target, batch, streamer = double_target(), batch_of(6), Seeds()
    seeded(target, batch, assistant_model=untrained("pard", target), streamer=streamer)
    found = torch.rand(3)
    torch.manual_seed(77)
    assert streamer.is_over
    assert torch.equal(found, torch.rand(3))


def sampled_turns(target, lengths, drafters):
    """A chat on one cache and one seed: what was written in each turn, and then where the generator stands."""
    cache, found = DynamicCache(config=target.config), []
    batch = batch_of(*lengths)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    torch.manual_seed(SEED)
    for turn, drafter in enumerate(drafters):
        text = call(target, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, assistant_model=drafter)
        found.append(text)
        state = torch.get_rng_state()
        ids = torch.cat([text, torch.cat([random_prompt(3, seed=7 * turn + item) for item in range(len(text))])], dim=1)
        mask = torch.nn.functional.pad(mask, (0, NEW + 3), value=1)
    return [*found, state]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lengths", [(6,), (7, 4)])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_chat_over_several_turns_is_plain_generates(architecture, lengths, budget):
    target = double_target(architecture)
    expected = sampled_turns(target, lengths, (None,) * 3)
    padding = [max(lengths) - length for length in lengths]
    for kinds in (("pard", "dflash", "dart"), ("dflare", None, "pard"), (None, "pard2", "dflash")):
        drafters = [
            kind and knowing(kind, target, [text[count:] for text, count in zip(texts, padding, strict=True)], budget)
            for kind, texts in zip(kinds, expected[:3], strict=True)
        ]
        found = sampled_turns(target, lengths, drafters)
        assert all(map(torch.equal, found, expected))
        assert all(drafter.last_stats.tau > 1.5 for drafter in drafters if drafter is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_watermarks_that_remember_and_guidance(kind):
    target = double_target()
    for options in (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
        {"guidance_scale": 1.5},
    ):
        for lengths in ((6,), (8, 8)):
            assert_every_drafter_writes_it(target, batch_of(*lengths), kind, 0, **options)


@pytest.mark.parametrize("processing", [{"repetition_penalty": 1.2}, {"do_sample": False}])
def test_a_drafter_in_training_mode_takes_no_random_numbers_of_the_text(processing):
    """With dropout its forwards would; it is in training mode still after the call, also of one that fails."""
    target, batch = double_target(), batch_of(6)
    base = tiny_target("qwen3", seed=1, num_hidden_layers=2, attention_dropout=0.3)
    drafter = PardDrafter.from_causal_lm(base, mask_token_id=63).double().train()
    drafter.generation_config.update(num_assistant_tokens=4, draft_schedule="fixed")
    options = {"do_sample": True, "max_new_tokens": NEW, **processing}

    def text_and_state(**drafted):
        torch.manual_seed(SEED)
        return target.generate(**batch, **options, **drafted), torch.get_rng_state()

    for found, expected in zip(text_and_state(assistant_model=drafter), text_and_state(), strict=True):
        assert torch.equal(found, expected)
    drafter.eval().model.layers[1].train()
    options["streamer"] = Raising()
    with pytest.raises(RuntimeError, match="no more"):
        text_and_state(assistant_model=drafter)
    modes = {name: module.training for name, module in drafter.named_modules() if module.training}
    assert modes
    assert all(name.startswith("model.layers.1") for name in modes)


class Raising(BaseStreamer):
    """Takes the prompt, and nothing after it."""

    def __init__(self):
        self.num_put = 0

    def put(self, value):
        self.num_put += 1
        if self.num_put > 1:
            raise RuntimeError("no more")

    def end(self):
        """Never."""


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_of_calls_in_threads_the_last_one_puts_training_mode_back(order):
    drafter = tiny_drafter("pard", double_target()).train()
    calls = [evaluating(drafter) for _ in range(3)]
    for each in calls:
        each.__enter__()
        assert not any(module.training for module in drafter.modules())
    for index in order[:2]:
        calls[index].__exit__(None, None, None)
        assert not any(module.training for module in drafter.modules())
    calls[order[2]].__exit__(None, None, None)
    assert all(module.training for module in drafter.modules())
