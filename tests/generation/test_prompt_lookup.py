"""Trees that hold, beside what was drafted, how the text went on where its last tokens stood before."""

import itertools
import random

import pytest
import torch
from accelerate import cpu_offload
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from compiled_cases import assert_same_stats, leave_uncompiled
from drawn_plans import draw_plans
from hf_pardraft.generation import dispatch
from hf_pardraft.generation.decoder import SpeculativeDecoding
from hf_pardraft.generation.dispatch import schedule_for
from hf_pardraft.generation.prompt_lookup import LONGEST_MATCH, Match, NgramIndex, PromptLookup, with_matches
from hf_pardraft.generation.scheduling.confidence import Calibration, ClaimedTree
from hf_pardraft.generation.scheduling.knowledge import Knowledge
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.settings import read_settings
from hf_pardraft.generation.target_side.reader import TargetReader
from sampled_cases import assert_plain_text, double_target, knowing, seeded, unpadded, untrained
from tiny_models import batch_of, random_prompt, tiny_drafter, tiny_target

LOOKUP = {"tree_budget": 10, "prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 3}


def naive_match(text: list[int], size: int, num_tokens: int, drafted=(), shortest=1) -> Match | None:
    """The same by comparing the end of text and draft with every place in the text."""
    best, end = None, [*text, *drafted]
    for place in range(1, len(text)):
        length = 0
        while length < place and text[place - 1 - length] == end[-1 - length]:
            length += 1
        if min(length, size) >= shortest and (best is None or min(length, size) >= min(best[0], size)):
            best = length, place
    if best is None:
        return None
    longer = end
    for ahead in range(num_tokens):
        longer.append(longer[best[1] + ahead])
    return Match(min(best[0], LONGEST_MATCH), longer[len(text) + len(drafted) :])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab", [1, 2, 5, 40])
def test_matches_are_those_of_a_naive_loop(vocab, size):
    luck, index = random.Random(vocab), NgramIndex(size)
    assert index.match(3) is None
    text = []
    while len(text) < 90:
        new = [luck.randrange(vocab) for _ in range(luck.randint(0, 4))]
        if text and luck.random() < 0.3:
            start = luck.randrange(len(text))
            new = text[start : start + 9]
        text += new
        index.extend(new)
        assert index.match(6) == naive_match(text, size, 6)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab", [2, 5, 12])
def test_matches_after_drafted_tokens_are_those_of_a_naive_loop(vocab, size):
    luck, index, found = random.Random(vocab), NgramIndex(size), 0
    for _ in range(60):
        index.extend(luck.randrange(vocab) for _ in range(luck.randint(1, 4)))
        tokens, parents = [luck.randrange(vocab) for _ in range(8)], [luck.randint(0, node) for node in range(8)]
        paths = [(), *paths_of(tokens, ClaimedTree(parents, []))]
        expected = {
            slot: naive_match(index.text, size, 6 - len(path), path, 2 if path else 1)
            for slot, path in enumerate(paths)
            if len(path) < 6
        }
        expected = {slot: match for slot, match in expected.items() if match}
        assert index.matches(tokens, parents, 6) == expected
        found += len(expected)
    assert found > (40 if size == 1 else 80)


def test_texts_of_a_batch_are_looked_up_separately():
    lookup = PromptLookup(num_tokens=2, size=2)
    lookup.begin([[1, 2, 3, 1], [4, 5, 6], [2, 2]])
    assert lookup.finds_any()
    # The first item's draft is 2 and 3, alternatives; the text has 1 2 only.
    matches = lookup.matches([[2, 3], [7, 7], [2, 8]], [[0, 0]] * 3, 9)
    assert matches == [{0: (1, [2, 3]), 1: (2, [3])}, {}, {0: (1, [2, 2])}]
    lookup.select_items([1, 2])
    lookup.extend([[4, 5], [7]])
    assert lookup.matches([[]] * 2, [[]] * 2, 1) == [{0: (2, [6])}, {}]
    lookup.select_items([1])
    assert not lookup.finds_any()


def paths_of(tokens: list[int], draft: ClaimedTree) -> list[tuple[int, ...]]:
    """The tokens from the anchor to each node."""
    paths = [()]
    for token, parent in zip(tokens, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_branches_share_the_prefixes_that_were_drafted():
    #  1 - 2 - 5, and 3; the text suggests 1 2 6 7.
    drafted = ClaimedTree([0, 0, 1, 3], [-0.1, -0.2, -0.3, -0.4])
    tokens, draft = with_matches([1, 3, 2, 5], drafted, {0: Match(4, [1, 2, 6, 7])})
    paths = paths_of(tokens, draft)
    assert paths == [(1,), (3,), (1, 2), (1, 2, 5), (1, 2, 6), (1, 2, 6, 7)]
    assert draft.log_probabilities == [-0.1, -0.2, -0.3, -0.4, None, None]
    assert draft.matches == [4, 0, 5, 0, 6, 7]
    # After the 3, too, and after 1 2 the same as from the anchor, but known from further back.
    matches = {0: Match(4, [1, 2, 6, 7]), 2: Match(2, [8, 9]), 3: Match(9, [6])}
    tokens, draft = with_matches([1, 3, 2, 5], drafted, matches)
    paths = paths_of(tokens, draft)
    assert paths == [(1,), (3,), (1, 2), (3, 8), (1, 2, 5), (1, 2, 6), (3, 8, 9), (1, 2, 6, 7)]
    assert draft.matches == [4, 0, 5, 2, 0, 9, 3, 7]
    tokens, draft = with_matches([1, 3, 2, 5], drafted, {})
    assert (tokens, [*draft.parents], draft.matches) == ([1, 3, 2, 5], [0, 0, 1, 3], [0] * 4)


def test_sources_are_believed_as_far_as_they_were_right():
    calibration = Calibration()
    assert calibration.match_probability(1) < calibration.match_probability(4) < calibration.match_probability(16) < 1
    draft = ClaimedTree([0, 1, 0], [None, None, -0.01], matches=[2, 3, 0])
    assert calibration.probabilities(draft)[2] > calibration.probabilities(draft)[0]
    for _ in range(30):
        # The text's first token is right, its second isn't, and the drafter's is wrong.
        calibration.note([(draft, [0, 1], True)])
    of_text, of_second, of_drafter = calibration.probabilities(draft)
    assert of_text > 0.9
    assert max(of_second, of_drafter) < 0.1
    # What the drafter did not propose says nothing of it.
    assert sum(map(sum, calibration.accepted)) == 0
    assert sum(map(sum, calibration.tried)) == pytest.approx(30, rel=0.05)


def looking(kind, target, texts=None, **settings):
    """A drafter whose trees hold what the text suggests; untrained, or one that knows `texts`."""
    settings = {**LOOKUP, **settings}
    drafter = tiny_drafter(kind, target).double() if texts is None else knowing(kind, target, texts)
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.fixture
def trees(monkeypatch):
    """The trees that the target reads."""
    read, real = [], TargetReader.read

    def noted(self, pending, tree, *others, **more):
        read.append(tree)
        return real(self, pending, tree, *others, **more)

    monkeypatch.setattr(TargetReader, "read", noted)
    return read


def assert_are_trees(trees, budget: int) -> None:
    """Budget, order and siblings are as a tree has them."""
    assert trees
    for tree in trees:
        assert tree.num_nodes <= budget
        for tokens, parents, depths in zip(
            tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True
        ):
            edges = list(zip(parents, tokens, strict=True))
            assert len({*edges}) == len(edges)
            assert depths == sorted(depths)
            assert [0, *depths][1:] == [[0, *depths][parent] + 1 for parent in parents]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"top_k": 0}, {"temperature": 0.5, "top_p": 0.9}])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)])
