"""The noise of sampling: what torch draws a token with, the same numbers for items that run apart, and drafts made with it."""

import random
import threading
from contextlib import nullcontext

import pytest
import torch

from hf_pardraft.generation.choosing import noise as noises
from hf_pardraft.generation.choosing.choice import coupled_logits, draw_with
from hf_pardraft.generation.choosing.noise import StepNoise
from sampled_cases import BUDGETS, another, assert_plain_text, call, double_target, knowing, seeded, unpadded, untrained
from threads import in_threads
from tiny_models import batch_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [2, 7, 15, 16, 17, 64, 999, 4096, 50257])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_torch_draws_one_of_many_as_the_noise_says(batch, vocab_size):
    """`torch.multinomial(p, 1)` is `(p / q).argmax(-1)`, q being exponential, bit for bit, and so is the state after it."""
    for seed in range(5):
        torch.manual_seed(seed)
        law = (3 * torch.randn(batch, vocab_size)).softmax(-1)
        if seed % 2 and vocab_size > 2:
            law = law.masked_fill(torch.rand(batch, vocab_size) < 0.5, 0.0)
            law[:, 0] += 0.1
        state = torch.get_rng_state()
        drawn = torch.multinomial(law, 1).squeeze(1)
        state_after = torch.get_rng_state()
        torch.set_rng_state(state)
        noise = torch.empty_like(law).exponential_(1)
        assert torch.equal((law / noise).argmax(-1), drawn)
        assert torch.equal(draw_with(law, noise), drawn)
        assert torch.equal(torch.get_rng_state(), state_after)


