"""Compiled rounds write what eager ones write, round by round; seen here with steps that are left uncompiled."""

import time
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
)

from compiled_cases import (
    GREEDY,
    LONGEST,
    RATES,
    assert_same,
    assert_same_stats,
    eager_and_static,
    leave_uncompiled,
    oracle,
    settle,
    texts_of,
)
from drawn_plans import draw_plans
from hf_pardraft import NgramModel
from hf_pardraft.generation import dispatch
from hf_pardraft.generation.compiled import static_cache as buffers
from hf_pardraft.generation.compiled import steps as compiled_steps
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.compiled.decoder import CompiledDecoding
from hf_pardraft.generation.compiled.steps import Draft
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.tree.token_tree import TokenTree
from tiny_models import batch_of, make_lasting_oracle, random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
LENGTHS = (9, 3, 6, 1)
PAIRS = [
    *(("llama", kind) for kind in KINDS),
    ("mistral", "pard"),
    ("mistral", "dart"),
    ("gemma3", "pard"),
    ("gemma3", "dflare"),
    ("gpt_oss", "dflash"),
    ("qwen3_moe", "pard2"),
    ("phi3", "dflash"),
]


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """Nothing is compiled; the names of the steps that run are noted."""
    return leave_uncompiled(monkeypatch)


@pytest.fixture
def several_steps(monkeypatch):
    """Rounds are not compiled as a whole, as on an accelerator."""
    settle(monkeypatch, is_one_step=lambda decoding: False)


@pytest.fixture
def small_buffers(monkeypatch):
    """StaticKVCache grow every few rounds, and are full to the last column now and then."""
    monkeypatch.setattr(buffers, "SMALLEST", 4)
    monkeypatch.setattr(buffers, "capacity_for", lambda num_columns: num_columns)
    monkeypatch.setattr("hf_pardraft.generation.compiled.static_cache.capacity_for", lambda num_columns: num_columns)


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize(("architecture", "kind"), PAIRS)
def test_every_round_goes_as_it_goes_uncompiled(steps, architecture, kind, budget):
    target, batch = tiny_target(architecture), batch_of(*LENGTHS)
    drafter = oracle(kind, target, batch, settings={"tree_budget": budget})
    assert_same(target, batch, drafter, do_sample=False)
    assert {*steps} == {"read_commit_and_draft"}
    assert len(steps) > 3
    assert drafter.last_stats.tau > 1.4


# The target is read by the function that reads it in whole rounds, whatever its layers.
@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize(("architecture", "kind"), [pair for pair in PAIRS if pair[0] in ("llama", "gemma3")])
def test_rounds_in_several_steps(steps, several_steps, architecture, kind, budget):
    target, batch = tiny_target(architecture), batch_of(*LENGTHS)
    drafter = oracle(kind, target, batch, settings={"tree_budget": budget})
    assert_same(target, batch, drafter, do_sample=False)
    assert steps.count("read_and_commit") > 3
    assert "draft" in steps
    assert ("grow_tree" in steps) == (budget > 0)
    assert "read_commit_and_draft" not in steps
    assert drafter.last_stats.tau > 1.4


@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize("overrides", [{"shifted": False}, {"draft_token_ids": list(range(2, 50))}])
def test_darts_of_every_form(overrides, budget):
    target, batch = tiny_target("qwen3"), batch_of(5, 2)
    assert_same(target, batch, oracle("dart", target, batch, settings={"tree_budget": budget}, **overrides))


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_an_untrained_drafter_is_refused_in_every_round_alike(kind):
    target, batch = tiny_target("llama"), batch_of(7)
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.record_drafts = True
    assert_same(target, batch, drafter)


def test_float64_and_eager_attention():
    target, batch = tiny_target("gemma3").double(), batch_of(4, 8)
    target.set_attn_implementation("eager")
    assert_same(target, batch, oracle("dflash", target, batch, settings={"tree_budget": 8}))


