"""Whole batches at once: every row is written as if it were alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from hf_pardraft.generation.pending import items_of
from hf_pardraft.models.inputs import DraftInputs
from pairwise import every_two_meet
from tiny_models import (
    every_architecture,
    every_pair_with_a_budget,
    greedy_text,
    make_oracle,
    random_prompt,
    tiny_drafter,
    tiny_target,
)

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
LONGEST = 20
LENGTHS = (9, 3, 6, 1)
RATES = [0.7, 0.6, 0.6, 0.5]


def padded_batch(lengths=LENGTHS):
    """Prompts of different lengths, padded on the left, and the same prompts one by one."""
    prompts = [random_prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    longest = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=0) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}, prompts


def written_alone(architecture, lengths=LENGTHS):
    """What the target writes after each of these prompts if it is the only one."""
    return [greedy_text(architecture, length, LONGEST, seed)[0] for seed, length in enumerate(lengths)]


def batch_drafter(kind, target, continuations, budget, runner_up=0.7):
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.tree_budget = budget
    return make_oracle(drafter, continuations, RATES, runner_up=runner_up)


@pytest.mark.parametrize(
    ("architecture", "kind", "budget"), every_pair_with_a_budget(every_architecture(KINDS), (0, 10))
)
def test_each_row_is_written_as_if_it_were_alone(architecture, kind, budget):
    target = tiny_target(architecture)
    batch, prompts = padded_batch()
    alone = written_alone(architecture)
    untrained = tiny_drafter(kind, target)
    untrained.generation_config.tree_budget = budget
    for drafter in (untrained, batch_drafter(kind, target, alone, budget)):
        out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST)
        for row, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
            assert torch.equal(out[row, 9:], expected[prompt.shape[1] :])
    assert drafter.last_stats.tau > 1.4


@pytest.mark.parametrize(("kind", "architecture", "budget"), every_two_meet(KINDS, ["llama", "gemma3"], [0, 10]))
def test_a_batch_of_prompts_of_one_token(architecture, kind, budget):
    target = tiny_target(architecture)
    batch, _ = padded_batch((1, 1, 1))
    alone = written_alone(architecture, (1, 1, 1))
    drafter = batch_drafter(kind, target, alone, budget)
    out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST)
    assert torch.equal(out, torch.stack(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_may_gain_more_in_a_round_than_another_has_in_all(kind):
    target = tiny_target("llama")
    batch, _ = padded_batch((1, 2))
    alone = written_alone("llama", (1, 2))
    # The first row's drafts are all right, the second's all wrong.
    drafter = make_oracle(tiny_drafter(kind, target, depth=8), [alone[0], alone[1].roll(-1)], [1.0] * 8)
    out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST)
    assert torch.equal(out[0, 2:], alone[0][1:])
    assert torch.equal(out[1], alone[1])


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_rows_end_at_different_times_and_are_padded_as_plain_generate_pads_them(kind, budget):
    target = tiny_target("qwen3")
    batch, prompts = padded_batch()
    alone = written_alone("qwen3")
    ends = [
        int(text[len(prompt[0]) + offset]) for text, prompt, offset in zip(alone, prompts, (2, 7, 11, 4), strict=True)
    ]
    for eos in (ends[:1], ends, ends[1:3]):
        options = {"do_sample": False, "max_new_tokens": LONGEST, "eos_token_id": eos, "pad_token_id": 0}
        expected = target.generate(**batch, **options)
        drafter = batch_drafter(kind, target, alone, budget)
        assert torch.equal(target.generate(**batch, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_finished_rows_cost_nothing(kind):
    target = tiny_target("llama")
    batch, _ = padded_batch((5, 5, 5))
    alone = written_alone("llama", (5, 5, 5))
    # Making one may take a forward.
    drafter, sizes = batch_drafter(kind, target, alone, 0), []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    eos = [int(alone[0][7])]
    target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST, eos_token_id=eos)
    handle.remove()
    assert sizes[0] == 3
    assert sizes[-1] < 3
    assert sizes == sorted(sizes, reverse=True)
    assert len(drafter.last_stats.tokens_per_round) == sum(sizes)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_several_return_sequences_are_several_rows(kind):
    target, prompt = tiny_target("llama"), random_prompt(5)
    expected = greedy_text("llama", 5, LONGEST)
    drafter = tiny_drafter(kind, target)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": LONGEST}
    out = target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options)
    assert torch.equal(out, expected.expand(3, -1))


@pytest.mark.parametrize("budget", [0, 10])
def test_processors_that_read_the_text_see_each_row_with_its_padding(budget):
    target = tiny_target("llama")
    batch, prompts = padded_batch()
    alone = written_alone("llama")
    bias = torch.randn(len(prompts), 64, generator=torch.Generator().manual_seed(0))

    def own_processor(input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == len(bias)
        return scores + bias * (input_ids.sum(dim=1, keepdim=True) % 5)

    for options in (
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": [5, 6]},
        {"logits_processor": [own_processor]},
        {"prefix_allowed_tokens_fn": lambda row, text: [3 + row, 9, 20 + int(text[-1]) % 7]},
    ):
        expected = target.generate(**batch, do_sample=False, max_new_tokens=LONGEST, **options)
        drafter = batch_drafter("pard", target, alone, budget)
        out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST, **options)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("budget", [0, 10])
def test_criteria_are_met_at_the_same_token_with_and_without_an_end_of_text(budget):
    target = tiny_target("llama")
    batch, _ = padded_batch()
    alone = written_alone("llama")

    def criterion(input_ids, scores, **kwargs):
        return input_ids[:, 9:].sum(dim=1) > 200

    for options in ({"eos_token_id": 7}, {}):
        options = {**options, "stopping_criteria": [criterion], "do_sample": False, "max_new_tokens": LONGEST}
        expected = target.generate(**batch, **options)
        drafter = batch_drafter("dflash", target, alone, budget)
        assert torch.equal(target.generate(**batch, assistant_model=drafter, **options), expected)


class EndsAt(StoppingCriteria):
    """A caller's own, by the attribute of which plain `generate` takes it for one that pads."""

    def __init__(self, eos_token_id):
        self.eos_token_id = torch.tensor(eos_token_id)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.eos_token_id)


