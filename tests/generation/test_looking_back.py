"""What a text would have suggested where plain `generate` wrote it: found out afterwards, so that calls come back from it."""

import random

import pytest

from hf_pardraft.generation.draft_judge import DraftJudge
from hf_pardraft.generation.prompt_lookup import PromptLookup
from hf_pardraft.generation.scheduling.acceptance import TextGain
from hf_pardraft.generation.scheduling.confidence import Calibration
from hf_pardraft.generation.scheduling.costs import Costs
from hf_pardraft.generation.scheduling.knowledge import Knowledge, RoundOutcome
from hf_pardraft.generation.scheduling.plans import NOTHING, Plan
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.scheduling.worth import LEAST_TEXT_GAIN, PlanWorth
from sampled_cases import double_target
from simulated_rounds import World
from tiny_models import batch_of, tiny_drafter


class NotingSchedule:
    """Reads as many tokens as `reads` says for a match, and notes what that brings."""

    def __init__(self, reads: int) -> None:
        self.reads, self.calibration, self.rounds = reads, Calibration(), []

    def worth_reading_without_drafts(self, probabilities):
        return min(self.reads, len(probabilities))

    def note_text(self, num_read, num_tokens):
        self.rounds.append((num_read, num_tokens))


def rounds_of(text: list[int], since: int, depth: int, reads: int) -> list[tuple[int, int]]:
    """The same, with each round's match found by another index that knows only what was written by then."""
    rounds, at = [], since
    while at < len(text):
        lookup = PromptLookup(depth)
        lookup.begin([text[:at]])
        match = lookup.match(len(text) - at)
        tokens = match.tokens[:reads] if match else []
        right = 0
        while right < len(tokens) and tokens[right] == text[at + right]:
            right += 1
        new = min(right + 1, len(text) - at)
        rounds.append((len(tokens), new))
        at += new
    return rounds


@pytest.mark.parametrize("reads", [0, 2, 7])
@pytest.mark.parametrize("vocab", [2, 5, 60])
def test_the_rounds_are_those_that_would_have_read_what_the_text_suggested(vocab, reads):
    luck = random.Random(vocab)
    text = [luck.randrange(vocab) for _ in range(30)]
    for _ in range(6):
        start = luck.randrange(len(text))
        text += [*text[start : start + 12], luck.randrange(vocab)]
    lookup, schedule = PromptLookup(7), NotingSchedule(reads)
    lookup.begin([text[:20]])
    DraftJudge(schedule, lookup).look_back(text[20:])
    assert schedule.rounds == rounds_of(text, 20, 7, reads)
    assert sum(count for _, count in schedule.rounds) == len(text) - 20
    # What became of matches is known afterwards, of their first tokens at least.
    assert sum(schedule.calibration.tried_matches) > 0


def test_a_gain_is_tokens_over_rounds_and_nothing_where_little_is_known():
    gain = TextGain()
    assert gain.factor == 1.0
    gain.note(4, 2.0)
    assert 1.0 < gain.factor < 1.2
    for _ in range(100):
        gain.note(4, 2.0)
    assert gain.factor == pytest.approx(2.0, rel=0.1)
    for _ in range(4 * int(TextGain.MEMORY)):
        gain.note(1, 1.0)
    assert gain.factor == pytest.approx(1.0, abs=0.03)


def known_costs(undrafted: float = 2e-3) -> Costs:
    costs = Costs()
    for _ in range(Costs.ENOUGH + 8):
        costs.note(NOTHING, undrafted)
        costs.note(Plan(4), 1.5 * undrafted)
    for slots, seconds in ((1, 0.8 * undrafted), (8, undrafted)):
        for _ in range(9):
            costs.reading.note(slots, seconds)
    return costs


@pytest.mark.parametrize(("lead", "gain", "is_plain"), [(1.0, 1.3, False), (1.2, 1.2, True), (1.2, 1.5, False)])
def test_a_call_is_not_left_to_plain_generate_where_the_text_gains_more_than_it(lead, gain, is_plain):
    knowledge, costs = Knowledge(), known_costs()
    costs.note_plain(2e-3 / lead, 100)
    for _ in range(50):
        knowledge.note(0, RoundOutcome([(0, 1)]))
    worth = PlanWorth(knowledge, [NOTHING, Plan(4)], reads_again=False)
    worth.work_out(costs, batch=1)
    assert worth.is_surely_plain(costs)
    knowledge.text_gain.note(500 * gain, 500)
    assert worth.is_surely_plain(costs) == is_plain
    # Of a batch nobody reads what the texts suggest without a draft.
    worth.work_out(costs, batch=4)
    assert worth.is_surely_plain(costs)