@pytest.mark.parametrize(
    "settings",
    [
        {"tree_budget": 9, "tree_beam_width": 2},
        {"tree_budget": 9, "tree_top_k": 3, "tree_scoring": "dart"},
        *({"tree_budget": 9, "tree_end_rule": rule} for rule in ("stop", "last", "ignore")),
        {"tree_budget": 1},
        {"tree_budget": 60},
    ],
)
def test_trees_of_every_shape_and_end_rule(settings):
    target, batch = tiny_target("llama"), batch_of(5, 8)
    end = int(texts_of(target, batch)[0][-3])
    assert_same(target, batch, oracle("pard", target, batch, settings=settings), eos_token_id=end)


@pytest.mark.parametrize("rule", ["stop", "last", "ignore"])
def test_trees_with_an_ngram_model(rule):
    target, batch = tiny_target("llama"), batch_of(5, 8)
    texts = texts_of(target, batch)
    drafter = oracle("dart", target, batch, settings={"tree_budget": 12, "tree_end_rule": rule})
    drafter.ngram = NgramModel.from_token_stream(texts, vocab_size=64, order=4)
    assert_same(target, batch, drafter, eos_token_id=int(texts[1][-4]))


SAMPLING = {
    "everywhere": {"temperature": 0.7, "top_p": 0.9},
    "along the path": {"temperature": 0.7, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("settings", [{}, {"tree_budget": 8}, {"verification": "rejection"}])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_a_seed_gives_the_same_samples(kind, settings, sampling):
    target, batch = tiny_target("llama"), batch_of(6, 3)
    drafter = oracle(kind, target, batch, settings=settings)
    assert_same(target, batch, drafter, do_sample=True, **sampling)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize(
    "processing", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [5, 9]}]
)
def test_processors(processing, budget):
    target, batch = tiny_target("qwen3"), batch_of(6, 3)
    assert_same(target, batch, oracle("pard", target, batch, settings={"tree_budget": budget}), **processing)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_rows_end_at_different_times_and_at_every_place_of_a_block(small_buffers, kind, budget):
    """The longest row goes first: what it accepted behind its end must not be looked for in buffers that are full."""
    target, batch = tiny_target("llama"), batch_of(14, 2, 5)
    texts = texts_of(target, batch)
    drafter = oracle(kind, target, batch, rates=[1.0] * 4, settings={"tree_budget": budget})
    for place in range(5):
        ends = [int(texts[0][14 + 5 + place]), int(texts[2][5 + 12])]
        assert_same(target, batch, drafter, eos_token_id=ends)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_buffers_that_grow_in_the_middle_of_a_text(small_buffers, kind, budget):
    target, batch = tiny_target("gemma3"), batch_of(9, 1)
    assert_same(target, batch, oracle(kind, target, batch, settings={"tree_budget": budget}))


@pytest.mark.parametrize("budget", [0, 8])
def test_every_length_is_cut_at_the_same_token(budget):
    target, batch = tiny_target("llama"), batch_of(5)
    drafter = oracle("dflash", target, batch, rates=[0.9] * 4, settings={"tree_budget": budget})
    for length in range(1, 16):
        assert_same(target, batch, drafter, max_new_tokens=length)


@pytest.mark.parametrize(("kind", "budget"), [("pard", 0), ("dflash", 6)])
@pytest.mark.parametrize("rates", [RATES, [0.0] * 4, [0.2, 0.1, 0.1, 0.1]])
def test_rounds_without_a_draft_are_as_they_are_uncompiled(monkeypatch, steps, kind, rates, budget):
    draw_plans(monkeypatch, is_compiled=True)
    target, batch = tiny_target("qwen3"), batch_of(6)
    drafter = oracle(kind, target, batch, rates=rates, runner_up=0.0, settings={"tree_budget": budget}, longest=60)
    assert_same(target, batch, drafter, max_new_tokens=60)
    assert {1, 3, 5, budget + 1} >= {drafted + 1 for drafted in drafter.last_stats.drafted_per_round[-9:-5]}