def plain_noise(batch: int, vocab_size: int, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What plain `generate` draws its tokens with, `(steps, batch, vocab)`, and the state before each step."""
    drawn, states = [], []
    for _ in range(steps):
        states.append(torch.get_rng_state())
        drawn.append(torch.empty(batch, vocab_size).exponential_(1))
    return torch.stack(drawn), states


def walk(noise: StepNoise, expected: torch.Tensor, generator: random.Random, most: int) -> int:
    """Ask for noise as rounds do, items going their own ways and leaving; returns how far apart they were."""
    batch, vocab_size, steps = noise.batch, expected.shape[2], len(expected) - most
    at, live, furthest = [0] * batch, list(range(batch)), 0
    pace = [generator.choice((1, 2, most)) for _ in range(batch)]
    while live:
        count = generator.randint(1, most)
        found = noise.ahead(count, vocab_size)
        for index, item in enumerate(live):
            assert torch.equal(found[index], expected[at[item] : at[item] + count, item])
        counts = [min(count, generator.randint(1, pace[item])) for item in live]
        noise.advance(counts)
        for item, new in zip(live, counts, strict=True):
            at[item] += new
        furthest = max(furthest, max(at[item] for item in live) - min(at[item] for item in live))
        # Others may use the generator between rounds, but not these states.
        kept = [index for index, item in enumerate(live) if at[item] < steps and generator.random() > 0.003]
        if len(kept) < len(live):
            noise.select_items(kept)
            live = [live[index] for index in kept]
    return furthest


@pytest.mark.parametrize("most_bytes", [0, 1 << 12, noises.MOST_BYTES])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_items_get_the_noise_of_their_own_steps_however_little_is_held(monkeypatch, batch, most_bytes):
    monkeypatch.setattr(noises, "MOST_BYTES", most_bytes)
    apart = 0
    for seed in range(6):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        expected, states = plain_noise(batch, 23, 160)
        torch.set_rng_state(state)
        noise = StepNoise(batch, CPU, 7)
        apart = max(apart, walk(noise, expected, random.Random(seed), 7))
        last = max(noise.steps)
        noise.go_to(last)
        assert torch.equal(torch.get_rng_state(), states[last])
    assert apart > 30 or batch == 1


@pytest.mark.parametrize(("batch", "most_bytes"), [(1, 1 << 20), (3, 0), (3, 1 << 14), (3, 1 << 20)])
def test_what_is_held_is_as_little_as_is_said(monkeypatch, batch, most_bytes):
    """The larger of `MOST_BYTES` and a round's own noise, and a state for each step that the items are apart."""
    monkeypatch.setattr(noises, "MOST_BYTES", most_bytes)
    noise, vocab_size, most = StepNoise(batch, CPU, 5), 50, 5
    for _ in range(400):
        noise.ahead(most, vocab_size)
        assert noise.window.nbytes <= max(most_bytes, 4 * most * batch * vocab_size)
        assert len(noise.states) <= max(noise.steps) - min(noise.steps) + most + 1
        noise.advance([most] + [1] * (batch - 1))


@pytest.mark.parametrize("batch", [1, 3])
def test_rounds_that_look_at_no_noise_keep_no_states(batch):
    """Where a processor reads the text, tokens are drawn one by one, and rounds without a draft need nothing ahead."""
    noise = StepNoise(batch, CPU, 5)
    for step in range(300):
        torch.multinomial(torch.ones(batch, 8), 1)
        noise.found_before(step + 1)
        noise.advance([1] * batch)
        assert len(noise.states) <= 2
    found = torch.get_rng_state()
    torch.manual_seed(0)
    noise.go_to(300)
    assert torch.equal(torch.get_rng_state(), found)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("known", [(0,), (1, 3)])
def test_noise_that_is_drawn_again_writes_the_same_text(monkeypatch, known, budget):
    target, batch = double_target(), batch_of(9, 3, 6, 1)
    plain = seeded(target, batch, max_new_tokens=60)
    texts = [
        text if item in known else another(text)
        for item, text in enumerate(unpadded(plain[0], batch["attention_mask"]))
    ]
    drawn = []
    hold = StepNoise._hold
    monkeypatch.setattr(StepNoise, "_hold", lambda self, step: drawn.append(step) or hold(self, step))
    times = []
    for most_bytes in (noises.MOST_BYTES, 0):
        monkeypatch.setattr(noises, "MOST_BYTES", most_bytes)
        drafter = knowing("pard", target, texts, budget, rates=[1.0] * 8, runner_up=0.0)
        assert_plain_text(target, batch, drafter, plain, max_new_tokens=60)
        times.append(len(drawn))
        drawn.clear()
    assert times[0] < 80
    assert times[1] > times[0] + 20


def matches(law: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The probability that two laws `(laws, vocab)` draw the same token with the same noise.

    Token i wins in both where its q is least after scaling by either law, that is with probability
    1 / sum_j max(p_j / p_i, r_j / r_i).
    """
    ratios = torch.maximum(law[:, None, :] / law[:, :, None], other[:, None, :] / other[:, :, None])
    return (1 / ratios.sum(dim=2)).sum(dim=1)


def test_a_coupled_draft_is_accepted_as_often_as_the_theory_says():
    """At least (1 - TV) / (1 + TV), arXiv 2408.07978; and much more often than the drafter's likeliest token."""
    torch.manual_seed(0)
    num_laws, vocab_size, num_draws = 60, 64, 2000
    logits = 2 * torch.randn(num_laws, vocab_size, dtype=torch.float64)
    distances = torch.linspace(0.1, 2.0, num_laws, dtype=torch.float64)[:, None]
    law, draft = logits.softmax(-1), (logits + distances * torch.randn_like(logits)).softmax(-1)
    variation = (law - draft).abs().sum(dim=1) / 2
    assert variation.min() < 0.1
    assert variation.max() > 0.5
    expected = matches(law, draft)
    assert (expected >= (1 - variation) / (1 + variation) - 1e-9).all()
    noise = torch.empty(num_draws, num_laws, vocab_size, dtype=torch.float64).exponential_()
    chosen = draw_with(law.expand_as(noise), noise)
    drafted, _ = coupled_logits(draft.log().expand_as(noise), noise)
    measured = (drafted.argmax(-1) == chosen).double().mean(dim=0)
    error = (expected * (1 - expected) / num_draws).sqrt()
    assert ((measured - expected).abs() < 5 * error).all()
    likeliest = (draft.argmax(-1) == chosen).double().mean(dim=0)
    assert measured.mean() > 2 * likeliest.mean()
    # A tree's candidates are ranked by it, too.
    among_four = (drafted.topk(4).indices == chosen[..., None]).any(-1).double().mean()
    likeliest_four = (draft.topk(4).indices == chosen[..., None]).any(-1).double().mean()
    assert among_four > measured.mean() + 0.1
    assert among_four > 1.3 * likeliest_four


@pytest.mark.parametrize("law", [{}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.5, "top_k": 20}])
def test_a_chain_of_the_targets_own_laws_is_always_right(law):
    """Whatever is drawn: its laws go through the same warpers, and its drafts are drawn with the same noise."""
    target, batch = double_target(), batch_of(6, 4)
    plain = seeded(target, batch, **law)
    texts = unpadded(plain[0], batch["attention_mask"])
    drafter = knowing("pard", target, texts, 0)

    def draft(context, state, depth):
        """The target's own laws along the text that it is going to write."""
        rows = []
        for item, anchor in zip(state.oracle_items, context.new_positions[:, -1].tolist(), strict=True):
            logits = target(texts[item][None]).logits[0]
            rows.append(logits[torch.arange(anchor, anchor + depth).clamp(max=len(logits) - 1)])
        return torch.stack(rows)

    drafter.draft = draft
    assert_plain_text(target, batch, drafter, plain, **law)
    # The prompts are read in a round of their own.
    assert drafter.last_stats.rounds == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_part_in_the_noise(dtype):
    expected, _ = plain_noise(2, 64, 3)
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    expected, _ = plain_noise(2, 64, 3)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        found = StepNoise(2, CPU, 3).ahead(3, 64)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected.transpose(0, 1))


