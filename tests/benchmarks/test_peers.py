"""What peers.py adds to published loops is right; the loops themselves are nobody's to test here."""

import json

import torch

import peers
from in_process import run_main
from peer_loops import CroppableCache, PlacedCache, with_places
from tiny_models import tiny_target


def test_without_checkouts_plain_generate_is_measured_alone(tmp_path):
    options = ["--prompts=1", "--max-new-tokens=4", "--repeats=2", f"--output={tmp_path / 'peers.json'}"]
    assert run_main(peers.main, *options).code == 0
    report = json.loads((tmp_path / "peers.json").read_text())
    (row,) = report["rows"]
    assert (row["name"], row["speedup"], row["tau"], row["forwards"], row["same_text"]) == ("plain", 1, 1, 4, True)
    assert report["turns"] == 2


def test_a_ratio_is_the_median_of_the_turns_each_over_all_prompts():
    layer = torch.nn.Identity()
    slow = peers.Way("slow", layer, None, seconds=[[1.0, 3.0], [2.0, 2.0], [5.0, 5.0]])
    fast = peers.Way("fast", layer, None, seconds=[[1.0, 1.0], [1.0, 3.0], [1.0, 1.0]])
    assert peers.ratio(fast, slow) == 2


def test_a_croppable_cache_is_cropped_to_a_length():
    cache = CroppableCache()
    states = torch.arange(10.0).view(1, 1, 5, 2)
    cache.update(states, states, 0)
    cache.crop(8)
    assert cache.get_seq_length() == 5
    cache.crop(3)
    assert torch.equal(cache.layers[0].keys, states[:, :, :3])


def test_a_model_with_places_writes_over_what_was_rejected():
    target = tiny_target()
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected = target(tokens).logits
        cache, placed = PlacedCache(target, 8), with_places(target)
        arguments = {"position_ids": None, "past_key_values": cache, "use_cache": True}
        placed.forward(input_ids=torch.tensor([[5, 6, 3, 4]]), cache_position=torch.arange(4), **arguments)
        logits = placed.forward_gen(input_ids=tokens[:, 2:], cache_position=torch.arange(2, 5), **arguments).logits
    torch.testing.assert_close(logits, expected[:, 2:])
