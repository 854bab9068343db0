"""What is not drawn as plain `generate` draws it follows the target's exact law: chi-square over every possible text."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chi2
from transformers import set_seed
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_pardraft import DartDrafter
from hf_pardraft.generation.choosing.choice import draw_with
from hf_pardraft.generation.choosing.noise import StepNoise
from hf_pardraft.generation.tree.verify import accept
from tiny_models import make_oracle, published_tree, tiny_drafter, tiny_target

VOCAB_SIZE = 5
NEW_TOKENS = 3
NUM_SAMPLES = 3000
# Rows of a batch go their own ways, so they are as independent as calls.
BATCH = 500
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


def sampled_counts(target, drafter, options, at_once=BATCH, num_samples=NUM_SAMPLES) -> dict[tuple[int, ...], int]:
    counts = dict.fromkeys(product(range(VOCAB_SIZE), repeat=NEW_TOKENS), 0)
    set_seed(0)
    for _ in range(num_samples // at_once):
        out = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=at_once,
            assistant_model=drafter,
            **options,
        )
        for text in out[:, PROMPT.shape[1] :].tolist():
            counts[tuple(text)] += 1
    return counts


def p_value(counts: dict, law: dict) -> float:
    """Of Pearson's chi-square test, texts expected less than five times pooled; a text of probability 0 gives 0."""
    if any(counts[text] for text, probability in law.items() if probability == 0):
        return 0.0
    num_samples = sum(counts.values())
    statistic, cells, pooled_count, pooled_expected = 0.0, 0, 0, 0.0
    for text, probability in law.items():
        expected = probability * num_samples
        if expected < 5:
            pooled_count, pooled_expected = pooled_count + counts[text], pooled_expected + expected
            continue
        statistic, cells = statistic + (counts[text] - expected) ** 2 / expected, cells + 1
    if pooled_expected > 0:
        statistic, cells = statistic + (pooled_count - pooled_expected) ** 2 / pooled_expected, cells + 1
    # A certainty, which the counts of the impossible have already confirmed, leaves nothing to test.
    return float(chi2.sf(statistic, cells - 1)) if cells > 1 else 1.0


def rejecting(kind, target, **settings):
    """An untrained drafter, whose law is far from a certainty, and so is what becomes of its drafts."""
    drafter = tiny_drafter(kind, target, depth=3)
    for name, value in {"verification": "rejection", **settings}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_rejection_sampling_has_the_target_law(target, kind, setting):
    options, warpers = SETTINGS[setting]
    counts = sampled_counts(target, rejecting(kind, target), options)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


@pytest.mark.parametrize("kind", ["dflare", "dart", "pard2"])
def test_other_drafters_have_it_too(target, kind):
    options, warpers = SETTINGS["temperature"]
    counts = sampled_counts(target, rejecting(kind, target), options)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


def test_a_drafter_that_knows_some_of_the_tokens_has_it(target):
    """What it can't draft has to come from the target, as often as the target would write it."""
    options, warpers = SETTINGS["top_p"]
    drafter = DartDrafter.for_target(target, draft_token_ids=[0, 2, 3], draft_length=2)
    drafter.generation_config.verification = "rejection"
    counts = sampled_counts(target, drafter, options)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


def test_one_sequence_at_a_time_has_it_too(target):
    options, warpers = SETTINGS["temperature"]
    counts = sampled_counts(target, rejecting("pard", target), options, at_once=1, num_samples=600)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


def test_the_law_holds_behind_processors_that_read_the_text(target):
    options = {"repetition_penalty": 1.8, "top_k": 0}
    law = exact_law(target, [RepetitionPenaltyLogitsProcessor(1.8)])
    assert p_value(sampled_counts(target, rejecting("pard", target), options), law) > SIGNIFICANCE


