"""Trees of drafters that know some of the tokens only."""

import pytest
import torch

from hf_pardraft import DartDrafter
from hf_pardraft.generation.sequences import TokenBuffer
from hf_pardraft.generation.settings import read_settings
from hf_pardraft.generation.tree_search import TreeSearch
from tiny_models import tiny_target


@pytest.mark.parametrize("scoring", ["probability", "dart"])
def test_a_tree_holds_no_token_that_can_t_be_drafted(scoring):
    """DART's scoring adds an epsilon to each probability, and so makes something of 0."""
    target = tiny_target("llama")
    drafter = DartDrafter.for_target(target, draft_token_ids=[3, 9, 41], draft_length=3)
    settings = {"tree_budget": 20, "tree_scoring": scoring}
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0)) * 20
    search = TreeSearch(read_settings(drafter, target.generation_config), drafter)
    tree = search.tree(logits, TokenBuffer(torch.tensor([[5, 6]])), 20, drafter.draft_token_ids)
    assert {*tree.tokens[0].tolist()} <= {3, 9, 41}
    assert tree.num_nodes == 20
