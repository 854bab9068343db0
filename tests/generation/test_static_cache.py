"""Static KV caches of a fixed capacity: what a query sees of them, how caches move into them."""

import pytest
import torch
from torch import nn
from torch._dynamo import decorators

from hf_pardraft.generation.compiled.static_cache import (
    SMALLEST,
    capacity_for,
    new_static_cache,
    static,
    to_static_cache,
    to_static_inputs,
    with_room,
)
from hf_pardraft.generation.target_side.cache import TargetCache
from hf_pardraft.generation.tree.token_tree import build_tree
from hf_pardraft.models.cache import GrowingCache, StaticColumns
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.models.masks import additive_masks
from tiny_models import tiny_target

CAPACITY = 16
LENGTHS = [0, 3, 9]


def tree_slots(seed=0, budget=5):
    """Which slots a slot of a random tree sees, `(3, slots, slots)`, and how deep it is, `(3, slots)`."""
    generator = torch.Generator().manual_seed(seed)
    tree = build_tree(torch.randn(3, 3, 8, generator=generator), budget)
    within = nn.functional.pad(tree.ancestors, (1, 0, 1, 0))
    within[:, :, 0] = True
    return within, tree.slot_depths


def seen_by_loops(within, indices, lengths, is_visible):
    """A mask over a buffer, entry by entry; `is_visible(query, key)` compares places in a row's text."""
    queries, new = within.shape[1:]
    seen = torch.zeros(len(lengths), queries, CAPACITY, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for query in range(queries):
            place = length + int(indices[row, new - queries + query])
            for column in range(CAPACITY):
                if column < length:
                    seen[row, query, column] = is_visible(place, column)
                elif column < length + new:
                    key = length + int(indices[row, column - length])
                    seen[row, query, column] = bool(within[row, query, column - length]) and is_visible(place, key)
    return seen


WINDOWS = {
    "full_attention": (None, lambda query, key: True),
    "sliding_attention": (4, lambda query, key: key > query - 4),
    "chunked_attention": (4, lambda query, key: key // 4 == query // 4),
}


@pytest.mark.parametrize("layer_type", WINDOWS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_trees_are_those_of_a_loop(layer_type, seed):
    within, depths = tree_slots(seed)
    size, is_visible = WINDOWS[layer_type]
    mask = additive_masks(
        within, depths, {layer_type: size}, StaticColumns(torch.tensor(LENGTHS), CAPACITY), torch.float32
    )
    assert mask.shape == (3, 1, 6, CAPACITY)
    expected = seen_by_loops(within, depths, LENGTHS, is_visible)
    assert torch.equal(mask[:, 0] == 0, expected)
    assert mask[:, 0][~expected].eq(torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("layer_type", WINDOWS)
def test_masks_of_chains_and_of_fewer_queries_than_new_columns(layer_type):
    """A chain is the same in all rows; and of a block's columns only the last ones ask."""
    size, is_visible = WINDOWS[layer_type]
    lengths = torch.tensor(LENGTHS)
    slots = torch.arange(5)[None]
    causal = slots[:, None] <= slots[:, :, None]
    for queries in (5, 2):
        within = causal[:, -queries:]
        mask = additive_masks(within, slots, {layer_type: size}, StaticColumns(lengths, CAPACITY), torch.float64)
        expected = seen_by_loops(within.expand(3, -1, -1), slots.expand(3, -1), LENGTHS, is_visible)
        assert torch.equal(mask[:, 0] == 0, expected)
        assert mask.dtype == torch.float64


def test_layer_types_have_masks_of_their_own():
    within, depths = tree_slots()
    windows = {name: size for name, (size, _) in WINDOWS.items()}
    masks = additive_masks(within, depths, windows, StaticColumns(torch.tensor(LENGTHS), CAPACITY), torch.float32)
    assert set(masks) == set(WINDOWS)
    for name, (_, is_visible) in WINDOWS.items():
        assert torch.equal(masks[name][:, 0] == 0, seen_by_loops(within, depths, LENGTHS, is_visible))


def test_each_token_stands_at_its_index():
    within, depths = tree_slots()
    columns = StaticColumns(torch.tensor(LENGTHS), CAPACITY)
    seen, (_, places) = columns.visible(within), columns.token_indices(depths)
    assert torch.equal(seen, seen_by_loops(within, depths, LENGTHS, lambda query, key: True))
    for row, length in enumerate(LENGTHS):
        for column in range(length + 6):
            is_new = column >= length
            assert places[row, column] == (length + depths[row, column - length] if is_new else column)


@pytest.mark.parametrize(("num_columns", "capacity"), [(1, 1), (256, 1), (257, 2), (512, 2), (513, 4), (5000, 32)])
def test_capacities_double(num_columns, capacity):
    assert capacity_for(num_columns) == capacity * SMALLEST


def entries_for(batch, columns, seed=0):
    return torch.randn(2, batch, 2, columns, 4, generator=torch.Generator().manual_seed(seed))


def test_buffers_that_outgrow_their_room_keep_their_entries():
    keys, values = entries_for(3, SMALLEST)
    small = new_static_cache([(keys, values)], SMALLEST)
    assert with_room(small, SMALLEST) is small
    large = with_room(small, SMALLEST + 1)
    assert large.capacity == 2 * SMALLEST
    assert torch.equal(large.layers[0].keys[:, :, :SMALLEST], keys)
    assert torch.equal(large.layers[0].values[:, :, :SMALLEST], values)
    assert not large.layers[0].keys[:, :, SMALLEST:].any()


def test_rows_write_to_columns_of_their_own_and_paths_move_up():
    cache = new_static_cache([tuple(entries_for(2, 3))], 12)
    new_keys, new_values = entries_for(2, 4, seed=1)
    before = cache.layers[0].keys.clone()
    cache.columns = torch.tensor([[3, 4, 5, 6], [1, 2, 3, 4]])
    cache.update(new_keys, new_values, 0)
    layer = cache.layers[0]
    for row, start in enumerate((3, 1)):
        assert torch.equal(layer.keys[row, :, :start], before[row, :, :start])
        assert torch.equal(layer.keys[row, :, start : start + 4], new_keys[row])
        assert torch.equal(layer.values[row, :, start : start + 4], new_values[row])
    # The first row keeps slots 0, 2 and 3, the second 0 and 3.
    layer.move(torch.tensor([[3, 5, 6], [1, 4, 4]]), torch.tensor([[3, 4, 5], [1, 2, 3]]))
    assert torch.equal(layer.keys[0, :, 3:6], new_keys[0][:, [0, 2, 3]])
    assert torch.equal(layer.values[1, :, 1:3], new_values[1][:, [0, 3]])


def test_a_cache_moves_with_each_entry_at_its_tokens_index():
    cache = GrowingCache()
    keys, values = entries_for(2, 5)
    cache.update(keys, values, 0)
    cache.keep(0, [[0, 1, 2, 3, 4], [0, 1]])
    more = entries_for(2, 3, seed=1)
    cache.update(*more, 0)
    cache.keep(5, [[0], [0, 1, 2]])
    buffers, lengths = to_static_cache(cache, 2, 4)
    assert lengths == [6, 5]
    assert torch.equal(buffers.layers[0].keys[0, :, :6], torch.cat([keys[0], more[0][0][:, :1]], dim=1))
    assert torch.equal(buffers.layers[0].keys[1, :, :5], torch.cat([keys[1][:, :2], more[0][1]], dim=1))
    assert torch.equal(buffers.layers[0].values[1, :, :5], torch.cat([values[1][:, :2], more[1][1]], dim=1))


def test_what_a_window_has_dropped_leaves_its_columns_empty():
    """Windowed layers count from what they still hold, buffers from the first token."""
    config = tiny_target("gemma3").config
    cache = TargetCache(config)
    written = [entries_for(2, 20, seed=index) for index in range(config.num_hidden_layers)]
    for index, (keys, values) in enumerate(written):
        cache.update(keys, values, index)
    cache.keep(0, [list(range(20)), list(range(12))])
    dropped = [layer.dropped for layer in cache.layers]
    assert dropped[0] is not None
    assert dropped[1] is None
    buffers, lengths = to_static_cache(cache, 2, 4)
    assert lengths == [20, 12]
    for index, (keys, values) in enumerate(written):
        for row, length in enumerate(lengths):
            first = dropped[index][row] if dropped[index] else 0
            layer = buffers.layers[index]
            assert torch.equal(layer.keys[row, :, first:length], keys[row, :, first:length])
            assert torch.equal(layer.values[row, :, first:length], values[row, :, first:length])
            # Masked, so it has to be finite.
            assert not layer.keys[row, :, :first].any()


def test_news_come_to_the_left_with_the_states_of_the_token_before():
    """Features end beside the newest token, and may begin later than the tokens."""
    context = DraftInputs(
        torch.tensor([[0, 7, 8], [4, 5, 6]]),
        torch.tensor([[0, 10, 11], [3, 4, 5]]),
        features=torch.tensor([[[70.0], [80.0]], [[50.0], [60.0]]]),
        new_counts=[2, 3],
    )
    inputs, most = to_static_inputs(context, 5)
    assert most == 3
    assert inputs.ids.shape == inputs.positions.shape == (2, 5)
    assert inputs.ids[0, :2].tolist() == [7, 8]
    assert inputs.ids[1, :3].tolist() == [4, 5, 6]
    assert inputs.positions[0, :2].tolist() == [10, 11]
    assert inputs.features[0, :2, 0].tolist() == [70.0, 80.0]
    assert inputs.features[1, :3, 0].tolist() == [0.0, 50.0, 60.0]
    assert inputs.last(inputs.ids)[:, 0].tolist() == [8, 6]
    assert inputs.real(1).tolist() == [[True] * 2 + [False] * 3 + [True], [True] * 3 + [False] * 2 + [True]]


def test_another_calls_tensors_are_no_reason_to_compile_again(monkeypatch):
    def mark_as_torch_2_7_does(tensor, guard=True):
        mark(tensor, guard=guard)

    mark = decorators.mark_static_address
    monkeypatch.setattr(torch._dynamo, "mark_static_address", mark_as_torch_2_7_does)
    # "guarded": code is compiled for this one tensor.
    assert static(torch.zeros(1, device="meta"))._dynamo_static_input_type == "unguarded"