@pytest.mark.parametrize("settings", [{}, {"tree_scoring": "dart"}, {"tree_beam_width": 3}, {"tree_top_k": 2}])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 7}])
def test_trees_of_any_depth_are_compiled_unless_a_level_is_too_narrow(steps, settings, sampling):
    target, batch = tiny_target("llama"), batch_of(6, 3)
    settings = {"tree_budget": 6, "tree_end_rule": "stop", **settings}
    drafter = oracle("dflash", target, batch, rates=[0.5, 0.4, 0.1, 0.1], runner_up=0.2, settings=settings, longest=40)
    # Rounds of a call that is nearly over draft less.
    for longest in range(5, 12):
        assert_same(target, batch, drafter, max_new_tokens=longest, **sampling)
    drafted = [depth for depth in drafter.last_stats.drafted_per_round if depth]
    assert min(drafted) < 6 if "tree_top_k" in settings else {*drafted} == {6}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rates", [[1.0] * 4, [0.0] * 4, [0.9, 0.1, 0.1, 0.1]])
def test_rounds_with_and_without_drafts_in_one_step_or_several(monkeypatch, steps, rates, several):
    """Rounds that draft end with the next draft; those that don't, don't."""
    if several:
        settle(monkeypatch, is_one_step=lambda decoding: False)
    draw_plans(monkeypatch, is_compiled=True)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = oracle("dflash", target, batch, rates=rates, runner_up=0.0, longest=60)
    assert_same(target, batch, drafter, max_new_tokens=60)
    if not several:
        assert {*steps} == {"read_commit_and_draft", "read_and_commit", "draft"}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 7}])
def test_rounds_without_a_draft_have_one_shape_after_chains_and_after_trees(monkeypatch, several, sampling):
    """Another would be compiled in the middle of a call."""
    if several:
        settle(monkeypatch, is_one_step=lambda decoding: False)
    shapes, call = set(), Compiler.__call__
    monkeypatch.setattr(
        Compiler,
        "__call__",
        lambda self, step, shape, *rest: shapes.add((step.__name__, shape)) or call(self, step, shape, *rest),
    )
    draw_plans(monkeypatch, is_compiled=True)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = oracle("dflash", target, batch, rates=[0.3] * 4, runner_up=0.0, settings={"tree_budget": 6}, longest=60)
    assert_same(target, batch, drafter, max_new_tokens=60, **sampling)
    reading = {shape for name, shape in shapes if name in ("read", "read_and_commit")}
    assert len([shape for shape in reading if shape[0] == 0]) == 1


