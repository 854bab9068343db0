"""Sampled batches: each token is drawn with the noise that plain `generate` draws it with, however far apart the items are."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pairwise import every_two_meet
from sampled_cases import (
    BUDGETS,
    KINDS,
    another,
    assert_every_drafter_writes_it,
    assert_plain_text,
    double_target,
    knowing,
    seeded,
    unpadded,
)
from tiny_models import batch_of

LENGTHS = (9, 3, 6, 1)
LONG = 60


def half_knowing(kind, target, texts, known, budget=0, depth=8, **settings):
    """A drafter that knows the texts of some items, and is always wrong about the others."""
    texts = [text if item in known else another(text) for item, text in enumerate(texts)]
    return knowing(kind, target, texts, budget, rates=[1.0] * depth, runner_up=0.0, **settings)


def lengths_after_each_round(stats, batch: int) -> list[list[int]]:
    """How much each item has got after each of the rounds in which all take part."""
    counts, lengths = stats.tokens_per_round, [[0] * batch]
    for start in range(0, len(counts) - batch, batch):
        lengths.append([before + new for before, new in zip(lengths[-1], counts[start : start + batch], strict=True)])
    return lengths


@pytest.mark.parametrize(("kind", "budget", "known"), every_two_meet(KINDS, BUDGETS, [(0,), (1, 3), (0, 1, 2)]))
def test_items_that_accept_everything_and_items_that_accept_nothing(kind, budget, known):
    """The first are over long before the others, which must get the noise of steps that are long past."""
    target, batch = double_target(), batch_of(*LENGTHS)
    plain = seeded(target, batch, max_new_tokens=40)
    drafter = half_knowing(kind, target, unpadded(plain[0], batch["attention_mask"]), known, budget)
    assert_plain_text(target, batch, drafter, plain, max_new_tokens=40)
    distances = [max(lengths) - min(lengths) for lengths in lengths_after_each_round(drafter.last_stats, 4)[:4]]
    assert max(distances) > 12


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("several", [2, 3])
def test_several_sequences_of_each_prompt(several, budget):
    target = double_target("qwen3")
    for lengths in ((6,), (2, 5)):
        batch = batch_of(*lengths)
        assert_every_drafter_writes_it(target, batch, "dflash", budget, num_return_sequences=several)
        texts = seeded(target, batch, num_return_sequences=several)[0]
        assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_items_end_at_very_different_times(kind, budget):
    """Plain `generate` draws for an item that is over as for the others, until the last one is over."""
    target, batch = double_target(), batch_of(*LENGTHS)
    texts = seeded(target, batch, max_new_tokens=LONG)[0][:, 9:]
    for places in ([2], [2, 30], [1, 5, 40, 3]):
        ends = [int(text[place]) for text, place in zip(texts, places, strict=False)]
        options = {"max_new_tokens": LONG, "eos_token_id": ends, "pad_token_id": 0}
        plain = seeded(target, batch, **options)
        is_end = torch.isin(plain[0][:, 9:], torch.tensor(ends))
        ended_after = is_end.cumsum(dim=1).eq(0).sum(dim=1)
        assert ended_after.max() > ended_after.min() + 4
        for known in ((0, 1, 2, 3), (int(ended_after.argmax()),), (int(ended_after.argmin()),), ()):
            drafter = half_knowing(kind, target, unpadded(plain[0], batch["attention_mask"]), known, budget)
            assert_plain_text(target, batch, drafter, plain, **options)


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_drawn_next_follows_the_longest_text(budget):
    """The generator has gone as many steps as the longest text has new tokens, not as the longest draft had."""
    target, batch = double_target(), batch_of(4, 7)
    texts = seeded(target, batch, max_new_tokens=LONG)[0][:, 7:]
    for place in (0, 1, 6, 17):
        options = {"max_new_tokens": LONG, "eos_token_id": [*texts[:, place].tolist()], "pad_token_id": 0}
        plain = seeded(target, batch, **options)
        assert plain[0].shape[1] <= 7 + place + 1
        drafter = half_knowing("dflash", target, unpadded(plain[0], batch["attention_mask"]), (0, 1), budget)
        assert_plain_text(target, batch, drafter, plain, **options)


@pytest.mark.parametrize("budget", BUDGETS)
def test_without_an_end_of_text_items_that_are_stopped_go_on_as_in_plain_generate(budget):
    target, batch = double_target(), batch_of(9, 9, 9)
    texts = seeded(target, batch, max_new_tokens=40)[0][:, 9:]
    ends = [int(text[place]) for text, place in zip(texts, (3, 25, 12), strict=True)]

    def criterion(input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, 9:], torch.tensor(ends)).any(dim=1)

    options = {"stopping_criteria": [criterion], "max_new_tokens": 40}
    plain = seeded(target, batch, **options)
    for known in ((0,), (1,), (0, 1, 2)):
        drafter = half_knowing("pard", target, unpadded(plain[0], batch["attention_mask"]), known, budget)
        assert_plain_text(target, batch, drafter, plain, **options)


@pytest.mark.parametrize("budget", BUDGETS)
def test_criteria_of_transformers_that_stop_items_without_an_end_of_text(tiny_family, budget):
    """Stop strings look at one item at a time, so items run apart; and what is over is written on."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target").double()
    batch = dict(tokenizer(["def add(a, b):", "class Point:", "x"], return_tensors="pt", padding=True))
    length = batch["input_ids"].shape[1]
    free = {"eos_token_id": None, "max_new_tokens": 30, "pad_token_id": 0}
    texts = seeded(target, batch, **free)[0][:, length:]
    stops = {"stop_strings": [tokenizer.decode(texts[item, place]) for item, place in ((0, 4), (1, 20), (2, 12))]}
    for options in ({**free, **stops}, {"max_new_tokens": 30, **stops}):
        options["tokenizer"] = tokenizer
        plain = seeded(target, batch, **options)
        known = unpadded(plain[0], batch["attention_mask"])
        drafter = knowing("pard", target, known, budget)
        assert_plain_text(target, batch, drafter, plain, **options)
        assert plain[0].shape[1] - length < 30


def test_a_batch_is_not_its_items_one_by_one():
    """Noise is drawn for the whole batch: an item's text depends on its place, as in plain `generate`."""
    target, batch = double_target(), batch_of(6, 6)
    drafter = knowing("pard", target, unpadded(seeded(target, batch)[0], batch["attention_mask"]))
    together = seeded(target, batch, assistant_model=drafter)[0]
    one = {name: value[1:] for name, value in batch.items()}
    alone = seeded(target, one, assistant_model=knowing("pard", target, [together[1]]))[0]
    assert torch.equal(alone, seeded(target, one)[0])
    assert not torch.equal(alone[0], together[1])
