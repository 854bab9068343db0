"""What plain `generate` accepts is honoured: processors, stopping, streamers, returned outputs."""

import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3nTextConfig,
    GPT2Config,
    GPTNeoConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter
from hf_pardraft.generation import checks
from tiny_models import (
    MASK_TOKEN_ID,
    batch_oracle,
    make_oracle,
    ragged_prompts,
    random_prompt,
    tiny_drafter,
    tiny_target,
)

# A drafter's kind, and the nodes of its trees (0: chains).
KINDS = (("pard", 0), ("dflash", 0), ("pard", 12), ("dflash", 12))
PROMPT = random_prompt(7)
OPTIONS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 20}


class Alternating(LogitsProcessor):
    """Keeps count of its calls: every other token must be even. Wrong as soon as one call too many is made."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == PROMPT.shape[1] + self.calls
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = -float("inf")
        return scores


class AfterToken(StoppingCriteria):
    """Stops behind a token, and remembers the lengths at which it was asked."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


class Recorder(BaseStreamer):
    def __init__(self):
        self.chunks, self.shapes, self.ended = [], [], False

    def put(self, value):
        self.chunks.append(value.flatten().tolist())
        self.shapes.append(value.shape)

    def end(self):
        self.ended = True


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def oracle(kind, budget, target, text, rates):
    drafter = make_oracle(tiny_drafter(kind, target), text, rates, runner_up=0.5)
    drafter.generation_config.tree_budget = budget
    return drafter


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def drafter(request, target):
    """Mostly right about plain greedy text, so that whole runs are accepted."""
    text = target.generate(PROMPT, **OPTIONS)
    return oracle(*request.param, target, text[0], rates=[0.9, 0.9, 0.9, 0.8])


def test_a_processor_with_a_state_of_its_own_is_called_once_a_token(target, drafter):
    expected = target.generate(PROMPT, logits_processor=[Alternating()], **OPTIONS)
    processor = Alternating()
    out = target.generate(PROMPT, logits_processor=[processor], assistant_model=drafter, **OPTIONS)
    assert torch.equal(out, expected)
    assert processor.calls == 20


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_no_processor_is_called_behind_the_token_that_ends_the_text(target, place, do_sample):
    options = {**OPTIONS, "do_sample": do_sample, "top_k": 0}
    torch.manual_seed(0)
    whole = target.generate(PROMPT, **options)
    end = int(whole[0, PROMPT.shape[1] + place])
    num_tokens = whole[0, PROMPT.shape[1] :].tolist().index(end) + 1
    for kind, budget in KINDS:
        drafter, calls = oracle(kind, budget, target, whole[0], rates=[1.0] * 4), []

        def counted(input_ids, scores, calls=calls):
            calls.append(input_ids.shape[1])
            return scores

        torch.manual_seed(0)
        found = target.generate(
            PROMPT, assistant_model=drafter, logits_processor=[counted], eos_token_id=end, pad_token_id=0, **options
        )
        assert torch.equal(found[0], whole[0, : found.shape[1]])
        assert calls == [*range(PROMPT.shape[1], PROMPT.shape[1] + num_tokens)]


def test_a_prompt_is_read_in_one_forward_and_who_asks_for_parts_is_told(target, monkeypatch):
    told = []
    monkeypatch.setattr(checks.logger, "warning_once", told.append)
    expected = target.generate(PROMPT, **OPTIONS)
    found = target.generate(PROMPT, assistant_model=tiny_drafter("pard", target), prefill_chunk_size=3, **OPTIONS)
    assert torch.equal(found, expected)
    assert ["prefill_chunk_size=3" in text for text in told] == [True]


