"""What a drafter's own probabilities say of a draft, and how much of it is worth reading."""

import math
import random

import pytest
import torch

from hf_pardraft.generation.draft_judge import of_chain
from hf_pardraft.generation.scheduling.confidence import Calibration, ClaimedTree, best_nodes
from hf_pardraft.generation.scheduling.reading import best_count, values_of_reading
from hf_pardraft.generation.tree.token_tree import build_tree, draft_chain, node_log_probabilities, nodes_of_tree


def chain_of(claims: list[float]) -> ClaimedTree:
    return ClaimedTree(range(len(claims)), [math.log(claim) for claim in claims])


def calibrated(honesty, rounds: int = 3000) -> Calibration:
    """A calibration that has seen chains of three whose tokens are accepted with probability `honesty(claim)`."""
    luck, calibration = random.Random(0), Calibration()
    for _ in range(rounds):
        claims = [luck.uniform(0.02, 0.98) for _ in range(3)]
        length = next((at for at, claim in enumerate(claims) if luck.random() > honesty(claim)), 3)
        calibration.note([(chain_of(claims), list(range(length + 1)), True)])
    return calibration


@pytest.mark.parametrize("honesty", [lambda claim: claim, lambda claim: claim**3, lambda claim: 0.3])
@pytest.mark.parametrize("is_later", [False, True])
def test_claims_come_to_mean_what_became_of_such_drafts(honesty, is_later):
    calibration = calibrated(honesty)
    for claim in (0.2, 0.5, 0.8):
        # A bin is up to a unit of log-odds wide, and remembers some hundred rounds.
        assert calibration.probability(is_later, math.log(claim)) == pytest.approx(honesty(claim), abs=0.2)


def test_before_anything_happened_a_claim_is_believed():
    calibration = Calibration()
    assert calibration.probability(False, math.log(0.3)) == pytest.approx(0.3)
    assert calibration.probability(True, -math.inf) == 0
    assert calibration.probability(True, math.nan) == 0
    assert calibration.probability(True, 0.0) == 1


def test_what_comes_after_a_refused_token_says_nothing():
    calibration, draft = Calibration(), chain_of([0.5, 0.5, 0.5])
    calibration.note([(draft, [0, 1], True)])
    assert sum(map(sum, calibration.tried)) == 2
    assert sum(map(sum, calibration.accepted)) == 1
    # The text ended after the first token.
    calibration.note([(draft, [0, 1], False)])
    assert sum(map(sum, calibration.tried)) == pytest.approx(3, abs=0.01)


def random_tree(luck: random.Random, nodes: int) -> ClaimedTree:
    return ClaimedTree([luck.randint(0, node) for node in range(nodes)], [-luck.expovariate(1.0) for _ in range(nodes)])


@pytest.mark.parametrize("seed", range(20))
def test_the_nodes_to_be_read_are_the_best_of_all_sets(seed):
    luck = random.Random(seed)
    draft, rate = random_tree(luck, 6), luck.uniform(0.1, 2)
    per_slot = luck.uniform(0.05, 0.5)

    def value(nodes) -> float:
        return sum(probabilities[node] for node in nodes) - rate * per_slot * (len(nodes) + 1)

    probabilities = Calibration().probabilities(draft)
    count = best_count(values_of_reading([probabilities], lambda slots: per_slot * slots, rate))
    kept, parents = best_nodes(draft, probabilities, count)
    sets = [[node for node in range(6) if number >> node & 1] for number in range(64)]
    whole = [nodes for nodes in sets if all(draft.parents[node] - 1 in [-1, *nodes] for node in nodes)]
    assert value(kept) == pytest.approx(max(map(value, whole)))
    slots = dict(enumerate(kept, start=1))
    assert [slots.get(slot, -1) + 1 for slot in parents] == [draft.parents[node] for node in kept]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_some_nodes_of_a_tree_are_a_tree(count):
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 30)
    whole = build_tree(logits, budget=12)
    claims = node_log_probabilities(whole, logits)
    own = logits.log_softmax(-1)
    for item in range(3):
        for node, (token, depth) in enumerate(zip(whole.tokens[item], whole.depths[item], strict=True)):
            assert claims[item, node] == pytest.approx(own[item, depth - 1, token].item(), abs=1e-5)
    drafts = [ClaimedTree(*both) for both in zip(whole.parents.tolist(), claims.tolist(), strict=True)]
    chosen = [best_nodes(draft, Calibration().probabilities(draft), count) for draft in drafts]
    smaller = nodes_of_tree(whole, *zip(*chosen, strict=True))
    expected = build_tree(logits, budget=count)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(smaller, name), getattr(expected, name))


def test_some_nodes_of_a_chain_are_a_chain():
    chain = draft_chain(torch.randn(2, 5, 30))
    shorter = nodes_of_tree(chain, [[0, 1]] * 2, [[0, 1]] * 2)
    assert shorter.is_chain
    assert torch.equal(shorter.tokens, chain.tokens[:, :2])


def test_what_would_have_become_of_a_chain():
    assert of_chain([1, 2, 3], [1, 9, 9, 9]) == (1, 2)
    assert of_chain([1, 2, 3], [1, 2, 3, 9]) == (3, 3)
    # A tree left the chain's path, or the text ended: what comes later is not known.
    assert of_chain([1, 2, 3], [1, 2]) == (2, 2)
    assert of_chain([1, 2, 3], [9]) == (0, 1)
