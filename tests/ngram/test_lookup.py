"""Looking up a whole level of a tree finds what a loop over its prefixes finds."""

import numpy as np
import pytest
import torch

from hf_pardraft import NgramModel
from hf_pardraft.generation.tree.scoring import WalkByCalls
from hf_pardraft.ngram.lookup import SMOOTHINGS
from ngram_cases import counted, random_documents


def loop_frequencies(counts, context, token, length, num_tokens):
    """The count of a context's last `length` tokens, and the share of `token` after them."""
    suffix = tuple(context[len(context) - length :])
    seen = counts[suffix] if length else num_tokens
    return seen, counts[(*suffix, token)] / seen if seen else 0.0


def loop_probability(smoothing, weight, counts, context, token, order, num_tokens):
    found = [
        loop_frequencies(counts, context, token, length, num_tokens)
        for length in range(min(order - 1, len(context)) + 1)
    ]
    if smoothing == "longest_match":
        return next((share for _, share in reversed(found[1:]) if share), 0.0)
    if smoothing == "stupid_backoff":
        return next((share * weight**lost for lost, (_, share) in enumerate(reversed(found)) if share), 0.0)
    probability = found[0][1]
    for seen, share in found[1:]:
        probability = weight * share + (1 - weight) * probability if seen else probability
    return probability


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [2, 3, 5])
def test_a_whole_level_is_looked_up_as_one_by_one(smoothing, order):
    documents = random_documents(num_documents=80)
    counts, num_tokens = counted(documents, order), sum(map(len, documents))
    model = NgramModel.from_token_stream(documents, vocab_size=12, order=order)
    generator = torch.Generator().manual_seed(order)
    for weight, length in ((None, 6), (0.25, 1), (None, 0)):
        level = model.smoothed(smoothing, weight)
        used = SMOOTHINGS[smoothing].default_weight if weight is None else weight
        # Some tokens are beyond the vocabulary, as a target's padding is.
        contexts = torch.randint(0, 14, (2, 7, length), generator=generator)
        candidates = torch.randint(0, 14, (2, 9), generator=generator)
        found = level(contexts, candidates)
        assert found.shape == (2, 7, 9)
        expected = [
            [
                [
                    loop_probability(smoothing, used, counts, context, token, order, num_tokens)
                    for token in candidates[item].tolist()
                ]
                for context in contexts[item].tolist()
            ]
            for item in range(2)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_interpolation_sums_to_one():
    documents = [np.random.default_rng(3).integers(0, 6, 4000)]
    model = NgramModel.from_token_stream(documents, vocab_size=6).smoothed("interpolated")
    contexts = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    total = model(contexts, torch.arange(6)).sum(dim=-1)
    # The document's last two tokens were seen once more than anything after them.
    torch.testing.assert_close(total, torch.ones(36), rtol=0, atol=0.02)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_walk_finds_what_whole_prefixes_do(order, smoothing, length):
    documents = random_documents(num_documents=80)
    model = NgramModel.from_token_stream(documents, vocab_size=12, order=order).smoothed(smoothing)
    generator = torch.Generator().manual_seed(order)
    context = torch.randint(0, 12, (3, length), generator=generator)
    # Some tokens are beyond the vocabulary, as a target's padding is.
    candidates = torch.randint(0, 14, (3, 6, 5), generator=generator)
    walk, whole = model.walk(context, candidates), WalkByCalls(model, context, candidates)
    num_prefixes = 1
    for level in range(6):
        # A level need not be asked for.
        if level != 2:
            assert torch.equal(walk.probabilities(), whole.probabilities())
        extensions = torch.randint(0, num_prefixes * 5, (3, 4 + level), generator=generator)
        num_prefixes = 4 + level
        walk.step(extensions)
        whole.step(extensions)