@pytest.mark.parametrize("rates", [[1.0] * 4, [0.6] * 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_drafts_as_deep_as_its_plan(monkeypatch, kind, rates):
    """And again where the next plan is deeper: the drafter reads the same tokens once more."""
    noted, again = [], []
    read, take_back = CompiledDecoding._read_and_commit, compiled_steps.take_back

    def note(self, tree, shown):
        result = read(self, tree, shown)
        if self.plan.depth:
            noted.append((self.schedule.chosen.depth, self.next_draft.depth))
        return result

    monkeypatch.setattr(CompiledDecoding, "_read_and_commit", note)
    monkeypatch.setattr(compiled_steps, "take_back", lambda *rest: again.append(rest[0].depth) or take_back(*rest))
    draw_plans(monkeypatch, is_compiled=True)
    target, batch = tiny_target("llama"), batch_of(6, 3)
    drafter = oracle(kind, target, batch, rates=rates, settings={"tree_budget": 6}, longest=60)
    assert_same(target, batch, drafter, max_new_tokens=60)
    assert {*noted} == {(2, 2), (4, 4)}
    assert {*again} == {2}


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_drawn_plans_of_a_batch(monkeypatch, kind):
    draw_plans(monkeypatch, is_compiled=True)
    target, batch = tiny_target("qwen3"), batch_of(6, 3, 8)
    drafter = oracle(kind, target, batch, rates=[0.2] * 4, longest=50)
    assert_same(target, batch, drafter, max_new_tokens=50)


def test_several_sequences_of_one_prompt():
    target, batch = tiny_target("llama"), batch_of(6, 2)
    drafter = tiny_drafter("dflash", target)
    assert_same(target, batch, drafter, do_sample=True, num_return_sequences=3)


class EndsWithEven(StoppingCriteria):
    """Over when the last two tokens are even."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:] % 2 == 0).all(dim=1)


@pytest.mark.parametrize("lengths", [(6,), (6, 3)])
def test_a_criterion_of_ones_own(lengths):
    target, batch = tiny_target("llama"), batch_of(*lengths)
    drafter = oracle("dflash", target, batch, rates=[1.0] * 4)
    assert_same(target, batch, drafter, stopping_criteria=[EndsWithEven()], eos_token_id=62)
    assert_same(target, batch, drafter, stopping_criteria=[EndsWithEven()])


def test_stop_strings(tiny_family):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    batch = dict(tokenizer("def add(a, b):", return_tensors="pt"))
    text = tokenizer.decode(target.generate(**batch, max_new_tokens=28)[0, batch["input_ids"].shape[1] :])
    drafter = oracle("dflash", target, batch, rates=[1.0] * 4)
    for stop in (text[7:9], text[12:15]):
        assert_same(target, batch, drafter, stop_strings=[stop], tokenizer=tokenizer)


class Collected:
    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.clone())

    def end(self):
        self.parts.append(None)


def test_a_streamer_sees_the_same_runs():
    target, batch = tiny_target("llama"), batch_of(6)
    drafter, seen = oracle("dflash", target, batch), []
    for how in ({}, {"cache_implementation": "static"}):
        streamer = Collected()
        target.generate(**batch, assistant_model=drafter, max_new_tokens=20, streamer=streamer, **how)
        seen.append(streamer.parts)
    assert seen[0].pop() is None
    assert seen[1].pop() is None
    assert len(seen[0]) > 4
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("processing", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 9}])
@pytest.mark.parametrize("budget", [0, 8])
def test_returned_scores_logits_and_cache(processing, budget):
    target, batch = tiny_target("gemma3"), batch_of(6, 3)
    drafter = oracle("pard", target, batch, settings={"tree_budget": budget})
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": 9}
    (eager, eager_stats), (static, static_stats) = eager_and_static(target, batch, drafter, **options, **processing)
    assert torch.equal(static.sequences, eager.sequences)
    assert_same_stats(static_stats, eager_stats)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(static, name), getattr(eager, name), rtol=1e-4, atol=1e-4)
    assert isinstance(static.past_key_values, StaticCache)
    assert isinstance(eager.past_key_values, DynamicCache)
    assert int(static.past_key_values.get_seq_length()) == eager.past_key_values.get_seq_length()
    full = target.config.layer_types.index("full_attention")
    found, expected = static.past_key_values.layers[full], eager.past_key_values.layers[full]
    torch.testing.assert_close(found.keys[:, :, : expected.keys.shape[2]], expected.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.values[:, :, : expected.values.shape[2]], expected.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(6,), (6, 3, 5)])
def test_scores_where_a_text_ends_in_the_last_token_of_a_part_of_a_chain(lengths):
    """The slots after it, of which nothing was chosen, are like those that are there for a whole chain only."""
    target, batch = tiny_target(), batch_of(*lengths)
    drafter = oracle("pard", target, batch, rates=[0.9] * 6)
    text = texts_of(target, batch)[0][lengths[0] :].tolist()
    for longest in range(4, LONGEST):
        # One text ends before there is no more room; of a batch, the one that is ahead does so where there is none.
        ends = {"max_new_tokens": longest, "eos_token_id": text[longest - 2] if len(lengths) == 1 else None}
        options = {**ends, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.01}
        (eager, eager_stats), (static, static_stats) = eager_and_static(target, batch, drafter, **options)
        assert torch.equal(static.sequences, eager.sequences)
        assert_same_stats(static_stats, eager_stats)
        torch.testing.assert_close(static.scores, eager.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_returned_static_cache_goes_on_in_a_second_turn(architecture):
    target, batch = tiny_target(architecture), batch_of(6)
    drafter = oracle("dflash", target, batch)
    # A static cache has room for as many tokens as its call might have written.
    options = {"max_new_tokens": 60, "eos_token_id": int(texts_of(target, batch)[0][-4])}
    first = target.generate(
        **batch, assistant_model=drafter, cache_implementation="static", return_dict_in_generate=True, **options
    )
    assert first.sequences.shape[1] < 26
    ids = torch.cat([first.sequences, random_prompt(3, seed=4)], dim=1)
    turn = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 14}
    expected = target.generate(ids, **turn)
    assert torch.equal(
        target.generate(ids, past_key_values=first.past_key_values, assistant_model=drafter, **turn), expected
    )


def test_a_target_may_write_to_its_last_position():
    """GPT-2 has no position behind the last one, where compiled rounds have slots all the same."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 30, "vocab_size": 64}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    target = AutoModelForCausalLM.from_config(config).eval()
    for budget in (0, 8):
        batch = batch_of(6)
        drafter = oracle("pard", target, batch, settings={"tree_budget": budget}, longest=24)
        assert_same(target, batch, drafter, max_new_tokens=24)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("budget", [0, 8])
def test_the_longest_item_of_a_batch_is_read_at_positions_that_there_are(budget, compiled, monkeypatch):
    """The shortest item has room for a draft, and the longest none: what is proposed to that one is never committed."""
    leave_uncompiled(monkeypatch)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 27, "vocab_size": 64}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    target, batch = AutoModelForCausalLM.from_config(config).eval(), batch_of(9, 4)
    plain = target.generate(**batch, do_sample=False, max_new_tokens=18)
    longer, shorter = texts_of(target, batch, 18)
    # One item gets all that is drafted for it, the other nothing.
    drafter = make_lasting_oracle(tiny_drafter("pard", target), [longer, (shorter + 1) % 64], [1.0] * 4)
    drafter.generation_config.draft_schedule, drafter.generation_config.tree_budget = "fixed", budget
    options = {"cache_implementation": "static"} if compiled else {}
    written = target.generate(**batch, do_sample=False, max_new_tokens=18, assistant_model=drafter, **options)
    assert torch.equal(written, plain)


def test_a_call_that_plain_generate_would_not_compile_is_not_left_to_it(monkeypatch):
    names = leave_uncompiled(monkeypatch)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target.generate(**batch, assistant_model=drafter, cache_implementation="static", **GREEDY)
    assert names
    names.clear()
    target.generate(**batch, assistant_model=drafter, **GREEDY)
    assert drafter.last_stats.rounds == GREEDY["max_new_tokens"]
    assert not names


def test_no_try_is_charged_for_what_was_compiled_in_it(monkeypatch):
    """Else one bad draft after it would be the last for a thousand rounds."""
    spin, paid = 0.2, []

    def slow_at_first(step, **options):
        calls = iter([spin])

        def called(*arguments):
            until = time.thread_time() + next(calls, 0.0)
            while time.thread_time() < until:
                pass
            return step(*arguments)

        return called

    pay = Schedule._pay

    def noted(self, seconds, *of_round):
        paid.append(seconds)
        pay(self, seconds, *of_round)

    monkeypatch.setattr(torch, "compile", slow_at_first)
    monkeypatch.setattr(Schedule, "_pay", noted)
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    started = time.thread_time()
    target.generate(**batch, assistant_model=drafter, cache_implementation="static", do_sample=False, max_new_tokens=60)
    assert time.thread_time() - started > 2 * spin
    assert paid
    assert max(paid) < spin


def test_what_has_moved_into_static_tensors_is_held_once(monkeypatch):
    leave_uncompiled(monkeypatch)
    target, batch, held = tiny_target("llama"), batch_of(6, 4), []
    round_of = CompiledDecoding.round

    def watched(self):
        round_of(self)
        held.append((self.decode_state is not None, self.reader.cache.get_seq_length()))

    monkeypatch.setattr(CompiledDecoding, "round", watched)
    drafter = oracle("dflash", target, batch)
    options = {"return_dict_in_generate": True, "cache_implementation": "static", **GREEDY}
    written = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(written.sequences, target.generate(**batch, **GREEDY))
    assert written.past_key_values.get_seq_length() == written.sequences.shape[1] - 1
    assert {length > 0 for has_moved, length in held if not has_moved} == {True}
    assert {length for has_moved, length in held if has_moved} == {0}


def test_rounds_that_are_not_compiled_say_why(monkeypatch, caplog):
    names = leave_uncompiled(monkeypatch)
    told = []
    monkeypatch.setattr(dispatch.logger, "warning_once", told.append)
    target, batch = tiny_target("llama"), batch_of(6, 4)
    drafter = tiny_drafter("dflash", target)
    own = LogitsProcessorList([lambda ids, scores: scores])
    options = {"assistant_model": drafter, "cache_implementation": "static", **GREEDY}
    written = target.generate(**batch, logits_processor=own, **options)
    assert torch.equal(written, target.generate(**batch, **GREEDY))
    assert not names
    (message,) = told
    assert "Rounds are not compiled" in message
    assert "may look at all items of a batch" in message


def test_calls_under_inference_mode_and_without_may_alternate():
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = oracle("dflash", target, batch)
    with torch.inference_mode():
        assert_same(target, batch, drafter)
    assert_same(target, batch, drafter)


def replayed(value, tensors):
    """A copy of what a step put out, whose tensors are noted."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.clone())
        return tensors[-1]
    if isinstance(value, tuple):
        return tuple(replayed(part, tensors) for part in value)
    if isinstance(value, Draft):
        return Draft(replayed(value.logits, tensors), replayed(value.chain, tensors))
    if isinstance(value, TokenTree):
        parts = {name: replayed(getattr(value, name), tensors) for name in ("tokens", "parents", "depths", "ancestors")}
        return replace(value, **parts)
    assert value is None
    return value


@pytest.mark.parametrize("kind", ["pard", "dflash"])
@pytest.mark.parametrize("processing", [{}, {"do_sample": True, "top_k": 9}, {"repetition_penalty": 1.2}])
def test_the_first_round_is_known_to_be_one_too(monkeypatch, several_steps, kind, processing):
    """Until it is told of rounds, torch takes each call of what it has compiled for one, and uses the memory of all before."""
    rounds, put_out = [], []

    def graphed(step, **options):
        def run(*arguments):
            if not rounds:
                spoil(put_out)
            return replayed(step(*arguments), put_out)

        return run

    monkeypatch.setattr(torch, "compile", graphed)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: rounds.append(spoil(put_out)))
    target, batch = tiny_target("llama"), batch_of(9, 3, 6)
    drafter = oracle(kind, target, batch, settings={"tree_budget": 8, "draft_schedule": "fixed"})
    assert_same(target, batch, drafter, **processing)


def spoil(tensors):
    """Write something else to what steps have put out."""
    for tensor in tensors:
        tensor.fill_(True if tensor.dtype == torch.bool else 10**9)
    tensors.clear()


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 8}])
def test_nothing_that_a_step_puts_out_is_read_in_the_next(monkeypatch, several_steps, settings):
    """As with CUDA graphs, which write to the same memory in every step."""
    put_out = []

    def graphed(step, **options):
        return lambda *arguments: replayed(step(*arguments), put_out)

    monkeypatch.setattr(torch, "compile", graphed)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: spoil(put_out))
    target, batch = tiny_target("llama"), batch_of(9, 3, 6)
    drafter = oracle("dflash", target, batch, settings=settings)
    end = int(texts_of(target, batch)[1][14])
    assert_same(target, batch, drafter, eos_token_id=end)
    assert_same(target, batch, drafter, do_sample=True, top_k=9)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": end}
    for processing in ({}, {"repetition_penalty": 1.2}):
        (eager, _), (static, _) = eager_and_static(target, batch, drafter, **options, **processing)
        torch.testing.assert_close(static.scores, eager.scores, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(static.logits, eager.logits, rtol=1e-4, atol=1e-4)
