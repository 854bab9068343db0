"""Trees with a continuity model leave the text as it is, for every drafter; and the model can be set, saved and swapped."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from hf_pardraft import AutoDrafter, NgramModel
from hf_pardraft.generation import tree_search as search
from hf_pardraft.generation.tree.scoring import DART_SCORING
from hf_pardraft.generation.tree.token_tree import build_tree
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target
from tiny_tokenizers import tiny_tokenizer

LONGEST = 24


def greedy(target, prompt, **options):
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)


def tree_drafter(kind, target, depth=5, **settings):
    drafter = tiny_drafter(kind, target, depth=depth)
    for name, value in {"tree_budget": 14, **settings}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def ngram_of(*texts, vocab_size=64, **options):
    return NgramModel.from_token_stream(list(texts), vocab_size=vocab_size, **options)


@pytest.mark.parametrize("kind", ["dflare", "dart", "pard2"])
def test_it_does_with_every_other_drafter(kind):
    target, prompt = tiny_target("qwen3"), random_prompt(2)
    expected = greedy(target, prompt, max_new_tokens=LONGEST)
    drafter = make_oracle(tree_drafter(kind, target), expected[0], [0.6] * 5, runner_up=0.8)
    drafter.ngram = ngram_of(expected[0].flip(0), expected[0])
    assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST), expected)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("kind", ["pard", "dflash"])
@pytest.mark.parametrize("settings", [{}, {"tree_budget": 0}, {"ngram_first_level": 0, "tree_scoring": "probability"}])
@pytest.mark.parametrize("order", [2, 5])
def test_an_ngram_model_leaves_the_text_as_it_is(kind, settings, order):
    target, prompt = tiny_target("llama"), random_prompt(2)
    expected = greedy(target, prompt, max_new_tokens=LONGEST)
    untrained = tree_drafter(kind, target, **settings)
    oracle = make_oracle(tree_drafter(kind, target, **settings), expected[0], [0.6] * 5, runner_up=0.8)
    for drafter in (untrained, oracle):
        drafter.ngram = ngram_of(expected[0].flip(0), expected[0], order=order)
        assert torch.equal(greedy(target, prompt, assistant_model=drafter, max_new_tokens=LONGEST), expected)
    assert oracle.last_stats.tau > 1.5


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_rows_of_a_batch_have_contexts_of_their_own(kind):
    target = tiny_target("qwen3")
    prompts = torch.cat(
        [torch.nn.functional.pad(random_prompt(length, length), (9 - length, 0)) for length in (1, 5, 9)]
    )
    mask = (prompts != 0).long()
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": LONGEST}
    expected = target.generate(prompts, **options)
    texts = [
        row[keep == 1] for row, keep in zip(expected, torch.nn.functional.pad(mask, (0, LONGEST), value=1), strict=True)
    ]
    taus = []
    for ngram in (None, ngram_of(*texts)):
        drafter = make_oracle(tree_drafter(kind, target, tree_budget=6), texts, [0.3] * 5, runner_up=1.0)
        drafter.ngram = ngram
        assert torch.equal(target.generate(prompts, assistant_model=drafter, **options), expected)
        taus.append(drafter.last_stats.tau)
    # The model knows which of two likely tokens goes on from the one before.
    assert taus[1] > 1.15 * taus[0]


def test_a_model_in_the_settings_is_loaded_saved_and_overridden(tmp_path):
    target, prompt = tiny_target("llama"), random_prompt(5)
    expected = greedy(target, prompt, max_new_tokens=64)
    ngram_of(expected[0]).save_pretrained(tmp_path / "good")
    # What the oracle says where it is wrong.
    wrong = [[before, (token + 1) % 64] for before, token in itertools.pairwise(expected[0].tolist())]
    ngram_of(*wrong).save_pretrained(tmp_path / "bad")
    tree_drafter("dflash", target, tree_budget=5, ngram_model=str(tmp_path / "good")).save_pretrained(
        tmp_path / "drafter"
    )

    def tau(**settings):
        drafter = make_oracle(AutoDrafter.from_pretrained(tmp_path / "drafter"), expected[0], [0.3] * 5, runner_up=1.0)
        config = GenerationConfig(max_new_tokens=64, do_sample=False, tree_scoring="probability", **settings)
        mask = torch.ones_like(prompt)
        out = target.generate(prompt, attention_mask=mask, assistant_model=drafter, generation_config=config)
        assert torch.equal(out, expected)
        return drafter.last_stats.tau

    plain = tau(ngram_weight=0.0)
    assert plain == tau(ngram_weight=0)
    assert tau() > 1.15 * plain
    assert tau(ngram_weight=2.0) > 1.15 * plain
    assert tau(ngram_model=str(tmp_path / "bad")) < plain
    assert tau(ngram_smoothing="interpolated") > plain
    assert tau(tree_budget=0) < plain


def test_what_the_settings_name_goes_before_what_the_drafter_holds(tmp_path):
    target, prompt = tiny_target("llama"), random_prompt(5)
    drafter = tree_drafter("pard", target)
    seen = []

    class Noted(NgramModel):
        def walk(self, context, candidates):
            seen.append((context.shape, candidates.shape))
            return super().walk(context, candidates)

    model = ngram_of([1, 2, 3])
    drafter.ngram = Noted(model.info, model.table)
    greedy(target, prompt, assistant_model=drafter, max_new_tokens=8)
    # One walk a tree, behind all of the text that matters, with the candidates of all levels.
    assert len(seen) == drafter.last_stats.drafted_per_round.count(14)
    assert {context for context, _ in seen} == {(1, 2)}
    assert {(batch, k) for _, (batch, _, k) in seen} == {(1, 25)}
    seen.clear()
    model.save_pretrained(tmp_path)
    drafter.generation_config.ngram_model = str(tmp_path)
    greedy(target, prompt, assistant_model=drafter, max_new_tokens=8)
    assert not seen


def test_every_option_of_a_tree_can_be_given_to_a_call(monkeypatch):
    target, prompt = tiny_target("llama"), random_prompt(5)
    drafter, searches = tree_drafter("dflash", target, tree_budget=5), []
    drafter.ngram = ngram_of([1, 2, 3])

    def noted(*args, **kwargs):
        searches.append(kwargs)
        return build_tree(*args, **kwargs)

    monkeypatch.setattr(search, "build_tree", noted)

    def searched(**settings):
        searches.clear()
        config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=3, **settings)
        mask = torch.ones_like(prompt)
        target.generate(prompt, attention_mask=mask, assistant_model=drafter, generation_config=config)
        # The last rounds draft less than a tree holds.
        options = searches[0]
        widths = tuple(options[name] for name in ("budget", "beam_width", "top_k"))
        return widths, options["scoring"], options["end_rule"], options["ngram"].smoothing

    defaults = ((5, 20, 25), DART_SCORING, "stop", "longest_match")
    assert searched() == defaults
    assert searched(tree_budget=9, tree_beam_width=4, tree_top_k=6)[0] == (9, 4, 6)
    assert searched(ngram_weight=0.25)[1] == replace(DART_SCORING, ngram_weight=0.25)
    assert searched(ngram_first_level=0)[1] == replace(DART_SCORING, first_ngram_level=0)
    scoring = searched(tree_scoring="probability")[1]
    assert (scoring.logit_decay, scoring.level_exponent, scoring.ngram_weight) == (1.0, 0.0, 0.5)
    assert searched(tree_end_rule="last")[2] == "last"
    assert searched(ngram_smoothing="stupid_backoff")[3] == "stupid_backoff"
    assert searched() == defaults


def test_a_named_model_is_loaded_once(tmp_path, monkeypatch):
    target, prompt = tiny_target("llama"), random_prompt(5)
    ngram_of([1, 2, 3]).save_pretrained(tmp_path)
    drafter, loads = tree_drafter("pard", target, ngram_model=str(tmp_path)), []
    load = NgramModel.from_pretrained
    monkeypatch.setattr(NgramModel, "from_pretrained", lambda name: loads.append(name) or load(name))
    for _ in range(3):
        greedy(target, prompt, assistant_model=drafter, max_new_tokens=8)
    assert loads == [str(tmp_path)]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"ngram_model": "nowhere/at-all"}, OSError, "nowhere/at-all"),
        ({"ngram_model": 5}, ValueError, r"ngram_model.*drafter\.ngram"),
        ({"ngram_weight": 0.5}, ValueError, r"ngram_weight=0\.5.*there is none"),
        ({"ngram_weight": -1.0}, ValueError, "ngram_weight"),
        ({"ngram_weight": float("nan")}, ValueError, "ngram_weight"),
        ({"ngram_weight": "much"}, ValueError, "ngram_weight"),
        ({"ngram_first_level": -1}, ValueError, "ngram_first_level"),
        ({"ngram_smoothing": "none"}, ValueError, "ngram_smoothing"),
        ({"tree_scoring": "best"}, ValueError, "tree_scoring"),
        ({"tree_end_rule": "never"}, ValueError, "tree_end_rule"),
    ],
)
def test_bad_settings_are_refused_before_the_target_runs(settings, error, message):
    target = tiny_target("llama")
    assert_refused(target, tree_drafter("pard", target, **settings), error, message)


def assert_refused(target, drafter, error, message, **options):
    handle = target.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    try:
        with pytest.raises(error, match=message):
            greedy(target, random_prompt(4), assistant_model=drafter, max_new_tokens=4, **options)
    finally:
        handle.remove()


def test_a_model_of_another_vocabulary_or_tokenizer_is_refused_before_the_target_runs():
    target = tiny_target("llama", vocab_size=300)
    drafter, tokenizer = tree_drafter("pard", target), tiny_tokenizer()
    drafter.ngram = ngram_of([1], vocab_size=64)
    assert_refused(target, drafter, ValueError, "64 tokens and the target has 300")
    drafter.ngram = NgramModel.from_token_stream([[1]], tokenizer=tokenizer, vocab_size=300)
    options = {"assistant_model": drafter, "max_new_tokens": 4, "tokenizer": tokenizer}
    for _ in range(2):
        greedy(target, random_prompt(4), **options)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<another>"])
    assert_refused(target, drafter, ValueError, "another tokenizer", tokenizer=tokenizer)


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_transfer = func._opname == "_to_copy" and kwargs.get("device") is not None
        self.names.append("transfer" if is_transfer else func._opname)
        return func(*args, **kwargs)


# What makes the host wait for a device, or depends on what is in a tensor.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "transfer"}


@pytest.mark.parametrize(("order", "limit"), [(2, 38), (3, 53), (5, 58)])
def test_a_level_takes_few_operations_and_waits_for_nothing(order, limit):
    model = ngram_of(torch.randint(0, 64, (4000,)), order=order)
    logits, context = torch.randn(1, 8, 64), random_prompt(order)
    per_depth = {}
    for depth in (4, 8):
        options = {"beam_width": 20, "top_k": 25, "ngram": model, "ngram_context": context, "scoring": DART_SCORING}
        options["end_token_id"] = torch.tensor([1, 2])
        # What is made once.
        build_tree(logits[:, :depth], 16, **options)
        with Operations() as operations:
            build_tree(logits[:, :depth], 16, **options)
        assert not WAITING & set(operations.names)
        # One a level, one for each token of the context but the first, and one that is not the model's.
        assert operations.names.count("searchsorted") <= depth + order - 1
        per_depth[depth] = len(operations.names)
    # Those of the search itself and of reading its tables are some 20 each; every length looked up by itself took 100.
    assert (per_depth[8] - per_depth[4]) / 4 <= limit
