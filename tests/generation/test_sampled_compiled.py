"""Compiled rounds draw the sampled text of plain `generate`, too; seen here with steps that are left uncompiled."""

import pytest
import torch

from compiled_cases import leave_uncompiled, settle
from hf_pardraft import NgramModel
from pairwise import every_two_meet
from sampled_cases import BUDGETS, KINDS, another, assert_plain_text, double_target, knowing, seeded, unpadded
from tiny_models import batch_of

STATIC = {"cache_implementation": "static"}
SAMPLING = {
    "as it is": {},
    "everywhere": {"temperature": 0.7, "top_p": 0.9},
    "along the path": {"temperature": 0.7, "repetition_penalty": 1.2},
}


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """Nothing is compiled; the names of the steps that run are noted."""
    return leave_uncompiled(monkeypatch)


@pytest.mark.parametrize(("kind", "budget", "sampling"), every_two_meet([*KINDS, "pard2"], BUDGETS, SAMPLING))
def test_compiled_rounds_write_it(steps, kind, budget, sampling):
    target, sampling = double_target(), SAMPLING[sampling]
    for lengths in ((6,), (9, 3, 6)):
        batch = batch_of(*lengths)
        plain = seeded(target, batch, **sampling)
        drafter = knowing(kind, target, unpadded(plain[0], batch["attention_mask"]), budget)
        assert_plain_text(target, batch, drafter, plain, **sampling, **STATIC)
        assert drafter.last_stats.tau > 1.5
        assert len(steps) > 6
        steps.clear()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "qwen3"])
def test_with_windows(steps, architecture, budget):
    target, batch = double_target(architecture), batch_of(9, 3, 6)
    plain = seeded(target, batch)
    drafter = knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), budget)
    assert_plain_text(target, batch, drafter, plain, **STATIC)
    assert drafter.last_stats.tau > 1.5
    assert steps


@pytest.mark.parametrize("budget", BUDGETS)
def test_rounds_in_several_steps_and_trees_with_an_ngram_model(monkeypatch, steps, budget):
    settle(monkeypatch, is_one_step=lambda decoding: False)
    target, batch = double_target(), batch_of(5, 8)
    plain = seeded(target, batch)
    texts = unpadded(plain[0], batch["attention_mask"])
    drafter = knowing("dflash", target, texts, budget)
    for ngram in (None, NgramModel.from_token_stream(texts, vocab_size=64, order=4)):
        drafter.ngram = ngram
        assert_plain_text(target, batch, drafter, plain, **STATIC)
        assert drafter.last_stats.tau > 1.5
    assert steps


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("known", [(0,), (1, 2)])
def test_items_run_apart_and_end_at_different_times(steps, known, budget):
    """Those that are over stay in a compiled batch, but draw nothing that the others would see."""
    target, batch = double_target(), batch_of(9, 3, 6)
    texts = seeded(target, batch, max_new_tokens=40)[0][:, 9:]
    for ends in (None, [int(texts[0, 5]), int(texts[1, 20])]):
        options = {"max_new_tokens": 40, "eos_token_id": ends, "pad_token_id": 0}
        plain = seeded(target, batch, **options)
        written = unpadded(plain[0], batch["attention_mask"])
        told = [text if item in known else another(text) for item, text in enumerate(written)]
        drafter = knowing("pard", target, told, budget, rates=[1.0] * 6, runner_up=0.0)
        assert_plain_text(target, batch, drafter, plain, **options, **STATIC)
        assert drafter.last_stats.tau > 1.05
    assert steps


@pytest.mark.parametrize("budget", BUDGETS)
def test_several_sequences_lengths_and_scores(steps, budget):
    target, batch = double_target(), batch_of(2, 5)
    options = {"num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    for length in (3, 14):
        expected, state = seeded(target, batch, max_new_tokens=length, **options)
        drafter = knowing("dflash", target, unpadded(expected.sequences, batch["attention_mask"]), budget)
        found, own_state = seeded(target, batch, assistant_model=drafter, max_new_tokens=length, **options, **STATIC)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(own_state, state)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert steps
