"""The cost model against a loop that plays each round, and against cases whose best draft is known."""

import random
from dataclasses import replace

import pytest

from hf_pardraft.evaluation.tuning.cost_model import (
    Draft,
    Measurements,
    RoundCosts,
    TextAcceptance,
    at_batch,
    best,
    call_seconds,
    interpolate,
    plain_call_seconds,
    predict,
    predict_plain,
    round_seconds,
)

DEPTHS = (1, 2, 4, 8)


def costs(per_slot=0.0, verify=5.0, draft=1.0, draft_per_token=0.0, tree=0.5, fixed=0.25, step=None):
    """A machine where reading another token of each text costs `per_slot` more."""

    def read(slots):
        return verify + per_slot * slots

    return RoundCosts(
        draft={depth: draft + draft_per_token * depth for depth in DEPTHS},
        tree={0: dict.fromkeys(DEPTHS, 0.0), 16: {8: tree}, 32: {8: 2 * tree}},
        verify_chain={1 + depth: read(1 + depth) for depth in DEPTHS},
        verify_tree={17: read(17), 33: read(33)},
        fixed=fixed,
        prompt=3.0,
        plain_step=read(1) if step is None else step,
        plain_prompt=2.5,
    )


def text(num_tokens, rate, depth=8):
    """A text whose drafts are right at each place with the same rate, if all before them are; its rounds are no whole number."""
    shares = [rate**place for place in range(1, depth + 1)]
    num_rounds = num_tokens / (1 + sum(shares))
    return TextAcceptance(num_tokens, num_rounds, tuple(num_rounds * share for share in shares))


def test_a_curve_is_linear_between_its_points_and_goes_on_after_them():
    curve = {2: 1.0, 4: 3.0, 8: 4.0}
    assert [interpolate(curve, place) for place in (2, 3, 4, 6, 8, 16)] == [1.0, 2.0, 3.0, 3.5, 4.0, 6.0]
    assert interpolate(curve, 1) == 0.0 == interpolate(curve, 0)
    assert interpolate({5: 2.0}, 9) == 2.0
    with pytest.raises(ValueError, match="nothing was measured"):
        interpolate({}, 3)