@pytest.mark.parametrize("budget", [0, 10])
def test_items_are_padded_for_whatever_criterion_plain_generate_pads_them(budget):
    target = tiny_target("llama")
    batch, prompts = padded_batch()
    alone = written_alone("llama")
    ends = [
        int(text[prompt.shape[1] + 3 + item]) for item, (prompt, text) in enumerate(zip(prompts, alone, strict=True))
    ]
    options = {"stopping_criteria": [EndsAt(ends)], "do_sample": False, "max_new_tokens": LONGEST, "pad_token_id": 0}
    expected = target.generate(**batch, **options)
    assert (expected[:, -1] == 0).any()
    drafter = batch_drafter("dflash", target, alone, budget)
    assert torch.equal(target.generate(**batch, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize("lengths", [(9,), LENGTHS])
def test_scores_have_the_dtype_that_a_processor_returns(budget, lengths):
    target = tiny_target("llama")
    batch, _ = padded_batch(lengths)
    alone = written_alone("llama", lengths)
    options = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True}
    options["logits_processor"] = [lambda text, scores: scores.double()]
    expected = target.generate(**batch, **options)
    drafter = batch_drafter("dflash", target, alone, budget)
    found = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 10])
def test_scores_and_states_have_plain_generates_shapes_and_values(budget):
    target = tiny_target("mistral")
    target.set_attn_implementation("eager")
    batch, _ = padded_batch()
    alone = written_alone("mistral")
    options = {
        "do_sample": False,
        "max_new_tokens": LONGEST,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    expected = target.generate(**batch, **options)
    drafter = batch_drafter("dflash", target, alone, budget)
    found = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for ours, plain in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)
    # What plain generate computes for padding is of no use to anybody, and here is zero.
    for step, (ours, plain) in enumerate(zip(found.hidden_states, expected.hidden_states, strict=True)):
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine.shape == theirs.shape
            real = batch["attention_mask"].bool() if step == 0 else slice(None)
            torch.testing.assert_close(mine[real], theirs[real], rtol=1e-3, atol=1e-4)
    for step, (ours, plain) in enumerate(zip(found.attentions, expected.attentions, strict=True)):
        for mine, theirs in zip(ours, plain, strict=True):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-3, atol=1e-4)
            if step > 0:
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize(("architecture", "is_criterion_met"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_without_an_end_of_text_rows_return_the_states_and_cache_of_plain_generate(
    architecture, is_criterion_met, budget
):
    """Some rows are ahead when the last one ends; what they wrote beyond that is forgotten."""
    target = tiny_target(architecture)
    batch, _ = padded_batch((9, 9, 9))
    alone = written_alone(architecture, (9, 9, 9))
    ends = [int(text[9 + offset]) for text, offset in zip(alone, (2, 6, 4), strict=True)]

    def criterion(input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, 9:], torch.tensor(ends)).any(dim=1)

    options = {
        "stopping_criteria": [criterion] if is_criterion_met else [],
        "do_sample": False,
        "max_new_tokens": LONGEST,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_scores": True,
    }
    expected = target.generate(**batch, **options)
    # The first row's drafts are all right, the others' mostly wrong.
    drafter = make_oracle(tiny_drafter("pard", target), [alone[0], *(t.roll(-1) for t in alone[1:])], [1.0] * 4)
    drafter.generation_config.tree_budget = budget
    found = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(found.hidden_states) == len(expected.scores)
    for ours, plain in zip(found.past_key_values, expected.past_key_values, strict=True):
        torch.testing.assert_close(ours[0], plain[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours[1], plain[1], rtol=1e-3, atol=1e-4)


def test_a_row_at_the_longest_text_leaves_the_batch():
    target = tiny_target("llama")
    batch, _ = padded_batch((5, 5))
    alone = written_alone("llama", (5, 5))
    drafter = make_oracle(tiny_drafter("pard", target), [alone[0], alone[1].roll(-1)], [1.0] * 4)
    out = target.generate(**batch, assistant_model=drafter, do_sample=False, max_new_tokens=LONGEST)
    assert torch.equal(out, torch.stack(alone))
    # Some 4 rounds with two rows, then one row alone.
    assert sum(drafter.last_stats.tokens_per_round) == 2 * LONGEST


def test_prompts_padded_on_the_right_are_refused():
    target = tiny_target("llama")
    batch, _ = padded_batch()
    flipped = {name: value.flip(1) for name, value in batch.items()}
    # The second row is one that is padded.
    for inputs in (flipped, {name: value[1:2] for name, value in flipped.items()}):
        with pytest.raises(ValueError, match="padding_side"):
            target.generate(**inputs, assistant_model=tiny_drafter("pard", target), max_new_tokens=4)


def test_a_streamer_takes_one_sequence():
    from transformers.generation.streamers import BaseStreamer

    class Silent(BaseStreamer):
        def put(self, value):
            pass

        def end(self):
            pass

    target = tiny_target("llama")
    batch, _ = padded_batch()
    with pytest.raises(ValueError, match="streamer"):
        target.generate(**batch, assistant_model=tiny_drafter("pard", target), streamer=Silent(), max_new_tokens=4)


def test_stop_strings_end_each_row_at_its_own_token(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    prompts = ["def add(a, b):", "class Point:", "x"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {**batch, "do_sample": False, "max_new_tokens": 24}
    texts = target.generate(**options)
    alone = [text[int((mask == 0).sum()) :] for text, mask in zip(texts, batch.attention_mask, strict=True)]
    written = texts[:, batch.input_ids.shape[1] :]
    for row in range(len(prompts)):
        for start in range(2, 20, 6):
            stop = {"stop_strings": [tokenizer.decode(written[row, start : start + 2])], "tokenizer": tokenizer}
            expected = target.generate(**options, **stop)
            for budget in (0, 10):
                drafter = batch_drafter("pard", target, alone, budget)
                assert torch.equal(target.generate(**options, **stop, assistant_model=drafter), expected)


@pytest.mark.parametrize("budget", [0, 10])
def test_no_time_leaves_one_token_a_row(budget):
    target = tiny_target("llama")
    batch, prompts = padded_batch()
    drafter = batch_drafter("dflash", target, [prompt[0] for prompt in prompts], budget)
    options = {**batch, "do_sample": False, "max_new_tokens": LONGEST, "max_time": 0.0}
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))


def test_rows_that_stay_bring_no_padding_of_those_that_left():
    """A row that is left alone is drafted without a mask."""
    ids, features = torch.arange(12).view(3, 4), torch.arange(24.0).view(3, 4, 2)
    context = DraftInputs(ids, ids + 100, features[:, 1:], ids[:, 1:] + 100, [1, 4, 3], [1, 3, 3])
    alone = items_of(context, [0])
    assert (alone.new_ids.tolist(), alone.new_positions.tolist(), alone.new_counts) == ([[3]], [[103]], None)
    assert (alone.features.tolist(), alone.feature_counts) == (features[:1, 3:].tolist(), None)
    assert alone.feature_positions.tolist() == [[103]]
    both = items_of(context, [2, 0])
    assert (both.new_ids.tolist(), both.new_counts) == ([[9, 10, 11], [1, 2, 3]], [3, 1])
    assert (both.features.tolist(), both.feature_counts) == (features[[2, 0], 1:].tolist(), [3, 1])
    assert items_of(context, [1, 2]).feature_counts is None


@pytest.mark.parametrize("seed", [3, 9, 23])
def test_items_that_are_as_long_again_may_be_held_in_other_columns(seed):
    # With a window of 13 one item may have dropped 3 entries and the other 4 when both come to the same length.
    target = tiny_target("mistral", seed=seed, sliding_window=13).double()
    ids = torch.randint(3, 62, (2, 5), generator=torch.Generator().manual_seed(seed))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(ids, **options)
    drafter = make_oracle(tiny_drafter("pard", target).double(), list(plain), [0.6, 0.5, 0.5, 0.5], seed=seed)
    drafter.generation_config.draft_schedule = "fixed"
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
