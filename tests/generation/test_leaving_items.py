"""Items leave a batch at no more than the cost of moving a few rows, and nobody else's text changes."""

import random

import pytest
import torch

from drawn_plans import draw_plans
from ending_targets import END, with_ends
from hf_pardraft.generation.pending import PendingInputs, items_of, joined
from hf_pardraft.generation.sequences import filling_gaps
from hf_pardraft.models.cache import GrowingCache
from hf_pardraft.models.inputs import DraftInputs
from tiny_models import batch_oracle, ragged_prompts, tiny_target


@pytest.mark.parametrize("seed", range(20))
def test_only_the_last_items_move_and_only_to_gaps(seed):
    draw = random.Random(seed)
    gone = [draw.random() < 0.4 for _ in range(draw.randrange(1, 12))]
    kept = filling_gaps(gone)
    assert sorted(kept) == [item for item, is_gone in enumerate(gone) if not is_gone]
    for place, item in enumerate(kept):
        assert item == place or (gone[place] and item >= len(kept))


LENGTHS = [36, 23, 35, 14, 12]


@pytest.mark.parametrize(
    "kept", [[0, 4, 2], [0, 1, 2, 3], [0, 1, 1], [0, 1], [3, 1], [2, 3, 4], [1, 3, 4], [4, 3, 2, 1]]
)
def test_a_cache_goes_on_with_any_items_and_in_the_memory_that_it_has_if_they_need_most_of_it(kept):
    cache, drawn = GrowingCache(), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 5, 2, max(LENGTHS), 3, generator=drawn)
    cache.update(keys, values, 0)
    cache.keep(max(LENGTHS), [[]] * 5)
    cache.item_lengths = [*LENGTHS]
    layer, place = cache.layers[0], cache.layers[0].key_buffer.data_ptr()
    cache.select_items(kept)
    assert cache.item_lengths == [LENGTHS[item] for item in kept]
    longest = max(cache.item_lengths)
    needs_most = len(kept) > 2 and longest > 30
    assert (layer.key_buffer.data_ptr() == place) is needs_most
    assert layer.key_buffer.untyped_storage().nbytes() <= (5 if needs_most else len(kept)) * 2 * 44 * 3 * 4
    assert torch.equal(layer.keys, keys[kept][:, :, :longest])
    assert torch.equal(layer.values, values[kept][:, :, :longest])
    # And grows as if nothing had been there.
    more = torch.randn(len(kept), 2, 30, 3, generator=drawn)
    cache.update(more, more, 0)
    assert torch.equal(layer.keys, torch.cat([keys[kept][:, :, :longest], more], dim=2))


def drawn_inputs(draw: random.Random, num_items: int, has_features: bool) -> DraftInputs:
    """Of one round, unevenly many tokens for each item."""
    counts = [draw.randrange(1, 4) for _ in range(num_items)]
    ids = torch.randint(100, (num_items, max(counts)))
    inputs = DraftInputs(ids, ids + 1000, new_counts=None if min(counts) == max(counts) else counts)
    if has_features:
        inputs.features, inputs.feature_positions = torch.randn(*ids.shape, 2), ids + 2000
        inputs.feature_counts = inputs.new_counts
    return inputs


def real_ones(tensor: torch.Tensor, counts: list[int] | None) -> list[list]:
    """What is no padding, of each item."""
    counts = counts or [tensor.shape[1]] * len(tensor)
    return [row[len(row) - count :].tolist() for row, count in zip(tensor, counts, strict=True)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("has_features", [False, True])
def test_what_a_drafter_has_yet_to_read_is_as_if_items_had_left_at_once(seed, has_features):
    torch.manual_seed(seed)
    draw, pending, at_once, num_items = random.Random(seed), PendingInputs(), [], 6
    while num_items > 1 or not at_once:
        for _ in range(draw.randrange(4)):
            inputs = drawn_inputs(draw, num_items, has_features)
            pending.add(inputs)
            at_once.append(inputs)
        kept = draw.sample(range(num_items), draw.randrange(1, num_items + 1))
        num_items = len(kept)
        pending.select_items(kept)
        at_once = [items_of(inputs, kept) for inputs in at_once]
    assert pending.has_features is has_features
    assert pending.num_tokens >= sum(each.new_ids.shape[1] for each in at_once)
    expected, found = joined(at_once), pending.take()
    for name, counts in (("new_ids", "new_counts"), ("new_positions", "new_counts"), ("features", "feature_counts")):
        if getattr(expected, name) is not None:
            one, other = (real_ones(getattr(each, name), getattr(each, counts)) for each in (found, expected))
            assert one == other
    assert (found.features is None) is not has_features
    assert pending.num_tokens == 0


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("budget", [0, 10])
def test_rows_that_end_one_after_the_other_leave_the_others_texts_alone(monkeypatch, kind, budget):
    target = with_ends(tiny_target("llama", vocab_size=299)).double()
    ids, mask = ragged_prompts((5, 9, 3, 12, 7, 4, 8, 6))
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    ends = {row.tolist().index(END) for row in plain if END in row}
    assert len(ends) > 3
    draw_plans(monkeypatch)
    drafter = batch_oracle(kind, target, plain, mask, budget).double()
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
