"""Acceptance and the cache, on trees, against brute force and the published walks."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_pardraft.generation.target_side.cache import TargetCache
from hf_pardraft.generation.tree.token_tree import TokenTree, chain_tree, draft_chain
from hf_pardraft.generation.tree.verify import NO_CHOICE, accept, plain_step
from tiny_models import published_tree, random_prompt, tiny_target


def random_tree(rng: random.Random, num_nodes: int, vocab: int) -> TokenTree:
    """Nodes level by level, siblings with different tokens."""
    parents = sorted(rng.randrange(slot) for slot in range(1, num_nodes + 1))
    parents = [min(parent, slot) for slot, parent in enumerate(parents)]
    depth = {0: 0}
    for node, parent in enumerate(parents):
        depth[node + 1] = depth[parent] + 1
    order = sorted(range(num_nodes), key=lambda node: depth[node + 1])
    new_slot = {0: 0} | {old + 1: new + 1 for new, old in enumerate(order)}
    parents = [new_slot[parents[old]] for old in order]
    depths = [depth[old + 1] for old in order]
    tokens, used = [], {}
    for parent in parents:
        taken = used.setdefault(parent, set())
        token = rng.choice([t for t in range(vocab) if t not in taken])
        taken.add(token)
        tokens.append(token)
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent:
            ancestors[node] |= ancestors[parent - 1]
    return TokenTree(*(torch.tensor([part]) for part in (tokens, parents, depths)), ancestors[None])


def walk(tree: TokenTree, choices: list[int]) -> tuple[list[int], list[int]]:
    """Brute force: from the root, go to the child that carries the choice, while there is one."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    slot, path, committed = 0, [0], [choices[0]]
    while True:
        children = [n + 1 for n in range(len(tokens)) if parents[n] == slot and tokens[n] == choices[slot]]
        if not children:
            return path, committed
        slot = children[0]
        path.append(slot)
        committed.append(choices[slot])


WALKS = json.loads((Path(__file__).parent.parent / "fixtures/trees/greedy_walk.json").read_text())["cases"]


@pytest.mark.parametrize("case", WALKS, ids=lambda case: case["name"])
def test_acceptance_equals_the_published_greedy_walk(case):
    tree, nodes = published_tree(case["parents"], case["tokens"])
    choices = torch.tensor([[case["target_argmax"][node] for node in nodes]])
    acceptance = accept(tree, choices)
    count = int(acceptance.num_accepted[0])
    assert [nodes[slot] for slot in acceptance.path[0, 1 : count + 1].tolist()] == case["accepted_nodes"]
    assert acceptance.tokens[0, : count + 1].tolist() == case["emitted"]


@pytest.mark.parametrize("seed", range(60))
def test_acceptance_equals_a_walk_down_the_tree(seed):
    rng = random.Random(seed)
    tree = random_tree(rng, num_nodes=rng.randint(1, 16), vocab=16)
    choices = [rng.choice([*tree.tokens[0].tolist(), NO_CHOICE]) for _ in range(tree.num_nodes + 1)]
    path, committed = walk(tree, choices)
    acceptance = accept(tree, torch.tensor([choices]))
    count = int(acceptance.num_accepted[0])
    assert acceptance.path[0, : count + 1].tolist() == path
    assert acceptance.tokens[0, : count + 1].tolist() == committed


@pytest.mark.parametrize("num_right", range(6))
def test_a_chain_is_accepted_up_to_the_first_error(num_right):
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    choices = torch.tensor([[3, 4, 5, 6, 7, 8]])
    if num_right < 5:
        choices[0, num_right] = 9
    acceptance = accept(chain_tree(tokens), choices)
    assert acceptance.num_accepted.tolist() == [num_right]
    assert acceptance.tokens[0, : num_right + 1].tolist() == choices[0, : num_right + 1].tolist()
    # Nothing is different for a tree that happens to be a chain.
    as_tree = accept(replace(chain_tree(tokens), is_chain=False), choices)
    assert acceptance.num_accepted.tolist() == as_tree.num_accepted.tolist()
    assert acceptance.path is None
    assert as_tree.path[0, : num_right + 1].tolist() == list(range(num_right + 1))


def test_rows_of_a_batch_accept_different_lengths():
    tokens = torch.tensor([[3, 4], [3, 4], [3, 4]])
    choices = torch.tensor([[9, 4, 5], [3, 9, 5], [3, 4, 5]])
    assert accept(chain_tree(tokens), choices).num_accepted.tolist() == [0, 1, 2]


def test_a_chain_drafts_the_argmax_of_each_position():
    logits = torch.randn(2, 4, 10)
    tree = draft_chain(logits)
    assert torch.equal(tree.tokens, logits.argmax(-1))
    assert tree.depths.tolist() == [[1, 2, 3, 4]] * 2
    assert tree.parents.tolist() == [[0, 1, 2, 3]] * 2


def test_a_step_without_a_draft_commits_one_token():
    acceptance = plain_step(torch.tensor([[7]]))
    assert (acceptance.num_accepted.tolist(), acceptance.tokens.tolist()) == ([0], [[7]])


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[], [0], [0, 1, 2], [1], [0, 3], [2, 4]])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_cache_keeps_exactly_the_entries_of_a_path(architecture, nodes):
    target, ids = tiny_target(architecture), random_prompt(150)
    cache = TargetCache(target.config)
    target(ids, past_key_values=cache, use_cache=True)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.keep(145, [nodes])
    rows = [*range(145), *(145 + node for node in nodes)]
    assert cache.get_seq_length() == len(rows)
    held = [layer.num_columns for layer in cache.layers]
    assert [len(rows) - count for count in held] == cache.dropped(0)
    # A layer with a window keeps what the next token can see.
    window = target.config.sliding_window if architecture == "gemma3" else None
    assert held == [len(rows) if layer.dropped is None else window - 1 for layer in cache.layers]
    assert (min(held) < len(rows)) == (architecture == "gemma3")
    for layer, count, (keys, values) in zip(cache.layers, held, before, strict=True):
        assert torch.equal(layer.keys, keys[:, :, rows[-count:]])
        assert torch.equal(layer.values, values[:, :, rows[-count:]])
    # It goes on growing behind them, across a doubling of its buffer.
    target(random_prompt(200, seed=1), past_key_values=cache, use_cache=True)
    for layer, count, (keys, _) in zip(cache.layers, held, before, strict=True):
        assert torch.equal(layer.keys[:, :, :count], keys[:, :, rows[-count:]])
