"""Scores that are no law: of a drafter they cost its drafts, and of a target they raise what plain sampling raises."""

import pytest
import torch
from scipy.stats import chi2
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from compiled_cases import settle
from hf_pardraft import NgramModel
from hf_pardraft.generation.choosing.choice import PlainDraw, RejectionSampling
from hf_pardraft.generation.choosing.noise import StepNoise
from hf_pardraft.generation.choosing.rejection import DrawnChain, draw, draw_chain, keep_or_redraw
from hf_pardraft.generation.tree.scoring import DART_SCORING
from hf_pardraft.generation.tree.token_tree import build_tree, draft_chain
from hf_pardraft.generation.tree.verify import NO_LAW, check_has_law
from hf_pardraft.models.stock_assistant import draft_as_assistant
from tiny_models import make_lasting_oracle, make_oracle, random_prompt, tiny_drafter, tiny_target

VOCAB = 6
MESSAGE = "probability tensor contains either `inf`, `nan` or element < 0"
# What may stand in a row of scores, and where.
BAD_ROWS = {
    "all NaN": (slice(None), torch.nan),
    "one NaN": (slice(1, 2), torch.nan),
    "all -inf": (slice(None), -torch.inf),
    "all inf": (slice(None), torch.inf),
    "one inf": (slice(2, 3), torch.inf),
    "two inf": (slice(2, 4), torch.inf),
}
WARPERS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top-k": [TopKLogitsWarper(3)],
    "top-p": [TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.1)],
    "top-h": [TopHLogitsWarper(0.6)],
    "typical": [TypicalLogitsWarper(0.8)],
}


@pytest.mark.parametrize("bad", [torch.nan, 0.0])
def test_a_row_without_a_law_draws_none_and_leaves_the_others_theirs(bad):
    weights = torch.rand(5, VOCAB, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = draw(weights)
    weights[2] = bad
    torch.manual_seed(1)
    drawn = draw(weights)
    assert drawn[2] == NO_LAW
    kept = [0, 1, 3, 4]
    assert torch.equal(drawn[kept], expected[kept])


@pytest.mark.parametrize(
    ("bad", "warper"),
    [*((bad, "none") for bad in BAD_ROWS), *(("one NaN", warper) for warper in WARPERS if warper != "none")],
)
def test_a_draft_without_a_law_leaves_the_target_s(bad, warper):
    """Chi-square over what is kept or drawn in its place, 20,000 times at once; a right sampler fails one seed in 10,000."""
    num, warpers = 20000, LogitsProcessorList(WARPERS[warper])
    generator = torch.Generator().manual_seed(0)
    draft_logits = torch.randn(1, 1, VOCAB, generator=generator)
    draft_logits[..., BAD_ROWS[bad][0]] = BAD_ROWS[bad][1]
    text = torch.zeros(1, 1, dtype=torch.long)
    scores = warpers(text, torch.randn(1, VOCAB, generator=generator))
    torch.manual_seed(2)
    drawn = draw_chain(draft_logits.repeat(num, 1, 1), warpers)
    assert torch.allclose(drawn.law.sum(-1), torch.ones(num, 1))
    choices = keep_or_redraw(scores.expand(num, 1, -1), drawn)
    counts, law = choices.flatten().bincount(minlength=VOCAB), scores.softmax(-1)[0]
    assert counts[law == 0].sum() == 0
    likely = law > 0
    statistic = ((counts - num * law)[likely] ** 2 / (num * law)[likely]).sum()
    assert chi2.sf(float(statistic), int(likely.sum()) - 1) > 1e-4 if likely.sum() > 1 else counts.max() == num


def test_an_infinite_draft_is_as_sure_as_it_says():
    logits = torch.randn(3, 2, VOCAB)
    logits[:, 1, 4] = torch.inf
    drawn = draw_chain(logits, LogitsProcessorList([TemperatureLogitsWarper(0.01)]))
    assert drawn.tokens[:, 1].tolist() == [4] * 3
    assert torch.equal(drawn.law[:, 1, 4], torch.ones(3))


def test_a_processor_may_leave_none_of_the_tokens_that_a_drafter_knows():
    logits = torch.full((2, 1, VOCAB), -torch.inf)
    logits[..., :2] = 1.0
    drawn = draw_chain(logits, LogitsProcessorList([SuppressTokensLogitsProcessor([0, 1])]))
    assert torch.allclose(drawn.law, torch.tensor(1 / VOCAB))


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_target_without_a_law_is_not_drawn_from(bad):
    scores = torch.randn(2, 3, VOCAB)
    plain, rejection = (
        PlainDraw(LogitsProcessorList(), StepNoise(2, scores.device, 3), False),
        RejectionSampling(LogitsProcessorList()),
    )
    scores[1, 1, BAD_ROWS[bad][0]] = BAD_ROWS[bad][1]
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.multinomial(scores[1, 1].softmax(-1), 1)
    for choice in (plain, rejection):
        tree = choice.propose(torch.randn(2, 2, VOCAB), draft_chain)
        choices = choice.everywhere(scores, tree)
        assert (choices == NO_LAW).nonzero().tolist() == [[1, 1]]
    with pytest.raises(RuntimeError, match=MESSAGE):
        check_has_law(choices[1].tolist())
    check_has_law(choices[0].tolist())


def test_where_rounding_leaves_no_residual_the_target_s_law_is_drawn_from():
    """Both laws are the same but for rounding, here of a thousandth: a token that is not kept must come from somewhere."""
    num = 20000
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    law = scores.softmax(-1)
    torch.manual_seed(0)
    tokens, drafted = draw(law.expand(num, -1))[:, None], 1.001 * law.expand(num, 1, -1)
    drawn = DrawnChain(tokens, drafted.gather(2, tokens[..., None]).squeeze(2), drafted)
    choices = keep_or_redraw(scores.expand(num, 1, -1), drawn)
    assert 0 < (choices != drawn.tokens).sum() < num / 100
    assert choices.min() >= 0


@pytest.mark.parametrize("scoring", [{}, {"scoring": DART_SCORING}, {"end_token_id": 3}, {"beam_width": 2, "top_k": 2}])
@pytest.mark.parametrize("level", [0, 1, 2, slice(None)])
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_trees_of_bad_levels_are_trees(bad, level, scoring):
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, level, BAD_ROWS[bad][0]] = BAD_ROWS[bad][1]
    tree = build_tree(logits, budget=8, **scoring)
    for row in range(2):
        parents, depths = tree.parents[row].tolist(), [0, *tree.depths[row].tolist()]
        assert all(parent <= node for node, parent in enumerate(parents))
        assert all(depths[parent] == depths[node + 1] - 1 for node, parent in enumerate(parents))
        assert len({*zip(parents, tree.tokens[row].tolist(), strict=True)}) == tree.num_nodes