def test_the_stock_loop_has_the_target_law_too(target):
    """It draws once for each drafted token, in transformers' own way. The drafter is right half of the time."""
    options, warpers = SETTINGS["temperature"]
    greedy = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, max_new_tokens=NEW_TOKENS)
    drafter = make_oracle(tiny_drafter("pard", target, depth=3), [greedy[0]], rates=[0.7, 0.7, 0.7], runner_up=0.8)
    drafter.generation_config.decode_loop = "stock"
    counts = sampled_counts(target, drafter, options, at_once=1, num_samples=600)
    assert p_value(counts, exact_law(target, warpers)) > SIGNIFICANCE


def test_a_forgotten_residual_is_noticed(target, monkeypatch):
    from hf_pardraft.generation.choosing import choice as selection

    def wrong(scores, drawn):
        law = scores.softmax(dim=-1)
        odds = law.gather(2, drawn.tokens[..., None]) / drawn.law.gather(2, drawn.tokens[..., None])
        redrawn = torch.multinomial(law.flatten(0, 1), 1).view(drawn.tokens.shape)
        return torch.where((torch.rand_like(odds) < odds).squeeze(-1), drawn.tokens, redrawn)

    monkeypatch.setattr(selection, "keep_or_redraw", wrong)
    options, warpers = SETTINGS["temperature"]
    counts = sampled_counts(target, rejecting("pard", target), options)
    assert p_value(counts, exact_law(target, warpers)) < SIGNIFICANCE


FIXTURES = Path(__file__).parent.parent / "fixtures/trees"
PUBLISHED = json.loads((FIXTURES / "sampling_law.json").read_text())
LAWS = load_file(FIXTURES / "sampling_law.safetensors")
RUNS = 20000
SHAPE = ("tokens", "parents", "depths", "ancestors")


def law_behind(law: str, prefixes: torch.LongTensor) -> torch.Tensor:
    """The published next-token probabilities `(rows, vocab)` behind `prefixes (rows, length)`, which count up to 4 tokens."""
    prefixes = prefixes[:, -4:]
    return LAWS[f"{law}.p{prefixes.shape[1]}"][tuple(prefixes.T)].expand(len(prefixes), -1)


def rounds_on(tree, law: str, prefixes: torch.LongTensor) -> tuple[list[int], list[list[int]]]:
    """One round behind each of `prefixes (rows, length)`, all with the same tree: accepted nodes and committed tokens."""
    rows = len(prefixes)
    tree = type(tree)(*(getattr(tree, name).expand(rows, *[-1] * (getattr(tree, name).ndim - 1)) for name in SHAPE))
    texts = [prefixes]
    for slot in range(1, tree.num_nodes + 1):
        parent = texts[int(tree.parents[0, slot - 1])]
        texts.append(torch.cat([parent, tree.tokens[:, slot - 1 : slot]], dim=1))
    logits = torch.stack([law_behind(law, text) for text in texts], dim=1).log()
    noise = StepNoise(rows, logits.device, 1 + int(tree.depths.max())).ahead(
        1 + int(tree.depths.max()), logits.shape[2]
    )
    choices = draw_with(logits.softmax(-1), noise[torch.arange(rows)[:, None], tree.slot_depths])
    acceptance = accept(tree, choices)
    num_accepted = acceptance.num_accepted.tolist()
    return num_accepted, [row[: n + 1] for row, n in zip(acceptance.tokens.tolist(), num_accepted, strict=True)]


@pytest.mark.parametrize("law", PUBLISHED["laws"])
@pytest.mark.parametrize("case", PUBLISHED["trees"], ids=lambda case: case["name"])
def test_a_round_on_a_published_tree_has_the_published_law(case, law):
    set_seed(0)
    tree, _ = published_tree(case["parents"], case["tokens"])
    expected = {tuple(tokens): probability for tokens, probability in case["laws"][law]["one_round"]}
    counts = dict.fromkeys(expected, 0)
    num_accepted, committed = rounds_on(tree, law, torch.zeros(RUNS, 0, dtype=torch.long))
    for tokens in committed:
        counts[tuple(tokens)] += 1
    assert p_value(counts, expected) > SIGNIFICANCE
    pmf = dict(enumerate(case["laws"][law]["accepted_pmf"]))
    assert p_value({n: num_accepted.count(n) for n in pmf}, pmf) > SIGNIFICANCE
