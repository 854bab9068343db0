"""Compiled rounds write what eager ones write, round by round; seen here with pieces that are not compiled."""

import pytest
import torch

from hf_pardraft import NgramModel
from hf_pardraft.generation import compiled_decode
from tiny_models import every_architecture, make_lasting_oracle, random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
RATES = [0.7, 0.6, 0.6, 0.5]
LONGEST = 28
LENGTHS = (9, 3, 6, 1)


@pytest.fixture
def pieces(monkeypatch):
    """Nothing is compiled; returns the names of the pieces that ran."""
    names = []

    def uncompiled(piece, **options):
        def named(*arguments):
            names.append(piece.__name__)
            return piece(*arguments)

        return named

    monkeypatch.setattr(torch, "compile", uncompiled)
    return names


def batch_of(lengths):
    """Prompts of different lengths, padded on the left."""
    prompts, longest = [random_prompt(length, seed=seed) for seed, length in enumerate(lengths)], max(lengths)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=0) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def texts_of(target, batch, longest=LONGEST):
    """What the target writes greedily, row by row and without padding."""
    out = target.generate(**batch, do_sample=False, max_new_tokens=longest)
    return [
        row[int((mask == 0).sum()) :] for row, mask in zip(out, batch["attention_mask"], strict=True)
    ]


def oracle(kind, target, batch, rates=RATES, runner_up=0.7, settings=None, **overrides):
    """A drafter that knows some of the greedy text, and whose proposals are recorded."""
    drafter = tiny_drafter(kind, target, depth=len(rates), **overrides)
    drafter.generation_config.update(record_drafts=True, **(settings or {}))
    return make_lasting_oracle(drafter, texts_of(target, batch), rates, runner_up)


def eager_and_static(target, batch, drafter, **options):
    """The same call twice, and how it went."""
    results = []
    for how in ({}, {"cache_implementation": "static"}):
        torch.manual_seed(0)
        out = target.generate(**batch, assistant_model=drafter, max_new_tokens=LONGEST, **options, **how)
        results.append((out, drafter.last_stats))
    return results


def assert_same(target, batch, drafter, **options):
    (eager, eager_stats), (static, static_stats) = eager_and_static(target, batch, drafter, **options)
    assert torch.equal(static, eager)
    assert_same_stats(static_stats, eager_stats)


def assert_same_stats(static, eager):
    for name in ("rounds", "tokens_per_round", "drafted_per_round", "accepted_per_round", "proposals"):
        assert getattr(static, name) == getattr(eager, name)


@pytest.mark.parametrize("lengths", [(9,), LENGTHS])
@pytest.mark.parametrize("budget", [0, 10])
@pytest.mark.parametrize(("architecture", "kind"), every_architecture(KINDS))
def test_every_round_goes_as_it_goes_uncompiled(pieces, architecture, kind, budget, lengths):
    target, batch = tiny_target(architecture), batch_of(lengths)
    drafter = oracle(kind, target, batch, settings={"tree_budget": budget})
    assert_same(target, batch, drafter, do_sample=False)
    assert pieces.count("read_and_commit") > 4 and "draft" in pieces and ("grow_tree" in pieces) == (budget > 0)
    assert drafter.last_stats.tau > 1.4