def test_rounds_of_a_batch_say_nothing_of_what_one_text_gains():
    world = World([0.0] * 7)
    world.knowledge.text_gain.note(100, 50)
    world.call(batch=4)
    assert (world.knowledge.text_gain.tokens, world.knowledge.text_gain.rounds) == (100, 50)


def test_rounds_without_a_draft_tell_what_the_text_gains_and_calls_are_left_again_where_it_gains_nothing():
    world = World([0.0] * 7)
    world.speed(30)
    assert sum(len(world.call()[1]) for _ in range(10)) < 100
    world.knowledge.text_gain.note(500, 250)
    assert world.knowledge.text_gain.factor > 1.5
    rounds = [len(world.call()[1]) for _ in range(20)]
    assert rounds[0] > 100
    assert world.knowledge.text_gain.factor == pytest.approx(LEAST_TEXT_GAIN, abs=0.05)
    assert sum(rounds[10:]) < 250


def looked_back_at(monkeypatch, target, **settings) -> list[tuple[list[int], list[int]]]:
    """What was looked back at, and before it, in calls that are left to plain `generate`, the first after some rounds."""
    looked, real, real_whole = [], DraftJudge.look_back, Schedule.leaves_to_plain

    def look_back(self, written):
        looked.append(([*self.lookup.indices[0].text], [*written]))
        real(self, written)

    def leaves_to_plain(self, batch, length):
        real_whole(self, batch, length)
        return self.knowledge.num_left > 0

    monkeypatch.setattr(DraftJudge, "look_back", look_back)
    monkeypatch.setattr(Schedule, "leaves_to_plain", leaves_to_plain)
    monkeypatch.setattr(Schedule, "leaves_rest_to_plain", lambda self: self.num_rounds > 8)
    drafter = tiny_drafter("pard", target)
    for name, value in {"draft_schedule": "auto", "tree_budget": 8, **settings}.items():
        setattr(drafter.generation_config, name, value)
    batch = batch_of(9)
    for _ in range(1 + Schedule.LOOKS_BACK):
        target.generate(**batch, max_new_tokens=60, do_sample=False, assistant_model=drafter)
    return looked


def test_what_plain_generate_wrote_is_looked_at_with_all_that_was_before_it(monkeypatch):
    target = double_target(eos_token_id=None)
    batch = batch_of(9)
    plain = target.generate(**batch, max_new_tokens=60, do_sample=False)[0].tolist()
    looked = looked_back_at(monkeypatch, target, prompt_lookup_num_tokens=5)
    assert [[*before, *written] for before, written in looked] == [plain] * len(looked)
    rest, *whole = (len(written) for _, written in looked)
    assert 10 < rest < 52
    assert whole == [60] * Schedule.LOOKS_BACK


def test_nothing_is_looked_at_where_nothing_is_looked_up(monkeypatch):
    assert not looked_back_at(monkeypatch, double_target(), prompt_lookup_num_tokens=0)


def test_the_first_calls_of_one_text_are_looked_back_at_and_then_one_of_some_once_it_is_known_what_reading_costs():
    schedule = Schedule(Knowledge(), [NOTHING, Plan(4)], Plan(4), lambda: 0.0)
    schedule.note_plain(60)
    assert not schedule.looks_back
    schedule.costs, asked = known_costs(), []
    schedule.worth.work_out(schedule.costs, 1)
    for _ in range(1, Schedule.FIRST_LOOKS_BACK):
        schedule.note_plain(60)
        assert schedule.looks_back
    for _ in range(9):
        schedule.note_plain(60)
        asked.append(schedule.looks_back)
    assert sum(asked) == pytest.approx(9 / Schedule.LOOKS_BACK, abs=1)
    schedule.batch = 2
    for _ in range(9):
        schedule.note_plain(60)
        assert not schedule.looks_back