@pytest.fixture
def after_another_call():
    """What a function returns in this thread while, in another, a call has drawn two steps ahead, and when that one has ended."""

    def run(found, then_ends):
        begun, over = threading.Event(), threading.Event()

        def other_call():
            noise = StepNoise(1, CPU, 3)
            noise.ahead(2, 8)
            begun.set()
            over.wait()
            then_ends(noise)

        other = threading.Thread(target=other_call)
        other.start()
        begun.wait()
        during = found()
        over.set()
        other.join()
        return during, found()

    return run


def test_a_call_beside_one_in_another_thread_draws_other_numbers(after_another_call):
    """Else both would write the same text. Neither disturbs the other; and once that has ended, the generator is what it was."""
    torch.manual_seed(0)
    expected, _ = plain_noise(1, 8, 4)
    torch.manual_seed(0)

    def found():
        noise = StepNoise(1, CPU, 3)
        drawn = noise.ahead(2, 8)
        noise.draw(torch.ones(1, 8), 0)
        noise.close()
        return drawn

    during, after = after_another_call(found, lambda noise: (noise.go_to(1), noise.close()))
    assert not any(torch.equal(during[:, 0], each) for each in expected)
    assert torch.equal(after, expected[1:3].transpose(0, 1))


def test_a_seed_counts_beside_a_call_in_another_thread(after_another_call):
    torch.manual_seed(5)
    expected, _ = plain_noise(1, 8, 2)
    torch.manual_seed(0)

    def found():
        torch.manual_seed(5)
        noise = StepNoise(1, CPU, 3)
        drawn = noise.ahead(2, 8)
        noise.close()
        return drawn

    for drawn in after_another_call(found, StepNoise.close):
        assert torch.equal(drawn, expected.transpose(0, 1))


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}])
def test_samples_that_are_written_in_threads_at_once_differ(options):
    target, batch = double_target(), batch_of(6)
    drafter, start = untrained("pard", target), threading.Barrier(4)
    drafter.generation_config.draft_schedule = "fixed"
    torch.manual_seed(0)
    texts = in_threads(4, lambda: start.wait() >= 0 and call(target, batch, assistant_model=drafter, **options))
    assert len({tuple(text[0].tolist()) for text in texts}) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_call_torchs_generator_is_everybodys_again(fails):
    target, batch = double_target(), batch_of(6)

    def interrupted(*_):
        raise InterruptedError

    before = set(noises._calls)
    hook = target.register_forward_hook(interrupted) if fails else None
    with pytest.raises(InterruptedError) if fails else nullcontext():
        call(target, batch, assistant_model=untrained("pard", target))
    if hook:
        hook.remove()
    assert set(noises._calls) <= before


def test_rounds_may_be_as_deep_as_drafts_may_be():
    torch.manual_seed(0)
    expected, _ = plain_noise(1, 8, 4097)
    torch.manual_seed(0)
    assert torch.equal(StepNoise(1, CPU, 4097).ahead(4097, 8), expected.transpose(0, 1))
