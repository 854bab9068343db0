"""Sampling with a drafter follows the target's exact law: chi-square over every possible text."""

from itertools import product

import pytest
import torch
from scipy.stats import chi2
from transformers import set_seed
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tiny_models import make_oracle, tiny_drafter, tiny_target

VOCAB_SIZE = 5
NEW_TOKENS = 3
NUM_SAMPLES = 1000
# A right sampler fails one seed in a million; a bonus token drawn from the wrong row gives p < 1e-20 (see the last test).
SIGNIFICANCE = 1e-6

SETTINGS = {
    "temperature": ({"temperature": 0.7, "top_k": 0}, [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.8, "top_k": 0}, [TopPLogitsWarper(0.8)]),
}


@pytest.fixture(scope="module")
def target():
    # Small weights: a law with many likely texts tests more than a peaked one.
    return tiny_target("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=3, initializer_range=0.3)


PROMPT = torch.tensor([[3, 2, 3]])


@torch.no_grad()
def exact_law(target, warpers) -> dict[tuple[int, ...], float]:
    """The probability of every text of NEW_TOKENS tokens, by the chain rule."""
    law = {(): 1.0}
    processors = LogitsProcessorList(warpers)
    for _ in range(NEW_TOKENS):
        longer = {}
        for text, probability in law.items():
            ids = torch.cat([PROMPT, torch.tensor([list(text)], dtype=torch.long)], dim=1)
            law_here = processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0].tolist()
            for token in range(VOCAB_SIZE):
                longer[(*text, token)] = probability * law_here[token]
        law = longer
    assert abs(sum(law.values()) - 1) < 1e-5
    return law


def sampled_counts(target, drafter, options) -> dict[tuple[int, ...], int]:
    counts = dict.fromkeys(product(range(VOCAB_SIZE), repeat=NEW_TOKENS), 0)
    set_seed(0)
    for _ in range(NUM_SAMPLES):
        out = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            assistant_model=drafter,
            **options,
        )
        counts[tuple(out[0, PROMPT.shape[1] :].tolist())] += 1
    return counts


def p_value(counts: dict, law: dict) -> float:
    """Of Pearson's chi-square test, texts expected less than five times pooled; a text of probability 0 gives 0."""
    if any(counts[text] for text, probability in law.items() if probability == 0):
        return 0.0
    statistic, cells, pooled_count, pooled_expected = 0.0, 0, 0, 0.0
    for text, probability in law.items():
        expected = probability * NUM_SAMPLES
        if expected < 5:
            pooled_count, pooled_expected = pooled_count + counts[text], pooled_expected + expected
            continue
        statistic, cells = statistic + (counts[text] - expected) ** 2 / expected, cells + 1
    if pooled_expected > 0:
        statistic, cells = statistic + (pooled_count - pooled_expected) ** 2 / pooled_expected, cells + 1
    return float(chi2.sf(statistic, cells - 1))


def drafter_for(kind, target):
    """Right half of the time about one fixed likely text, so that acceptance and rejection both happen often."""
    greedy = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, max_new_tokens=NEW_TOKENS)
    return make_oracle(tiny_drafter(kind, target, depth=3), greedy[0], rates=[0.7, 0.7, 0.7])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_sampled_chain_decoding_has_the_target_law(target, kind, setting):
    options, warpers = SETTINGS[setting]
    drafter = drafter_for(kind, target)
    counts = sampled_counts(target, drafter, options)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


def test_the_stock_loop_has_the_target_law_too(target):
    options, warpers = SETTINGS["temperature"]
    drafter = drafter_for("pard", target)
    drafter.generation_config.decode_loop = "stock"
    assert p_value(sampled_counts(target, drafter, options), exact_law(target, warpers)) > SIGNIFICANCE


@pytest.mark.parametrize("planted", ["bonus from the root's row", "drafts always accepted", "bonus is the argmax"])
def test_a_planted_error_is_noticed(target, monkeypatch, planted):
    from hf_pardraft.generation import decode

    right = decode.accept

    def wrong(tree, choices):
        choices = choices.clone()
        if planted == "bonus from the root's row":
            choices[:, 1:] = choices[:, :1]
        elif planted == "drafts always accepted":
            choices[:, 0] = tree.tokens[:, 0]
        else:
            choices[:, -1] = tree.tokens[:, -1]
        return right(tree, choices)

    monkeypatch.setattr(decode, "accept", wrong)
    options, warpers = SETTINGS["temperature"]
    counts = sampled_counts(target, drafter_for("pard", target), options)
    assert p_value(counts, exact_law(target, warpers)) < SIGNIFICANCE