def test_batch_sizes_beyond_those_measured_cost_what_the_nearest_does():
    assert [at_batch({2: 1.0, 4: 2.0}, batch) for batch in (1, 2, 3, 4, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0]


def test_a_round_is_the_sum_of_its_parts():
    known = costs(per_slot=0.1, draft_per_token=0.2)
    assert round_seconds(known, Draft(4)) == pytest.approx(1.8 + 0.0 + 5.5 + 0.25)
    assert round_seconds(known, Draft(3)) == pytest.approx(1.6 + 0.0 + 5.4 + 0.25)
    assert round_seconds(known, Draft(8, 16)) == pytest.approx(2.6 + 0.5 + 6.7 + 0.25)
    assert round_seconds(known, Draft(8, 24)) == pytest.approx(2.6 + 0.75 + 7.5 + 0.25)


def test_fewer_drafts_mean_more_rounds():
    found = TextAcceptance(num_tokens=30, num_rounds=10, reached=(9, 6, 5))
    assert [found.tau(depth) for depth in (0, 1, 2, 3)] == pytest.approx([1.0, 1.9, 2.5, 3.0])
    assert found.rounds(3) == 10
    assert found.rounds(1) == pytest.approx(30 / 1.9)
    assert found.rounds(0) == pytest.approx(30)


@pytest.mark.parametrize("items_leave", [True, False])
def test_a_call_lasts_as_long_as_a_loop_over_its_rounds(items_leave):
    draw = random.Random(0)
    for _ in range(50):
        known = {size: costs(draw.random(), 1 + size * draw.random(), step=1.0) for size in (1, 2, 4, 8)}
        rounds = [draw.randint(1, 12) for _ in range(draw.randint(1, 8))]
        draft = draw.choice([Draft(3), Draft(8), Draft(8, 16)])
        by_batch = {size: round_seconds(each, draft) for size, each in known.items()}
        seconds = at_batch({size: each.prompt for size, each in known.items()}, len(rounds))
        for number in range(2, max(rounds) + 1):
            live = sum(number <= needed for needed in rounds) if items_leave else len(rounds)
            seconds += at_batch(by_batch, live)
        measured = Measurements(known, [], items_leave=items_leave)
        assert call_seconds(measured, draft, rounds) == pytest.approx(seconds)


def test_plain_generate_lasts_as_long_as_its_longest_text():
    known = {1: costs(step=2.0), 4: costs(step=8.0)}
    assert plain_call_seconds(known, [10]) == pytest.approx(2.5 + 9 * 2.0)
    assert plain_call_seconds(known, [3, 10, 1]) == pytest.approx(2.5 + 9 * 6.0)


def test_the_slowest_text_makes_a_batch_slow():
    known = {size: costs() for size in (1, 2)}
    even = Measurements(known, [text(60, 0.7), text(60, 0.7)])
    uneven = Measurements(known, [text(60, 0.99), text(60, 0.05)])
    taus = [sum(each.tau(8) for each in case.chains) for case in (even, uneven)]
    assert taus[1] > taus[0]
    assert predict(uneven, Draft(8), 2) < predict(even, Draft(8), 2)
    alone = Measurements(known, [text(60, 0.05)])
    slowest = 60 / predict(alone, Draft(8), 1)
    assert 120 / predict(uneven, Draft(8), 2) == pytest.approx(slowest)


def test_prompts_are_taken_in_batches():
    known = {size: costs(step=1.0) for size in (1, 2)}
    measured = Measurements(known, [text(10, 0.5), text(20, 0.6), text(30, 0.7)])
    pairs = [measured.chains[:2], measured.chains[2:]]
    seconds = sum(call_seconds(measured, Draft(2), [each.rounds(2) for each in pair]) for pair in pairs)
    assert predict(measured, Draft(2), 2) == pytest.approx(60 / seconds)
    assert predict_plain(measured, 2) == pytest.approx(60 / ((2.5 + 19) + (2.5 + 29)))


def chains_of(measured, batch):
    return best(measured, [Draft(depth) for depth in range(1, 9)], batch)


def test_free_tokens_are_drafted_as_deep_as_possible():
    assert chains_of(Measurements({1: costs()}, [text(200, 0.8)]), 1) == Draft(8)


def test_where_each_token_costs_a_short_draft_wins_and_the_best_is_the_best_by_force():
    for per_slot in (0.05, 0.3, 0.6, 1.5, 5.0):
        for rate in (0.3, 0.6, 0.9):
            known = costs(per_slot)
            measured = Measurements({1: known}, [text(200, rate)])

            def speed(depth, known=known, rate=rate):
                # Tokens of a round by its time; the one round of the prompt is all that is left out.
                taus = sum(rate**place for place in range(depth + 1))
                return taus / round_seconds(known, Draft(depth))

            expected = max(range(1, 9), key=speed)
            found = chains_of(measured, 1).depth
            assert speed(found) >= 0.999 * speed(expected)
    assert chains_of(Measurements({1: costs(per_slot=5.0)}, [text(200, 0.3)]), 1) == Draft(1)


def test_a_deeper_draft_that_nothing_comes_of_is_not_worth_it():
    found = TextAcceptance(100, 25, (25, 25, 25, 0, 0, 0, 0, 0))
    assert chains_of(Measurements({1: costs()}, [found]), 1) == Draft(3)


def test_large_batches_draft_less_where_tokens_cost_there():
    cheap, dear = costs(per_slot=0.01), costs(per_slot=4.0, verify=20.0)
    measured = Measurements({1: cheap, 64: dear}, [text(200, 0.75) for _ in range(64)])
    candidates = [Draft(depth) for depth in range(1, 9)]
    assert best(measured, candidates, 1).depth > best(measured, candidates, 64).depth
    assert predict(measured, best(measured, candidates, 1), 1) > predict_plain(measured, 1)


def test_plain_is_predicted_to_be_faster_where_it_is():
    measured = Measurements({1: costs(per_slot=4.0, draft=6.0, step=4.0)}, [text(200, 0.2)])
    assert predict(measured, chains_of(measured, 1), 1) < predict_plain(measured, 1)


def test_a_tree_wins_where_it_accepts_more_than_it_costs():
    chain = [text(200, 0.5)]
    rounds = round(chain[0].num_rounds * 0.7)
    trees = {Draft(8, 16): [TextAcceptance(200, rounds)], Draft(8, 32): [TextAcceptance(200, rounds)]}
    candidates = [*(Draft(depth) for depth in range(1, 9)), *trees]
    free = Measurements({1: costs()}, chain, trees)
    # Both trees accept the same, and the larger one takes longer to build.
    assert best(free, candidates, 1) == Draft(8, 16)
    dear = replace(free, costs={1: costs(per_slot=1.0)})
    assert not best(dear, candidates, 1).tree_budget


def test_of_equals_the_one_that_drafts_less():
    same = replace(costs(), tree={0: dict.fromkeys(DEPTHS, 0.0), 16: {8: 0.5}, 32: {8: 0.5}})
    trees = {Draft(8, budget): [TextAcceptance(100, 20)] for budget in (16, 32)}
    measured = Measurements({1: same}, [text(100, 0.1)], trees)
    assert best(measured, [Draft(8, 32), Draft(8, 16)], 1) == Draft(8, 16)
    with pytest.raises(ValueError, match="no draft to choose from"):
        best(measured, [], 1)