@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_the_text_is_plain_generates(trees, kind, lengths, sampling):
    target, batch = double_target("qwen3"), batch_of(*lengths)
    batch["input_ids"][:, -4:-2] = batch["input_ids"][:, -2:]
    options = {"max_new_tokens": 40, **sampling}
    plain = seeded(target, batch, **options)
    texts = unpadded(plain[0], batch["attention_mask"])
    trees.clear()
    for drafter in (looking(kind, target), looking(kind, target, texts)):
        assert_plain_text(target, batch, drafter, plain, **options)
    drafted = [tree for tree in trees if tree is not None and not tree.is_chain]
    assert_are_trees(drafted, budget=10)
    # Deeper than what was drafted.
    assert max(int(tree.depths.max()) for tree in drafted) > 4


class Noted(LogitsProcessor):
    """Looks at the whole batch, which items therefore have to go through together."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append(tuple(input_ids.shape))
        return scores - 0.1 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[1])


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}])
@pytest.mark.parametrize("lengths", [(7,), (7, 5)])
def test_a_callers_processors_see_what_plain_generate_shows_them(lengths, sampling):
    target, batch = double_target("llama", eos_token_id=5), batch_of(*lengths)
    results, shapes = [], []
    for drafter in (None, looking("pard", target)):
        processor = Noted()
        options = {"assistant_model": drafter, "logits_processor": LogitsProcessorList([processor]), **sampling}
        results.append(seeded(target, batch, max_new_tokens=30, **options))
        shapes.append(processor.shapes)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert shapes[0] == shapes[1]


class Repeats(LogitsProcessor):
    """Lets a target write what it wrote, or read, so many tokens ago."""

    def __init__(self, period: int):
        self.period = period

    def __call__(self, input_ids, scores):
        return scores + 1000 * torch.nn.functional.one_hot(input_ids[:, -self.period], scores.shape[1])


def quoting(length: int) -> dict:
    """A prompt, and how to let a target write it again and again."""
    prompt = random_prompt(20)
    repeats = LogitsProcessorList([Repeats(20)])
    mask = torch.ones_like(prompt)
    return {"input_ids": prompt, "attention_mask": mask, "logits_processor": repeats, "max_new_tokens": length}


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}])
def test_a_text_that_repeats_itself_needs_few_rounds_of_an_untrained_drafter(sampling):
    target, taus = double_target("llama"), []
    call = {**quoting(64), **sampling}
    plain = target.generate(**call)
    for num_tokens in (None, 8):
        drafter = looking("pard", target, prompt_lookup_num_tokens=num_tokens)
        assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
        taus.append(drafter.last_stats.tau)
    assert taus[0] < 1.5
    # A round commits 9 tokens, once the first one has found its match.
    assert taus[1] > 6


@pytest.mark.parametrize("length", range(1, 20))
def test_no_branch_is_longer_than_what_is_left_of_the_text(trees, length):
    target, call = double_target("llama"), quoting(length)
    plain = target.generate(**call)
    trees.clear()
    drafter = looking("pard", target)
    assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
    assert all(int(tree.depths.max()) <= length - 1 for tree in trees if tree is not None)
    assert drafter.last_stats.tokens_per_round == [accepted + 1 for accepted in drafter.last_stats.accepted_per_round]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}])
def test_whatever_the_schedule_drafts_and_reads_the_text_is_plain_generates(monkeypatch, trees, sampling):
    target, batch = double_target("llama"), batch_of(8, 5)
    plain = seeded(target, batch, max_new_tokens=40, **sampling)
    drafter = looking("pard", target, draft_schedule="auto")
    draw_plans(monkeypatch)
    trees.clear()
    for _ in range(3):
        assert_plain_text(target, batch, drafter, plain, max_new_tokens=40, **sampling)
    assert_are_trees([tree for tree in trees if tree is not None and not tree.is_chain], budget=10)


def lookups_of(monkeypatch, target, drafter, **options) -> list[PromptLookup | None]:
    """What looked up in a call."""
    found, real = [], SpeculativeDecoding.run

    def run(self, input_ids):
        found.append(self.judge.lookup)
        return real(self, input_ids)

    monkeypatch.setattr(SpeculativeDecoding, "run", run)
    prompt = random_prompt(5)
    target.generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, max_new_tokens=8, **options
    )
    return found


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_chains_and_drafters_that_say_nothing_look_nothing_up(monkeypatch, options):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target = tiny_target("llama")
    for settings in ({"prompt_lookup_num_tokens": None}, {"tree_budget": 0}):
        drafter = looking("pard", target.double(), **settings)
        assert lookups_of(monkeypatch, target, drafter, **options) == [None]
    drafter = untrained("pard", target, budget=8).double()
    (lookup,) = lookups_of(monkeypatch, target, drafter, prompt_lookup_num_tokens=3, **options)
    assert (lookup.num_tokens, lookup.size) == (3, 4)


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, 10),
        ({"tree_budget": 8}, {}, 10),
        ({"prompt_lookup_num_tokens": 0}, {}, None),
        ({"prompt_lookup_num_tokens": 4}, {}, 4),
        ({}, {"prompt_lookup_num_tokens": 0}, None),
        # Equal work, or chains: nobody asked for a branch.
        ({}, {"draft_schedule": "fixed"}, None),
        ({}, {"tree_budget": 8}, None),
        ({"tree_budget": 0}, {}, None),
    ],
)
def test_the_schedule_may_look_up_the_text_where_it_may_choose_trees(monkeypatch, settings, options, expected):
    target = tiny_target("llama")
    drafter = tiny_drafter("pard", target)
    for name, value in {"draft_schedule": "auto", **settings}.items():
        setattr(drafter.generation_config, name, value)
    lookups = lookups_of(monkeypatch, target, drafter, generation_config=GenerationConfig(**options))
    assert [lookup and lookup.num_tokens for lookup in lookups] == [expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prompt_lookup_num_tokens", value) for value in (-1, 1.5, True, "3")),
        *(("max_matching_ngram_size", value) for value in (0, -1, 1.5, True, "3")),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(name, value):
    target = tiny_target("llama")
    drafter = looking("pard", target, **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        read_settings(drafter, target.generation_config)


@pytest.fixture
def schedules(monkeypatch):
    """The schedules of all calls."""
    found, real = [], SpeculativeDecoding.run

    def run(self, input_ids):
        found.append(self.schedule)
        return real(self, input_ids)

    monkeypatch.setattr(SpeculativeDecoding, "run", run)
    return found


def test_trees_with_a_branch_from_the_text_are_judged_by_themselves():
    target = tiny_target("llama")
    drafter = looking("pard", target.double(), draft_schedule="auto")

    def schedule(**settings):
        config = GenerationConfig(**settings)
        return schedule_for(target, drafter, read_settings(drafter, config), config, 1)

    first, again = schedule(), schedule(prompt_lookup_num_tokens=3)
    drafter.generation_config.prompt_lookup_num_tokens = 0
    without = schedule()
    assert first.plans == without.plans
    # What is known of other trees is no part of it.
    assert again.knowledge is first.knowledge is not without.knowledge


def test_what_the_text_suggested_is_counted_from_round_to_round(schedules):
    target, call = double_target("llama"), quoting(64)
    target.generate(assistant_model=looking("pard", target), **call)
    (schedule,) = schedules
    tried, accepted = sum(schedule.calibration.tried_matches), sum(schedule.calibration.accepted_matches)
    assert 30 < accepted <= tried


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"top_k": 0}])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_the_text_suggests_tokens_that_a_draft_vocabulary_lacks(kind, sampling):
    target, call = double_target("llama"), {**quoting(64), "do_sample": True, **sampling}
    torch.manual_seed(3)
    plain = target.generate(**call)
    drafter = looking(kind, target)
    drafter.set_draft_vocabulary(list(range(3, 15)))
    torch.manual_seed(3)
    assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
    assert drafter.last_stats.tau > 5


@pytest.fixture
def pausing(monkeypatch):
    """Schedules that never draft, and read as much of the text alone as `read` says."""

    def pause(read):
        monkeypatch.setattr(Schedule, "next_plan", lambda self, *_: NOTHING)
        monkeypatch.setattr(Schedule, "worth_reading_alone", lambda self, probabilities: read(probabilities))

    return pause


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 3}])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_where_nothing_is_drafted_the_text_suggests_by_itself(pausing, trees, num_tokens, sampling):
    target, call = double_target("llama"), {**quoting(64), **sampling}
    torch.manual_seed(5)
    plain = target.generate(**call)
    state = torch.get_rng_state()
    pausing(len)
    drafter = looking("pard", target, draft_schedule="auto", prompt_lookup_num_tokens=num_tokens)
    trees.clear()
    torch.manual_seed(5)
    assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tree is None or tree.is_chain for tree in trees)
    assert drafter.last_stats.tau > 0.7 * (num_tokens + 1)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}])
def test_what_the_text_suggests_by_itself_may_be_wrong(pausing, sampling):
    target, batch = double_target("qwen3"), batch_of(9)
    batch["input_ids"][:, -4:-2] = batch["input_ids"][:, -2:]
    plain = seeded(target, batch, max_new_tokens=40, **sampling)
    pausing(len)
    drafter = looking("dflash", target, draft_schedule="auto")
    assert_plain_text(target, batch, drafter, plain, max_new_tokens=40, **sampling)
    assert sum(drafter.last_stats.drafted_per_round) > sum(drafter.last_stats.accepted_per_round)


def test_what_is_not_read_of_the_text_is_judged_all_the_same(pausing, schedules):
    target, call = double_target("llama"), quoting(64)
    pausing(lambda probabilities: 0)
    drafter = looking("pard", target, draft_schedule="auto")
    plain = target.generate(**call)
    assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
    calibration = schedules[0].calibration
    assert drafter.last_stats.tau == 1
    assert sum(calibration.accepted_matches) > 0.9 * sum(calibration.tried_matches) > 40


def test_the_text_alone_is_read_where_that_pays():
    target = tiny_target("llama")
    drafter = looking("pard", target, draft_schedule="auto")
    config = GenerationConfig()
    schedule = schedule_for(target, drafter, read_settings(drafter, config), config, 1)
    sure, unsure = [0.9, 0.8, 0.7, 0.01], [0.05, 0.02, 0.01]
    # Nothing is known of costs.
    assert schedule.worth_reading_alone(sure) == 0
    schedule.reading.costs.note(1, 0.020)
    schedule.reading.costs.note(11, 0.030)
    schedule.best, schedule.worth.seconds, schedule.worth.tokens = NOTHING, {NOTHING: 0.021}, {NOTHING: 1.0}
    assert (schedule.worth_reading_alone(sure), schedule.worth_reading_alone(unsure)) == (3, 0)
    # A round without a draft that is to tell what one costs has none of the text's either.
    schedule.is_a_try = True
    assert schedule.worth_reading_alone(sure) == 0


@pytest.mark.parametrize(("tokens", "seconds", "count"), [(2.0, 0.030, 3), (5.0, 0.030, 0), (2.0, 0.012, 0)])
@pytest.mark.parametrize("budget", [0, 16])
def test_the_text_alone_is_read_where_it_beats_a_draft(budget, tokens, seconds, count):
    target = tiny_target("llama")
    drafter = looking("pard", target, draft_schedule="auto")
    config = GenerationConfig()
    schedule = schedule_for(target, drafter, read_settings(drafter, config), config, 1)
    schedule.reading.costs.note(1, 0.020)
    schedule.reading.costs.note(11, 0.030)
    schedule.best = Plan(4, budget)
    schedule.worth.tokens = {NOTHING: 1.0, Plan(4): 1.5, schedule.best: tokens}
    schedule.worth.seconds = {NOTHING: 0.021, schedule.best: seconds}
    assert schedule.worth_reading_alone([0.9, 0.8, 0.7, 0.01]) == count


def test_a_tree_holds_what_the_text_suggests_besides_the_draft():
    target = tiny_target("llama")
    drafter = looking("pard", target, draft_schedule="auto")
    config = GenerationConfig()
    schedule = schedule_for(target, drafter, read_settings(drafter, config), config, 1)
    schedule.reading.costs.note(1, 0.020)
    schedule.reading.costs.note(11, 0.030)
    chain, tree = Plan(4), Plan(4, 16)
    schedule.worth.tokens, schedule.worth.seconds = (
        {NOTHING: 1.0, chain: 3.0, tree: 2.0},
        {NOTHING: 0.021, chain: 0.036, tree: 0.026},
    )
    unsure = [0.5, 0.5, 0.5]
    # 2.5 tokens of the text alone in 25 ms are better than 2 of a tree in 26, but not than the 3.5 that it would have here.
    schedule.best = tree
    assert schedule.worth_reading_alone(unsure) == 0
    schedule.worth.tokens[chain] = 1.0
    assert schedule.worth_reading_alone(unsure) == 3


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("budget", [0, 16])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_rounds_of_the_text_alone_between_drafts(kind, budget, sampling, monkeypatch, trees):
    target, call = double_target("llama"), {**quoting(64), **sampling}
    torch.manual_seed(5)
    plain = target.generate(**call)
    rounds = itertools.count()

    def next_plan(self, batch, room, length):
        self.plan = Plan(4, budget).within(room)
        return self.plan

    monkeypatch.setattr(Schedule, "next_plan", next_plan)
    monkeypatch.setattr(Schedule, "worth_reading_alone", lambda self, found: len(found) if next(rounds) % 2 else 0)
    drafter = looking(kind, target, draft_schedule="auto")
    trees.clear()
    torch.manual_seed(5)
    assert torch.equal(target.generate(assistant_model=drafter, **call), plain)
    assert next(rounds) > 3
    assert any(tree is not None and tree.num_nodes > 4 and tree.is_chain for tree in trees)


def test_a_round_of_the_text_alone_says_nothing_of_the_plan(schedules, monkeypatch):
    target = double_target("llama")
    noted = []
    monkeypatch.setattr(Knowledge, "note", lambda self, budget, *outcomes: noted.append(budget))
    monkeypatch.setattr(Schedule, "worth_reading_alone", lambda self, found: len(found))
    drafter = looking("pard", target, draft_schedule="auto")
    target.generate(assistant_model=drafter, **quoting(64))
    assert drafter.last_stats.tau > 5
    # The first round, which reads the prompt, is the only one with a draft.
    assert len(noted) <= 1


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"top_k": 0}])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)])
@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_compiled_rounds_read_what_uncompiled_ones_do(monkeypatch, kind, lengths, sampling):
    leave_uncompiled(monkeypatch)
    target, batch = double_target("qwen3"), batch_of(*lengths)
    batch["input_ids"][:, -4:-2] = batch["input_ids"][:, -2:]
    options = {"max_new_tokens": 40, **sampling}
    plain = seeded(target, batch, **options)
    texts = unpadded(plain[0], batch["attention_mask"])
    for drafter in (looking(kind, target), looking(kind, target, texts)):
        drafter.generation_config.record_drafts = True
        assert_plain_text(target, batch, drafter, plain, **options)
        uncompiled = drafter.last_stats
        assert_plain_text(target, batch, drafter, plain, cache_implementation="static", **options)
        assert_same_stats(drafter.last_stats, uncompiled)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}])
def test_compiled_rounds_follow_the_text_deeper_than_they_draft(monkeypatch, sampling):
    leave_uncompiled(monkeypatch)
    target, call = double_target("llama"), {**quoting(64), **sampling}
    plain = target.generate(**call)
    drafter = looking("pard", target, prompt_lookup_num_tokens=8)
    assert torch.equal(target.generate(assistant_model=drafter, cache_implementation="static", **call), plain)
    assert drafter.last_stats.tau > 6


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}])
def test_whatever_compiled_rounds_draft_the_text_is_plain_generates(monkeypatch, sampling):
    leave_uncompiled(monkeypatch)
    target, batch = double_target("llama"), batch_of(8, 5)
    plain = seeded(target, batch, max_new_tokens=40, **sampling)
    texts = unpadded(plain[0], batch["attention_mask"])
    draw_plans(monkeypatch, is_compiled=True)
    for drafter in (looking("dflash", target), looking("dflash", target, texts)):
        drafter.generation_config.draft_schedule = "auto"
        assert_plain_text(target, batch, drafter, plain, max_new_tokens=40, cache_implementation="static", **sampling)


def test_a_branch_may_be_deeper_than_a_draft_where_no_chain_is_compared_with_the_tree(monkeypatch):
    """That is done on a CPU alone, and an offloaded target says that it is on none."""
    # By a clock to which all rounds take as long, trees pay.
    monkeypatch.setattr(dispatch, "clock_for", lambda *models: itertools.count().__next__)
    target, prompt, options = tiny_target("gemma3"), random_prompt(4), {"do_sample": False, "max_new_tokens": 40}
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.tree_budget, drafter.generation_config.draft_schedule = 8, "auto"
    plain = target.generate(prompt, **options)
    cpu_offload(target, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
        assert max(drafter.last_stats.tokens_per_round) > drafter.max_draft_depth + 1