@pytest.mark.parametrize("processing", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_prefix_free_warpers_give_plain_scores(target, drafter, processing):
    """Sampled tokens differ from run to run, so compare the scores along the common beginning."""
    options = {**OPTIONS, **processing, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    torch.manual_seed(0)
    out = target.generate(PROMPT, assistant_model=drafter, **options)
    text = out.sequences
    for step, scores in enumerate(out.scores):
        prefix = text[:, : PROMPT.shape[1] + step]
        plain = target.generate(
            prefix, **{**options, "attention_mask": torch.ones_like(prefix), "max_new_tokens": 1}
        ).scores[0]
        torch.testing.assert_close(scores, plain, rtol=1e-4, atol=1e-4)


def test_with_a_prefix_reading_processor_even_the_random_draws_are_plain_ones(target, drafter):
    options = {**OPTIONS, "do_sample": True, "repetition_penalty": 1.1, "temperature": 1.2}
    torch.manual_seed(3)
    expected = target.generate(PROMPT, **options)
    torch.manual_seed(3)
    assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **options), expected)


def test_a_custom_criterion_stops_at_the_same_token_inside_an_accepted_run(target, drafter):
    reference = target.generate(PROMPT, **OPTIONS)
    for position in range(PROMPT.shape[1], reference.shape[1]):
        token = int(reference[0, position])
        plain, ours = AfterToken(token), AfterToken(token)
        expected = target.generate(PROMPT, stopping_criteria=[plain], **OPTIONS)
        out = target.generate(PROMPT, stopping_criteria=[ours], assistant_model=drafter, **OPTIONS)
        assert torch.equal(out, expected)
        assert ours.lengths == plain.lengths


