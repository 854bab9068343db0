"""A cut-down copy has layers of its model, and computes what that model would compute with these alone."""

import pytest
import torch
from torch import nn

from hf_pardraft import PardDrafter
from hf_pardraft.pairing.cut_down import cut_down_copy, default_num_layers, evenly_spaced_layers
from tiny_models import tiny_target


@pytest.mark.parametrize(
    ("num_layers", "count", "kept"),
    [(30, 6, [0, 6, 12, 17, 23, 29]), (30, 5, [0, 7, 14, 22, 29]), (4, 2, [0, 3]), (3, 3, [0, 1, 2]), (9, 1, [0])],
)
def test_layers_are_evenly_spaced_from_the_first_to_the_last(num_layers, count, kept):
    assert evenly_spaced_layers(num_layers, count) == kept


@pytest.mark.parametrize("count", [0, 5])
def test_more_layers_than_there_are_can_not_be_kept(count):
    with pytest.raises(ValueError, match=f"from 1 to 4 layers to keep, got {count}"):
        evenly_spaced_layers(4, count)


def test_one_layer_in_five_is_kept_and_two_at_least():
    assert [default_num_layers(count) for count in (1, 2, 9, 30)] == [1, 2, 2, 6]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "mistral"])
def test_a_copy_computes_what_its_layers_compute(architecture):
    model = tiny_target(architecture, num_hidden_layers=4)
    copy, layers = cut_down_copy(model, 3)
    assert layers == [0, 2, 3]
    ids = torch.arange(3, 20)[None]
    found = copy(input_ids=ids).logits
    # The model itself, without the others.
    model.model.layers = nn.ModuleList(model.model.layers[layer] for layer in layers)
    model.config.num_hidden_layers = 3
    kinds = model.config.to_dict().get("layer_types")
    if kinds:
        model.config.layer_types = [kinds[layer] for layer in layers]
    assert torch.equal(found, model(input_ids=ids, use_cache=False).logits)


def test_a_copy_shares_no_weight_and_becomes_a_drafter():
    model = tiny_target("qwen3", num_hidden_layers=4)
    copy, _ = cut_down_copy(model)
    before = model.get_input_embeddings().weight.clone()
    drafter = PardDrafter.from_causal_lm(copy, 63)
    with torch.no_grad():
        for weight in (*copy.parameters(), *drafter.parameters()):
            weight.zero_()
    assert drafter.config.num_hidden_layers == 2
    assert torch.equal(model.get_input_embeddings().weight, before)
