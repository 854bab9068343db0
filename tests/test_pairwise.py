"""What is tried of several things together."""

from itertools import combinations

from pairwise import every_two_meet


def test_every_two_values_of_different_axes_meet_in_few_cases():
    axes = (range(4), "ab", [None, 1, 2])
    cases = every_two_meet(*axes)
    assert len(cases) == 12
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in cases} == {(a, b) for a in axes[one] for b in axes[other]}