def spoiled(drafter, bad: str, positions=slice(1, None)):
    """`drafter`, whose logits are bad at some positions of each draft."""
    draft, draft_static = drafter.draft, drafter.draft_static

    def spoil(logits):
        logits = logits.clone()
        logits[:, positions, BAD_ROWS[bad][0]] = BAD_ROWS[bad][1]
        return logits

    drafter.draft = lambda *args: spoil(draft(*args))
    drafter.draft_static = lambda *args: spoil(draft_static(*args))
    return drafter


LOOPS = {
    "chain": {},
    "tree": {"tree_budget": 8},
    "tree and n-grams": {"tree_budget": 8},
    "stock": {"decode_loop": "stock"},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_drafts_leave_greedy_text_alone(bad, loop):
    target, prompt = tiny_target("llama"), random_prompt(6)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16, "do_sample": False}
    plain = target.generate(prompt, **options)
    drafter = spoiled(make_oracle(tiny_drafter("pard", target), plain[0], rates=[0.9] * 4), bad)
    for name, value in LOOPS[loop].items():
        setattr(drafter.generation_config, name, value)
    drafter.ngram = NgramModel.from_token_stream(plain, vocab_size=64, order=3) if "n-grams" in loop else None
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
    # What is good at a draft's beginning is still made use of.
    assert drafter.last_stats.tau > 1.5


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiled rounds run as they are, in several steps as on an accelerator."""
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    settle(monkeypatch, is_one_step=lambda decoding: False)


CALLS = {
    "chain": ({}, {}),
    "tree": ({"tree_budget": 6}, {}),
    "rejection": ({"verification": "rejection"}, {}),
    "along the path": ({}, {"repetition_penalty": 1.0001}),
    "rejection along the path": ({"verification": "rejection"}, {"repetition_penalty": 1.0001}),
    "compiled": ({}, {"cache_implementation": "static"}),
    "compiled tree": ({"tree_budget": 6}, {"cache_implementation": "static"}),
    "compiled rejection": ({"verification": "rejection"}, {"cache_implementation": "static"}),
    "stock": ({"decode_loop": "stock"}, {}),
}


SURE = {"do_sample": True, "top_k": 1, "max_new_tokens": 16}


def written(target, prompts, **options):
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), **{**SURE, **options})


def lawless_after(target, token: int) -> None:
    """Let the target's scores be NaN wherever it has just read `token`."""

    def spoil(module, args, kwargs, outputs):
        ids = kwargs["input_ids"][:, -outputs.logits.shape[1] :]
        outputs.logits = outputs.logits.masked_fill((ids == token)[..., None], torch.nan)
        return outputs

    target.register_forward_hook(spoil, with_kwargs=True)


