"""Drafts from a part of the vocabulary: the target's text, in every way of decoding, and no more work than their columns."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LogitsProcessorList, SuppressTokensLogitsProcessor

from compiled_cases import ONE_LAYER, assert_same, leave_uncompiled
from hf_pardraft import NgramModel
from hf_pardraft.generation import hooks
from hf_pardraft.generation.choosing import choice
from hf_pardraft.generation.choosing.processors import DraftColumns
from hf_pardraft.generation.choosing.rejection import draw_chain, keep_or_redraw
from hf_pardraft.generation.tree.token_tree import build_tree, draft_chain, node_log_probabilities
from pairwise import every_two_meet
from tiny_models import batch_of, make_lasting_oracle, ragged_prompts, tiny_drafter, tiny_target

KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
# Some of these the tiny target writes.
IDS = list(range(0, 64, 2))
RATES = [0.9, 0.8, 0.8, 0.8]


def prompts(lengths=(7, 3)):
    ids, mask = ragged_prompts(lengths)
    return {"input_ids": ids, "attention_mask": mask}


def oracle(kind, target, batch, new=24, ids=IDS, **settings):
    """A drafter of some tokens that is mostly right about those, and the text that it is right about."""
    options = {"max_new_tokens": new, "do_sample": False}
    text = target.generate(**batch, **options)
    unpadded = [
        row[len(row) - new - int(mask.sum()) :] for row, mask in zip(text, batch["attention_mask"], strict=True)
    ]
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(ids)
    make_lasting_oracle(drafter, unpadded, RATES, runner_up=0.5)
    drafter.generation_config.record_drafts = True
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    return drafter, text


def drafted_tokens(drafter):
    return {token for proposal in drafter.last_stats.proposals for token in proposal.tokens}


SETTINGS = [{}, {"tree_budget": 10}, {"tree_budget": 10, "tree_end_rule": "stop"}]


@pytest.mark.parametrize(("kind", "lengths", "settings"), every_two_meet(KINDS, [(6,), (7, 3)], SETTINGS))
def test_greedy_text_is_the_targets(kind, lengths, settings):
    target, batch = tiny_target("llama"), prompts(lengths)
    drafter, text = oracle(kind, target, batch, **settings)
    found = target.generate(**batch, assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, text)
    assert drafted_tokens(drafter) <= {*IDS}
    # It is right about some of what it knows, which it would not be with columns for tokens.
    assert drafter.last_stats.tau > 1.2


@pytest.mark.parametrize(("kind", "lengths", "settings"), every_two_meet(KINDS, [(6,), (7, 3)], SETTINGS[:2]))
def test_sampled_text_is_plain_generates(kind, lengths, settings):
    target, batch = tiny_target("llama"), prompts(lengths)
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    drafter.generation_config.record_drafts = True
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "suppress_tokens": [4, 5], "max_new_tokens": 16}
    torch.manual_seed(1)
    text = target.generate(**batch, **options)
    torch.manual_seed(1)
    assert torch.equal(target.generate(**batch, **options, assistant_model=drafter), text)
    assert drafted_tokens(drafter) <= {*IDS} - {4}


def test_coupled_drafts_guess_with_the_noise_of_their_own_tokens(monkeypatch):
    """A drafter that thinks as the target does proposes what the target draws, wherever it knows the token."""
    monkeypatch.setattr(choice, "NOISE_WEIGHTS", (1.0, 1.0))
    target, batch = tiny_target("llama"), prompts((6,))
    drafter = tiny_drafter("pard", target)
    known = torch.tensor(IDS)

    def target_law(context, state, depth):
        text = torch.cat([state.__dict__.setdefault("text", context.new_ids[:, :0]), context.new_ids], dim=1)
        state.text = text
        return target(text).logits[:, -1:][..., known].expand(-1, depth, -1)

    drafter.set_draft_vocabulary(IDS)
    drafter.draft = target_law
    drafter.generation_config.num_assistant_tokens = 1
    drafter.generation_config.record_drafts = True
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 40}
    torch.manual_seed(3)
    text = target.generate(**batch, **options)[0, 6:].tolist()
    torch.manual_seed(3)
    target.generate(**batch, **options, assistant_model=drafter)
    proposals = drafter.last_stats.proposals
    right = [text[each.num_before] in each.tokens for each in proposals if text[each.num_before] in IDS]
    assert len(right) >= 8
    assert all(right)


SAMPLING = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}]


@pytest.mark.parametrize(("kind", "sampling", "settings"), every_two_meet(KINDS, SAMPLING, SETTINGS[:2]))
def test_compiled_rounds(monkeypatch, kind, sampling, settings):
    leave_uncompiled(monkeypatch)
    target, batch = tiny_target("qwen3"), batch_of(5, 2)
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    for name, value in {**settings, "record_drafts": True}.items():
        setattr(drafter.generation_config, name, value)
    assert_same(target, batch, drafter, **sampling)
    assert drafted_tokens(drafter) <= {*IDS}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_vocabulary_that_is_set_between_two_compiled_calls_counts():
    """As far as graphs go; what inductor makes of them is seen in test_inductor_packed."""
    target, batch = tiny_target("qwen3", num_hidden_layers=2), batch_of(5)
    drafter = tiny_drafter("dflash", target, **ONE_LAYER["dflash"])
    drafter.generation_config.record_drafts = True
    for ids in (IDS, [*range(1, 64, 2)], None):
        drafter.set_draft_vocabulary(ids)
        assert_same(target, batch, drafter, compile_config=CompileConfig(backend="eager"))
        assert drafted_tokens(drafter) <= {*(range(64) if ids is None else ids)}


@pytest.mark.parametrize("kind", ["dart", "dflash", "pard"])
def test_an_ngram_model_looks_tokens_up(kind):
    """Its candidates are the target's ids: with those of columns it would know none of them."""
    target, batch = tiny_target("llama"), prompts((6,))
    drafter, text = oracle(kind, target, batch, tree_budget=10, ngram_weight=1.0)
    looked_up = []
    drafter.ngram = NgramModel.from_token_stream(text[0].tolist() * 3, order=3, vocab_size=64)
    lookup = drafter.ngram.walk

    def walk(context, candidates):
        looked_up.append(candidates)
        return lookup(context, candidates)

    drafter.ngram.walk = walk
    found = target.generate(**batch, assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, text)
    assert {*torch.cat([each.flatten() for each in looked_up]).tolist()} <= {*IDS}
    assert drafted_tokens(drafter) <= {*IDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["our generator", "a bare assistant", "transformers' DFlash"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_transformers_own_loops(kind, way, sampling):
    """With our candidates in them; with a PARD drafter's `generate`; and with DFlash's hidden states, which the target scores."""
    if (way == "a bare assistant" and kind != "pard") or (way.endswith("DFlash") and kind not in ("dflash", "dflare")):
        pytest.skip("not one of this kind's ways")
    target, batch = tiny_target("llama"), prompts((6,))
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    options = {**batch, **sampling, "max_new_tokens": 12}
    torch.manual_seed(5)
    text = target.generate(**options)
    torch.manual_seed(5)
    if way == "our generator":
        drafter.generation_config.decode_loop = "stock"
        found = target.generate(**options, assistant_model=drafter)
    elif way.endswith("DFlash"):
        found = target.generate(**options, assistant_model=drafter, speculation_type="dflash")
    else:
        hooks.uninstall()
        try:
            found = target.generate(**options, assistant_model=drafter)
        finally:
            hooks.install()
    assert found.shape == text.shape
    if not sampling["do_sample"]:
        assert torch.equal(found, text)


def test_a_schedule_that_looks_at_drafts_judges_them_by_their_own_columns():
    logits = torch.randn(2, 4, len(IDS), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor(IDS)
    tree = build_tree(logits, 8, token_ids=ids)
    expected = build_tree(logits, 8)
    claims = node_log_probabilities(tree, logits, ids)
    assert torch.equal(tree.tokens, ids[expected.tokens])
    torch.testing.assert_close(claims, node_log_probabilities(expected, logits), rtol=0, atol=0)
    assert torch.equal(draft_chain(logits, ids).tokens, ids[logits.argmax(-1)])


@pytest.mark.parametrize("kind", ["dflash", "pard"])
def test_the_automatic_schedule(kind):
    target, batch = tiny_target("llama"), prompts((7, 3))
    drafter, text = oracle(kind, target, batch, tree_budget=8, draft_schedule="auto")
    for _ in range(3):
        found = target.generate(**batch, assistant_model=drafter, max_new_tokens=24, do_sample=False)
        assert torch.equal(found, text)


# Rejection sampling: the drafter's law is zero outside of its vocabulary.


def test_rejection_keeps_the_targets_law_where_the_drafter_knows_a_part_of_it():
    num, ids = 200_000, torch.tensor([1, 2, 5])
    generator = torch.Generator().manual_seed(0)
    scores, draft_logits = (torch.randn(1, 1, width, generator=generator) for width in (7, 3))
    torch.manual_seed(0)
    drawn = draw_chain(draft_logits.expand(num, 1, -1), LogitsProcessorList(), ids)
    assert {*drawn.tokens.flatten().tolist()} == {1, 2, 5}
    chosen = keep_or_redraw(scores.expand(num, 1, -1), drawn)
    found = torch.bincount(chosen.flatten(), minlength=7) / num
    law = scores.softmax(-1).flatten()
    torch.testing.assert_close(found, law, rtol=0, atol=5e-3)
    # As often kept as it can be: the mass that both laws have in common.
    common = torch.minimum(law[ids], draft_logits.softmax(-1).flatten()).sum()
    kept = (chosen == drawn.tokens).float().mean()
    torch.testing.assert_close(kept, common, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_rejection_runs_with_every_kind(monkeypatch, kind, compiled):
    leave_uncompiled(monkeypatch)
    target, batch = tiny_target("llama"), prompts((7, 3))
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    drafter.generation_config.verification = "rejection"
    drafter.generation_config.record_drafts = True
    options = {"cache_implementation": "static"} if compiled else {}
    out = target.generate(**batch, assistant_model=drafter, do_sample=True, max_new_tokens=12, **options)
    assert out.shape == (2, 7 + 12)
    assert drafted_tokens(drafter) <= {*IDS}


@pytest.mark.parametrize("suppressed", [[], [4, 5], [5], [*range(64)]])
def test_suppressed_tokens_are_found_among_the_columns(suppressed):
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor(suppressed)])
    columns = DraftColumns(torch.tensor(IDS), 64)
    logits = torch.zeros(2, len(IDS))
    found = columns.warpers(processors)(None, logits)
    assert found.isneginf().tolist() == [[token in suppressed for token in IDS]] * 2


# What it costs.


class Elements(TorchDispatchMode):
    """The largest result of any operation, in elements of its last dimension."""

    def __init__(self):
        super().__init__()
        self.widest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1:
            self.widest = max(self.widest, result.shape[-1])
        return result


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 4}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_makes_nothing_as_wide_as_the_vocabulary(kind, settings, monkeypatch):
    from hf_pardraft.generation.decoder import SpeculativeDecoding

    target = tiny_target("llama", vocab_size=1000)
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    widest, draft_logits, proposal = [], hooks.ParallelCandidateGenerator.draft_logits, SpeculativeDecoding._proposal

    def watched(function):
        def run(*args):
            with Elements() as seen:
                result = function(*args)
            widest.append(seen.widest)
            return result

        return run

    monkeypatch.setattr(hooks.ParallelCandidateGenerator, "draft_logits", watched(draft_logits))
    monkeypatch.setattr(SpeculativeDecoding, "_proposal", watched(proposal))
    target.generate(**prompts((6,)), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert 0 < max(widest) < 1000
