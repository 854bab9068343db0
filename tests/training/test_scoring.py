"""Positions are scored a chunk at a time: the same values and gradients, and no tensor of all positions and tokens."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from hf_pardraft.training.layouts.base import SupervisedPositions
from hf_pardraft.training.losses.scoring import PositionScorer, kl_divergences, label_log_probs
from hf_pardraft.training.target.head import target_head
from hf_pardraft.training.target.reading import read_target
from tiny_models import tiny_target

POSITIONS, HIDDEN, VOCAB = 63, 2, 20000
FIELDS = ("log_probs", "continuations", "divergences")


def peak_of(step) -> int:
    """The most bytes that tensors made in `step` hold at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def case(dtype=torch.float64, is_frozen=False):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB).to(dtype).requires_grad_(not is_frozen)
    states = torch.randn(POSITIONS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    labels[3] = -1
    continuations = torch.randint(-1, VOCAB, (POSITIONS,), generator=generator)
    target_states = torch.randn(POSITIONS, HIDDEN, generator=generator, dtype=dtype)
    target_head = torch.randn(HIDDEN, VOCAB, generator=generator, dtype=dtype)
    scorer = PositionScorer(
        labels, True, continuations, lambda chunk: target_states[chunk] @ target_head, temperature=1.5
    )
    return head, states, scorer, target_states @ target_head


def gradients(head, states, scored, seed=1, names=FIELDS):
    generator = torch.Generator().manual_seed(seed)
    loss = sum((scored[name] * torch.rand(POSITIONS, generator=generator)).sum() for name in names)
    return torch.autograd.grad(loss, [states, *(weight for weight in head.parameters() if weight.requires_grad)])


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 62, 63, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_size, is_frozen):
    head, states, scorer, target_logits = case(is_frozen=is_frozen)
    scorer.chunk_size = chunk_size
    found = scorer(head, states)
    logits = head(states)
    expected = {
        "log_probs": label_log_probs(logits, scorer.labels, scorer.labels >= 0),
        "continuations": label_log_probs(logits, scorer.continuations, scorer.continuations >= 0),
        "divergences": kl_divergences(logits, target_logits, 1.5),
        "is_right": logits.argmax(-1) == scorer.labels,
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-12)
    for chunked, whole in zip(gradients(head, states, found), gradients(head, states, expected), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("asked", ["log_probs", "divergences", "all"])
def test_the_logits_of_all_positions_are_never_there(asked, is_frozen):
    """Not in one tensor, and not in those of all chunks: what a chunk needs is given back before the next."""
    peaks = {}
    for chunk_size in (1, 4, 100):
        head, states, scorer, _ = case(torch.float32, is_frozen)
        scorer.chunk_size = chunk_size
        scorer.with_log_probs = asked != "divergences"
        if asked != "all":
            scorer.continuations = None
        if asked == "log_probs":
            scorer.target_logits = None
        names = [asked] if asked in FIELDS else FIELDS
        peaks[chunk_size] = peak_of(lambda: gradients(head, states, scorer(head, states), names=names))  # noqa: B023
    logits_of_one, weights = VOCAB * 4, (HIDDEN + 1) * VOCAB * 4
    assert peaks[100] > 2 * POSITIONS * logits_of_one
    for chunk_size in (1, 4):
        # Some copies of a chunk's logits, the weights' gradient of one and of all so far, and for each chunk the state of the
        # random numbers.
        chunks = -(-POSITIONS // chunk_size)
        assert peaks[chunk_size] < 12 * chunk_size * logits_of_one + 3 * weights + 8000 * chunks


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_positions_are_scored_as_such(is_frozen):
    head, states, scorer, _ = case(is_frozen=is_frozen)
    scorer.labels, scorer.continuations = scorer.labels[:0], scorer.continuations[:0]
    scorer.target_logits = None
    scored = scorer(head, states[:0])
    assert all(len(values) == 0 for values in scored.values())
    scored["log_probs"].sum().backward()
    assert not states.grad.any()
    assert is_frozen or not head.weight.grad.any()


class Operations(TorchDispatchMode):
    """How often each operation was done."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(("is_frozen", "products"), [(True, 2), (False, 4)])
def test_a_frozen_heads_logits_are_computed_once(is_frozen, products):
    """A frozen head's chunk has logits and the gradients by its states; one that learns has its logits twice, and weights'
    gradients. The likeliest token is looked for once in either, and never by argmax."""
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(not is_frozen)
    states = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    scorer = PositionScorer(torch.zeros(POSITIONS, dtype=torch.long), chunk_size=9)
    with Operations() as done:
        scorer(head, states)["log_probs"].sum().backward()
    assert done.counts["mm"] == products * 7
    assert done.counts["max"] == 7
    assert done.counts["argmax"] == 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_target_is_asked_again_only_if_its_logits_were_dropped(is_frozen):
    head, states, scorer, target_logits = case(is_frozen=is_frozen)
    asked, scorer.chunk_size = [], 9
    scorer.target_logits = lambda chunk: asked.append(chunk) or target_logits[chunk]
    gradients(head, states, scorer(head, states))
    assert len(asked) == (7 if is_frozen else 14)


def test_a_hit_is_a_label_among_the_ten_likeliest_tokens():
    """hit@10 of arXiv 2601.19278, table 3; asked for without gradients alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 40, generator=generator)
    labels = torch.randint(-1, 40, (500,), generator=generator)
    scorer = PositionScorer(labels, chunk_size=99)
    assert "is_hit" not in scorer(torch.nn.Identity(), logits.clone().requires_grad_())
    with torch.no_grad():
        found = scorer(torch.nn.Identity(), logits)["is_hit"]
    ranked = [sorted(range(40), key=row.__getitem__, reverse=True) for row in logits.tolist()]
    assert found.tolist() == [label in row[:10] for row, label in zip(ranked, labels.tolist(), strict=True)]
    assert 0.2 < found.double().mean() < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_several_likeliest_tokens_the_first_one_counts(dtype):
    """As in greedy decoding. Among bfloat16 logits such ties are common."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (4000, 7), generator=generator).to(dtype)
    labels = torch.randint(0, 7, (4000,), generator=generator)
    top = logits.amax(dim=-1, keepdim=True)
    tied = (logits == top).sum(dim=-1) > 1
    expected = torch.tensor([row.index(max(row)) == label for row, label in zip(logits.tolist(), labels, strict=True)])
    found = PositionScorer(labels, chunk_size=999)(torch.nn.Identity(), logits)
    assert torch.equal(found["is_right"], expected)
    among = (logits.gather(-1, labels[:, None]) == top)[:, 0]
    assert (tied & among & ~expected).sum() > 100


@pytest.mark.parametrize("name", FIELDS)
def test_bfloat16_gradients_of_a_frozen_head_are_rounded_once_more(name):
    """What is kept of it is rounded, and so is what it is multiplied to."""
    head, states, scorer, _ = case(is_frozen=True)
    exact = gradients(head, states, scorer(head, states), names=[name])[0]
    states = states.detach().bfloat16().requires_grad_()
    found = gradients(head.bfloat16(), states, scorer(head, states), names=[name])[0]
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 2**-7 * exact.norm()


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
# Targets that do something after their head, have a bias in it, or are divided in another way.
HEADS = {
    "softcapped": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "multiplied": Cohere2Config(**SMALL, logit_scale=0.25),
    "divided": GraniteConfig(**SMALL, logits_scaling=3.0),
    "biased": PhiConfig(**SMALL),
    "of experts": Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True
    ),
    "nested": OPTConfig(vocab_size=50, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_logits_of_chosen_tokens_are_the_targets_own(name):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(HEADS[name]).eval()
    ids, mask = torch.randint(3, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    heads_seen = []
    handle = target.get_output_embeddings().register_forward_hook(
        lambda _m, _a, output: heads_seen.append(output.shape)
    )
    reading = read_target(target, [] if name == "nested" else [0, 2], ids, mask, with_states=True)
    handle.remove()
    assert heads_seen == [(2, 0, 50)]
    logits = target(ids, attention_mask=mask).logits
    samples, places = mask.nonzero(as_tuple=True)
    found = reading.logits(samples, places)
    torch.testing.assert_close(found, logits[samples, places], rtol=1e-5, atol=1e-5)
    # States that were stored find a head as well.
    stored = reading.states[samples, places]
    torch.testing.assert_close(target_head(target)(stored), found, rtol=0, atol=0)
    # Those of a draft vocabulary alone, of which a plain head reads no other rows.
    tokens = torch.tensor([7, 3, 41])
    torch.testing.assert_close(reading.logits(samples, places, tokens), found[:, tokens], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target_head(target)(stored, tokens), found[:, tokens], rtol=1e-5, atol=1e-5)
    # Looked for once: what is known of a head, each step uses.
    again = read_target(target, [] if name == "nested" else [0, 2], ids, mask, with_states=True)
    assert again.head is reading.head is target_head(target)
    assert reading.logits(samples[:0], places[:0], tokens).shape == (0, 3)
    # Asking for them leaves the target as it was.
    torch.testing.assert_close(target(ids, attention_mask=mask).logits, logits, rtol=0, atol=0)


class BiasedLlama(LlamaForCausalLM):
    """Its logits depend on more than their own rows of the head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return replace(output, logits=output.logits + torch.linspace(-1, 1, 50))


class NormalisedLlama(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return replace(output, logits=output.logits.log_softmax(dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("architecture", [BiasedLlama, NormalisedLlama])
def test_a_head_whose_logits_are_not_its_rows_alone_is_asked_for_all_of_them(architecture):
    target = architecture(LlamaConfig(**SMALL)).eval()
    ids, tokens = torch.randint(3, 50, (1, 9)), torch.tensor([7, 3, 41])
    states = target.model(ids).last_hidden_state[0]
    expected = target(ids).logits[0][:, tokens]
    torch.testing.assert_close(target_head(target)(states, tokens), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_without_taps_or_states_the_target_gives_neither():
    target = tiny_target()
    ids = torch.randint(3, 60, (1, 5))
    reading = read_target(target, [], ids, torch.ones_like(ids))
    assert reading.features is None
    assert reading.states is None


def test_positions_of_one_prefix_make_a_block():
    supervised = SupervisedPositions(
        labels=torch.tensor([7, 8, 9, 7, 5]),
        draft_positions=torch.tensor([1, 1, 2, 1, 3]),
        items=torch.tensor([0, 0, 0, 1, 0]),
        places=torch.tensor([4, 5, 5, 4, 6]),
    )
    assert supervised.prefixes.tolist() == [[0, 4], [0, 5], [1, 4]]
    assert supervised.grid(supervised.labels, 4).tolist() == [[7, 9, 5, 0], [8, 0, 0, 0], [7, 0, 0, 0]]
    with pytest.raises(ValueError, match="drafts 3 tokens ahead"):
        supervised.check_depth(2)


def test_columns_of_a_part_of_the_vocabulary():
    nothing = torch.zeros(0, dtype=torch.long)
    supervised = SupervisedPositions(nothing, nothing, nothing, nothing, torch.tensor([2, 5, 6]), vocab_size=8)
    assert supervised.columns(torch.tensor([5, 2, 0, 7, -1, 6])).tolist() == [1, 0, -1, -1, -1, 2]
    assert supervised.prefixes.shape == (0, 2)
    assert supervised.grid(torch.zeros(0), 3).shape == (0, 3)