def test_stop_strings_stop_at_the_same_token(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    prompt = tokenizer("def add(a, b):", return_tensors="pt")
    options = {**prompt, "do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    text = target.generate(**options)
    written = tokenizer.decode(text[0, prompt.input_ids.shape[1] :])
    for kind, budget in KINDS:
        drafter = oracle(kind, budget, target, text[0], rates=[1.0, 1.0, 0.9, 0.9])
        for start in range(0, len(written) - 2, 5):
            stop = {"stop_strings": [written[start : start + 2]], "tokenizer": tokenizer}
            expected = target.generate(**options, **stop)
            assert torch.equal(target.generate(**options, **stop, assistant_model=drafter), expected)


def test_max_time_stops_after_the_first_token(target, drafter):
    out = target.generate(PROMPT, assistant_model=drafter, max_time=0.0, **OPTIONS)
    assert torch.equal(out, target.generate(PROMPT, max_time=0.0, **OPTIONS))


def test_a_streamer_gets_the_prompt_then_every_committed_run_in_order(target, drafter):
    streamer = Recorder()
    out = target.generate(PROMPT, assistant_model=drafter, streamer=streamer, **OPTIONS)
    assert [token for chunk in streamer.chunks for token in chunk] == out[0].tolist()
    assert streamer.chunks[0] == PROMPT[0].tolist()
    # As plain `generate` has them, so that what counts or decodes tokens one by one does.
    assert streamer.shapes[1:] == [(count,) for count in drafter.last_stats.tokens_per_round]
    assert streamer.ended


@pytest.mark.parametrize(("kind", "budget"), KINDS)
def test_a_text_iterator_streamer_works_from_a_thread(tiny_family, kind, budget):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    prompt = tokenizer("class Point:", return_tensors="pt")
    options = {**prompt, "do_sample": False, "max_new_tokens": 16}
    text = target.generate(**options)[0]
    expected = tokenizer.decode(text[prompt.input_ids.shape[1] :], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    drafter = oracle(kind, budget, target, text, rates=[0.9, 0.8, 0.7, 0.6])
    thread = threading.Thread(
        target=target.generate, kwargs={**options, "assistant_model": drafter, "streamer": streamer}
    )
    thread.start()
    assert "".join(streamer) == expected
    thread.join()
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("processing", [{}, {"repetition_penalty": 1.3}, {"suppress_tokens": [5, 9]}])
def test_returned_outputs_have_the_shapes_and_values_of_plain_generate(target, drafter, processing):
    options = {
        **OPTIONS,
        **processing,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    expected = target.generate(PROMPT, **options)
    out = target.generate(PROMPT, assistant_model=drafter, **options)
    assert torch.equal(out.sequences, expected.sequences)
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(out.scores, expected.scores, **close)
    torch.testing.assert_close(out.logits, expected.logits, **close)
    torch.testing.assert_close(out.hidden_states, expected.hidden_states, **close)
    assert type(out.past_key_values) is DynamicCache
    for found, plain in zip(out.past_key_values, expected.past_key_values, strict=True):
        torch.testing.assert_close(found[0], plain[0], **close)
        torch.testing.assert_close(found[1], plain[1], **close)


class WritesOver(LogitsProcessor):
    """Changes the scores that it is given, and no copy of them."""

    def __call__(self, input_ids, scores):
        scores[:, 5:9] -= 3.0
        return scores


@pytest.mark.parametrize("lengths", [(7,), (7, 7, 4)])
def test_returned_logits_are_what_a_processor_leaves_of_them_as_in_plain_generate(target, lengths):
    ids, mask = ragged_prompts(lengths)
    returned = {"return_dict_in_generate": True, "output_logits": True}
    options = {**OPTIONS, **returned, "attention_mask": mask, "logits_processor": [WritesOver()]}
    expected = target.generate(ids, **options)
    drafter = batch_oracle("pard", target, expected.sequences, mask)
    found = target.generate(ids, assistant_model=drafter, **options)
    assert drafter.last_stats.tau > 1.2
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)


def test_returned_attentions_equal_plain_ones(drafter):
    eager = tiny_target("llama")
    eager.set_attn_implementation("eager")
    options = {**OPTIONS, "return_dict_in_generate": True, "output_attentions": True}
    expected = eager.generate(PROMPT, **options)
    out = eager.generate(PROMPT, assistant_model=drafter, **options)
    torch.testing.assert_close(out.attentions, expected.attentions, rtol=1e-3, atol=1e-4)


def gemma3n() -> PreTrainedModel:
    """A target whose later layers attend to what earlier ones stored, and which has four hidden states per token."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        laurel_rank=4,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("budget", [0, 8])
def test_attentions_of_layers_that_share_the_cache_of_others_equal_plain_ones(budget):
    target = gemma3n()
    options = {**OPTIONS, "return_dict_in_generate": True, "output_attentions": True}
    expected = target.generate(PROMPT, **options)
    drafter = make_oracle(tiny_drafter("pard", target), expected.sequences[0], [0.8] * 4, runner_up=0.7)
    drafter.generation_config.tree_budget = budget
    found = target.generate(PROMPT, assistant_model=drafter, **options)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(7,), (1,), (7, 4, 1)])
def test_several_hidden_states_per_token_are_returned_as_by_plain_generate(lengths, budget):
    target, (ids, mask) = gemma3n(), ragged_prompts(lengths)
    options = {**OPTIONS, "attention_mask": mask, "return_dict_in_generate": True, "output_hidden_states": True}
    expected = target.generate(ids, **options)
    drafter = batch_oracle("pard", target, expected.sequences, mask, budget)
    found = target.generate(ids, assistant_model=drafter, **options)
    assert found.hidden_states[0][1].shape == (4, len(lengths), max(lengths), 32)
    real = mask[:, :, None].bool()
    for step, (states, plain) in enumerate(zip(found.hidden_states, expected.hidden_states, strict=True)):
        for own, wanted in zip(states, plain, strict=True):
            wanted = wanted if step else wanted.masked_fill(~real, 0.0)
            torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-4)


GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT_NEO = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
RANDOM = {
    "a rate of its layers": (lambda: tiny_target("llama", attention_dropout=0.3), "attention_dropout=0.3:"),
    "modules": (
        lambda: AutoModelForCausalLM.from_config(GPT2Config(**GPT2, resid_pdrop=0.2)),
        "Dropout=0.1, Dropout=0.2:",
    ),
    "a rate of its config": (
        lambda: AutoModelForCausalLM.from_config(GPTNeoConfig(**GPT_NEO, eos_token_id=None, attention_dropout=0.3)),
        "attention_dropout=0.3:",
    ),
}


@pytest.mark.parametrize("case", RANDOM)
def test_a_target_whose_forwards_are_random_is_warned_of(monkeypatch, case):
    said = []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    make, rates = RANDOM[case]
    target = make()
    drafter = tiny_drafter("pard", target)
    for is_training in (True, False):
        target.train(is_training)
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
        assert ["in training mode" in text and rates in text for text in said] == [True] * is_training
        said.clear()


def test_training_mode_alone_changes_no_text(monkeypatch):
    said = []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    for architecture in ("llama", "qwen3_moe"):
        target = tiny_target(architecture).train()
        drafter = tiny_drafter("pard", target)
        plain = target.generate(PROMPT, **OPTIONS)
        assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **OPTIONS), plain)
    assert said == []


@pytest.mark.parametrize("drafter_class", [DFlashDrafter, DFlareDrafter, DartDrafter])
def test_a_target_with_several_states_per_token_is_tapped_by_no_drafter(drafter_class):
    options = {} if drafter_class is DartDrafter else {"mask_token_id": MASK_TOKEN_ID}
    with pytest.raises(ValueError, match="4 hidden states per token"):
        drafter_class.for_target(gemma3n(), **options)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_a_cache_that_the_caller_passes_is_filled_as_by_plain_generate(architecture):
    target = tiny_target(architecture)
    plain, ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    expected = target.generate(PROMPT, past_key_values=plain, **OPTIONS)
    out = target.generate(PROMPT, past_key_values=ours, assistant_model=tiny_drafter("dflash", target), **OPTIONS)
    assert torch.equal(out, expected)
    assert ours.get_seq_length() == plain.get_seq_length() == out.shape[1] - 1
    for found, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-3, atol=1e-4)


def test_rounds_are_timed_only_when_asked(target, drafter):
    target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    assert drafter.last_stats.seconds == {}
    drafter.generation_config.time_rounds = True
    target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    assert drafter.last_stats.seconds.keys() == {"draft", "tree", "verify", "commit"}


def test_stats_add_up(target, drafter):
    target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    stats = drafter.last_stats
    assert sum(stats.tokens_per_round) == 20
    assert stats.tau == pytest.approx(20 / stats.rounds)
    for drafted, accepted, committed in zip(
        stats.drafted_per_round, stats.accepted_per_round, stats.tokens_per_round, strict=True
    ):
        assert accepted <= drafted
        assert committed in (accepted, accepted + 1)
    assert all(0 <= rate <= 1 for rate in stats.per_position_acceptance)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_the_stock_loop_returns_the_hidden_states_of_all_layers(target, kind):
    options = {**OPTIONS, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(PROMPT, **options)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.decode_loop = "stock"
    found = target.generate(PROMPT, assistant_model=drafter, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for ours, theirs in zip(found.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("budget", [0, 12])
@pytest.mark.parametrize("name", ["scores", "logits"])
def test_what_is_returned_of_a_token_holds_that_tokens_numbers_alone(name, budget):
    target, prompt = tiny_target("llama"), random_prompt(6)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.tree_budget, drafter.generation_config.draft_schedule = budget, "fixed"
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, f"output_{name}": True}
    options["attention_mask"] = torch.ones_like(prompt)
    returned = target.generate(prompt, assistant_model=drafter, **options)[name]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in returned}
    assert sum(held.values()) == len(returned) * 4 * returned[0].shape[-1]


def test_a_mixture_with_the_assistant_is_refused():
    target, prompt = tiny_target("llama"), random_prompt(6)
    with pytest.raises(ValueError, match="assistant_ensemble_weight asks for a mixture"):
        target.generate(prompt, assistant_model=tiny_drafter("dflash", target), assistant_ensemble_weight=0.5)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_the_stock_loop_goes_on_from_no_cache(kind):
    """Transformers' own reads the whole text again, behind what the cache holds of it."""
    target, prompt = tiny_target("llama"), random_prompt(6)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.decode_loop = "stock"
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    longer = torch.cat([first.sequences, random_prompt(3, seed=2)], dim=1)
    options |= {"attention_mask": torch.ones_like(longer), "past_key_values": first.past_key_values}
    before = first.past_key_values.get_seq_length()
    with pytest.raises(ValueError, match="does not go on from a cache that holds a text"):
        target.generate(longer, assistant_model=drafter, **options)
    assert first.past_key_values.get_seq_length() == before


@pytest.mark.parametrize("kind", ["pard", "pard2", "dflash", "dart"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_default_device_of_new_tensors_may_be_another(kind, count):
    """Plain `generate` writes as ever then; and a tensor that was made on this one could not be read."""
    target, prompt = tiny_target("qwen3"), PROMPT.expand(count, -1)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": count > 1}
    for budget in (0, 6):
        drafter = tiny_drafter(kind, target)
        drafter.generation_config.tree_budget, drafter.generation_config.draft_schedule = budget, "fixed"
        texts = []
        with torch.device("meta"):
            for assistant in ({}, {"assistant_model": drafter}):
                torch.manual_seed(0)
                texts.append(target.generate(prompt, **options, **assistant))
        assert torch.equal(*texts)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(6,), (6, 6)])
@pytest.mark.parametrize("who", ["the configuration", "the call"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_what_routers_put_out_is_of_no_interest(architecture, who, lengths, budget):
    """A configuration that was trained with says so, and transformers makes a loss of it, and of the mask."""
    target, (ids, mask) = tiny_target(architecture), ragged_prompts(lengths)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    expected = target.generate(ids, **options)
    drafter = batch_oracle("pard", target, expected, mask, budget)
    drafter.generation_config.draft_schedule = "fixed"
    if who == "the call":
        options["output_router_logits"] = True
    target.config.output_router_logits = who == "the configuration"
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({"do_sample": False}, 0),
        ({"do_sample": False}, 8),
        ({"do_sample": True}, 8),
        ({"do_sample": True, "num_return_sequences": 2}, 0),
    ],
)
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
def test_a_length_criterion_of_the_callers_own_goes_before_the_config(lengths, options, budget):
    """transformers then leaves out the one that it makes of its config, be that shorter or longer."""
    target = tiny_target("llama").double()
    ids, mask = ragged_prompts(lengths)
    for limit in (16, 60):
        inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, **options}
        criteria, texts = StoppingCriteriaList([MaxLengthCriteria(limit)]), []
        for is_drafted in (False, True):
            drafter = None
            if is_drafted:
                mask_of_texts = mask.repeat_interleave(len(texts[0]) // len(mask), dim=0)
                drafter = batch_oracle("pard", target, texts[0], mask_of_texts, budget).double()
            torch.manual_seed(1)
            texts.append(target.generate(**inputs, stopping_criteria=criteria, assistant_model=drafter))
        assert torch.equal(*texts)
        assert texts[0].shape[1] == limit


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(6,), (7, 2, 5)])
@pytest.mark.parametrize("limit", [{"max_new_tokens": 12.0}, {"max_new_tokens": 12.5}, {"max_length": 20.25}])
def test_a_length_that_is_no_whole_number_ends_texts_as_in_plain_generate(limit, lengths, budget):
    """As a factor makes it: transformers takes it, and compares."""
    target, (ids, mask) = tiny_target("llama").double(), ragged_prompts(lengths)
    inputs = {"input_ids": ids, "attention_mask": mask, "do_sample": False, **limit}
    plain = target.generate(**inputs)
    drafter = batch_oracle("pard", target, plain, mask, budget).double()
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), plain)


# Without a length of its own `generate` says so.
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_a_length_criterion_may_know_no_end():
    target, endless = tiny_target("llama").double(), StoppingCriteriaList([MaxLengthCriteria(float("inf"))])
    inputs = {"inputs": PROMPT, "do_sample": False, "stopping_criteria": endless}
    end = target.generate(PROMPT, do_sample=False, max_new_tokens=15)[0, -1].item()
    plain = target.generate(**inputs, eos_token_id=end)
    drafter = make_oracle(tiny_drafter("pard", target), plain[0], [1.0] * 4).double()
    assert torch.equal(target.generate(**inputs, eos_token_id=end, assistant_model=drafter), plain)


def test_a_depth_that_is_refused_is_told_with_where_it_comes_from():
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.num_assistant_tokens = 2
    target.generation_config.num_assistant_tokens = 20
    with pytest.raises(ValueError, match=r"between 1 and .* got 20 by the call or target.generation_config"):
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    drafter.generation_config.num_assistant_tokens = 30
    target.generation_config.num_assistant_tokens = None
    with pytest.raises(ValueError, match=r"got 30 by drafter.generation_config"):
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
