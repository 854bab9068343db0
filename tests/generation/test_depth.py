"""The adaptive schedule: a useless drafter costs little, a good one is used in full."""

import torch

from hf_pardraft.generation.schedule import DepthSchedule
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

NEW_TOKENS = 160


def decoded(drafter, target, prompt):
    """The text, and how many forwards the drafter did."""
    forwards = []
    real_draft = drafter.draft

    def counting_draft(context, state, depth):
        forwards.append(depth)
        return real_draft(context, state, depth)

    drafter.draft = counting_draft
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    return target.generate(prompt, assistant_model=drafter, **options), forwards


def run(rates, adaptive=True, kind="pard"):
    target, prompt = tiny_target("llama"), random_prompt(5)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    expected = target.generate(prompt, **options)
    drafter = make_oracle(tiny_drafter(kind, target, depth=8), expected[0], rates)
    drafter.generation_config.adaptive_depth = adaptive
    text, forwards = decoded(drafter, target, prompt)
    assert torch.equal(text, expected)
    return drafter.last_stats, forwards


def test_a_drafter_that_is_always_wrong_is_hardly_asked():
    for kind in ("pard", "dflash", "dart"):
        stats, forwards = run([0.0] * 8, kind=kind)
        assert stats.rounds == NEW_TOKENS
        assert len(forwards) <= 0.06 * NEW_TOKENS
        # What it costs the target: a few rows more, in a few rounds.
        assert sum(forwards) <= 0.15 * NEW_TOKENS


def test_without_the_mode_it_is_asked_every_round():
    assert len(run([0.0] * 8, adaptive=False)[1]) >= NEW_TOKENS - 1


def test_a_drafter_that_is_always_right_drafts_as_deep_as_ever():
    stats, forwards = run([1.0] * 8)
    assert stats.tau > 8
    assert set(forwards[:-2]) == {8}


def test_a_drafter_that_is_right_once_drafts_about_that_deep():
    stats, forwards = run([1.0, 1.0] + [0.0] * 6)
    assert stats.tau > 2.9
    assert sum(forwards[6:]) / len(forwards[6:]) < 5


def test_a_drafter_that_comes_to_its_senses_is_found_out():
    schedule = DepthSchedule(8, adaptive=True)
    for _ in range(300):
        if schedule.next_depth():
            schedule.note(0)
    depths = [0]
    while depths[-1] < 8:
        depths.append(schedule.next_depth())
        if depths[-1]:
            schedule.note(depths[-1])
        assert len(depths) <= DepthSchedule.LONGEST_PAUSE + 10


def test_one_round_moves_the_depth_half_way_to_where_it_points():
    schedule = DepthSchedule(deepest=16, adaptive=True)
    depths = []
    for accepted in (0, 2, 2, 9, 16):
        schedule.note(accepted)
        depths.append(schedule.next_depth())
    # From 16 half way to 0, then to 4 twice (two more than was accepted), to 11, and to the deepest.
    assert depths == [8, 6, 5, 8, 12]


def test_pauses_double_from_the_second_failure_on_up_to_the_longest():
    schedule, pauses = DepthSchedule(deepest=8, adaptive=True), []
    for _ in range(9):
        schedule.note(0)
        depths = [schedule.next_depth() for _ in range(DepthSchedule.LONGEST_PAUSE + 1)]
        pauses.append(depths.count(0))
        assert depths == sorted(depths)
    assert pauses == [0, 2, 4, 8, 16, 32, 64, 64, 64]
    # However often it fails, it is asked for something when it is asked.
    assert schedule.next_depth() == 1