def drafter_of(target, texts, name, spoil=None):
    """A drafter that knows most of `texts`, with the settings and options of a call."""
    settings, options = CALLS[name]
    drafter = tiny_drafter("pard", target)
    for setting, value in settings.items():
        setattr(drafter.generation_config, setting, value)
    drafter = make_lasting_oracle(drafter, list(texts), rates=[0.9] * 4)
    return (drafter if spoil is None else spoiled(drafter, *spoil)), options


PROMPTS = torch.cat([random_prompt(6, seed=seed) for seed in range(3)])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_sampling_from_a_target_without_a_law_raises_what_plain_sampling_raises(uncompiled, name, batch):
    if name == "stock" and batch > 1:
        pytest.skip("transformers' own loop takes one sequence")
    target, prompts = tiny_target("llama"), PROMPTS[:batch]
    texts = written(target, prompts)
    first = texts[0, 6:].tolist()
    token = next(t for place, t in enumerate(first) if place > 5 and t not in first[:place])
    drafter, options = drafter_of(target, texts, name)
    assert torch.equal(written(target, prompts, assistant_model=drafter, **options), texts)
    assert drafter.last_stats.tau > 1.5
    lawless_after(target, token)
    with pytest.raises(RuntimeError, match=MESSAGE):
        written(target, prompts)
    with pytest.raises(RuntimeError, match=MESSAGE):
        written(target, prompts, assistant_model=drafter, **options)


# transformers' own loop draws after every drafted token, whether it is accepted or not.
@pytest.mark.parametrize("name", [name for name in CALLS if name != "stock"])
def test_a_target_without_a_law_where_nothing_is_committed_is_no_matter(uncompiled, name):
    target, prompts = tiny_target("llama"), PROMPTS[:1]
    texts = written(target, prompts)
    token = next(t for t in range(64) if t not in texts)
    drafter, options = drafter_of(target, texts, name)
    draft, draft_static = drafter.draft, drafter.draft_static

    def propose(logits):
        logits = logits.clone()
        logits[:, 2:3, token] = 100.0
        return logits

    drafter.draft = lambda *args: propose(draft(*args))
    drafter.draft_static = lambda *args: propose(draft_static(*args))
    lawless_after(target, token)
    assert torch.equal(written(target, prompts, assistant_model=drafter, **options), texts)


@pytest.mark.parametrize("name", [name for name in CALLS if "rejection" not in name])
def test_greedy_text_of_a_target_without_a_law_is_plain_generate_s(uncompiled, name):
    target, prompts = tiny_target("llama"), PROMPTS[:1]
    texts = written(target, prompts, do_sample=False)
    lawless_after(target, int(texts[0, 12]))
    drafter, options = drafter_of(target, texts, name)
    drafted = written(target, prompts, do_sample=False, assistant_model=drafter, **options)
    assert torch.equal(
        drafted, written(target, prompts, do_sample=False, **({} if "cache" in str(options) else options))
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_drafts_kill_no_sampled_call(uncompiled, bad, name):
    target, prompts = tiny_target("llama"), PROMPTS[:1]
    texts = written(target, prompts)
    drafter, options = drafter_of(target, texts, name, spoil=(bad, slice(1, 3)))
    assert torch.equal(written(target, prompts, assistant_model=drafter, **options), texts)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_transformers_own_loop_gets_drafts_with_a_law(bad, do_sample):
    target = tiny_target("llama")
    drafter = spoiled(tiny_drafter("pard", target), bad)
    answer = draft_as_assistant(drafter, PROMPTS[:1], 4, [TemperatureLogitsWarper(0.5)], do_sample=do_sample)
    assert answer.sequences.shape == (1, 10)
    assert all(torch.isfinite(scores.softmax(-1)).all() for scores in answer.scores)
