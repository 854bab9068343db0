"""A tree is made of the best prefixes, whatever the shapes; against the published trees, and against brute force."""

import itertools
import json
import operator
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_pardraft import NgramModel
from hf_pardraft.generation.tree import token_tree
from hf_pardraft.generation.tree.prefix_table import prefix_table
from hf_pardraft.generation.tree.scoring import DART_SCORING, TreeScoring
from hf_pardraft.generation.tree.token_tree import ancestors_of, build_tree

TREES = Path(__file__).parent.parent / "fixtures" / "trees"
DDTREE = json.loads((TREES / "ddtree.json").read_text())["cases"]
SEARCHES = {
    form: json.loads((TREES / f"dart_search_{form}.json").read_text())["cases"] for form in ("paper", "reference")
}


def paths_of(tree, row=0):
    """The tree's nodes as tuples of tokens from the root, in the order of the nodes."""
    paths = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def best_prefixes(logits, budget):
    """Brute force: the `budget` most probable prefixes of every length, from `(depth, vocab)` logits."""
    log_probabilities = logits.double().log_softmax(dim=-1)
    depth, vocab = logits.shape
    scored = [
        (sum(log_probabilities[level, token].item() for level, token in enumerate(path)), path)
        for length in range(1, depth + 1)
        for path in itertools.product(range(vocab), repeat=length)
    ]
    return {path for _, path in sorted(scored, reverse=True)[:budget]}


@pytest.mark.parametrize("case", DDTREE, ids=lambda case: case["name"])
def test_the_tree_is_the_published_ddtree(case):
    logits = load_file(TREES / "ddtree.safetensors")[f"{case['name']}.logits"]
    if case["budget"] == 0:
        assert case["paths"] == []  # There the root alone; here a budget of 0 asks for the chain.
        return
    tree = build_tree(logits[None], case["budget"])
    assert set(paths_of(tree)) == {tuple(path) for path in case["paths"]}
    reach = load_file(TREES / "ddtree.safetensors")[f"{case['name']}.ancestor_or_self"][1:, 1:].bool()
    order = {tuple(path): index for index, path in enumerate(case["paths"])}
    published = [order[path] for path in paths_of(tree)]
    assert torch.equal(tree.ancestors[0], reach[published][:, published])


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_holds_the_most_probable_prefixes(seed):
    generator = torch.Generator().manual_seed(seed)
    depth, vocab = [(1, 7), (2, 6), (3, 5), (4, 4), (5, 3)][seed % 5]
    logits = 3 * torch.randn(2, depth, vocab, generator=generator, dtype=torch.float64)
    for budget in (1, 2, 3, 7, 12, 10_000):
        tree = build_tree(logits, budget)
        assert_well_formed(tree, depth)
        for row in range(2):
            assert set(paths_of(tree, row)) == best_prefixes(logits[row], budget)


def best_numbers(budget, depth, top_k):
    """The prefixes of a table by their definition: numbers whose products, one by one, sum to `budget` at most."""
    numbers = (path for length in range(depth) for path in itertools.product(range(1, top_k + 1), repeat=length + 1))
    return [path for path in numbers if sum(itertools.accumulate(path, operator.mul)) <= budget]


@pytest.mark.parametrize(
    ("budget", "depth", "top_k"), [(1, 3, 2), (7, 1, 5), (9, 4, 9), (6, 6, 3), (16, 3, 16), (40, 2, 4)]
)
def test_a_table_holds_the_prefixes_that_few_others_are_better_than(budget, depth, top_k):
    table = prefix_table(budget, depth, top_k, torch.device("cpu"))
    expected = best_numbers(budget, depth, top_k)
    tokens, nothing = table.tokens.view(-1, depth).tolist(), depth * top_k
    numbers = [tuple(place % top_k + 1 for place in places if place != nothing) for places in tokens]
    assert numbers == expected
    assert [[place // top_k for place in places if place != nothing] for places in tokens] == [
        [*range(len(path))] for path in numbers
    ]
    parents = [expected.index(path[:-1]) if len(path) > 1 else -1 for path in numbers]
    assert table.parents.tolist() == parents
    assert table.depths.tolist() == [*map(len, numbers)]


@pytest.mark.parametrize("scoring", [{}, {"scoring": DART_SCORING}], ids=["probability", "dart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_look_at_a_table_finds_the_tree_of_a_search_by_levels(dtype, scoring, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    for depth, vocab, budget in [
        (1, 9, 4),
        (3, 50, 16),
        (7, 300, 16),
        (15, 300, 24),
        (7, 300, 60),
        (5, 4, 30),
        (2, 3, 50),
    ]:
        logits = (3 * torch.randn(3, depth, vocab, generator=generator)).to(dtype)
        assert prefix_table(budget, depth, min(budget, vocab), logits.device) is not None
        trees = [build_tree(logits, budget, **scoring)]
        with monkeypatch.context() as patch:
            patch.setattr(token_tree, "prefix_table", lambda *sizes: None)
            trees.append(build_tree(logits, budget, **scoring))
        assert_well_formed(trees[0], depth)
        if dtype != torch.bfloat16:  # There scores are equal.
            for row in range(3):
                assert set(paths_of(trees[0], row)) == set(paths_of(trees[1], row))
        assert trees[0].tokens.shape == trees[1].tokens.shape


def test_a_search_in_a_table_takes_as_many_operations_for_more_levels():
    counts = []
    for depth in (4, 4, 15):
        logits = torch.randn(1, depth, 50)
        with torch.profiler.profile() as profiler:
            build_tree(logits, 16)
        counts.append(sum(each.count for each in profiler.key_averages()))
    assert counts[1] == counts[2]


def test_a_table_that_would_be_large_is_not_made():
    assert prefix_table(256, 15, 256, torch.device("cpu")) is None
    tree = build_tree(torch.randn(1, 15, 300), 256)
    assert tree.num_nodes == 256
    assert_well_formed(tree, 15)


@pytest.mark.parametrize("ends", [{}, {"end_token_id": torch.tensor([2, 5])}])
@pytest.mark.parametrize("end_rule", ["stop", "last", "ignore"])
@pytest.mark.parametrize("scoring", [{}, {"scoring": DART_SCORING}])
def test_the_tree_of_some_levels_has_the_shape_of_that_of_all(ends, end_rule, scoring):
    generator = torch.Generator().manual_seed(5)
    for logits in (torch.randn(2, 5, 30, generator=generator), torch.zeros(2, 5, 30)):
        for budget, (width, top_k) in itertools.product((1, 4, 12), ((None, None), (3, None), (None, 20))):
            options = {"beam_width": width, "top_k": top_k, "end_rule": end_rule, **ends, **scoring}
            for deepest in range(1, 6):
                expected = build_tree(logits[:, :deepest], budget, **options)
                tree = build_tree(logits, budget, **options, deepest=torch.tensor(deepest))
                for name in ("tokens", "parents", "depths", "ancestors"):
                    assert torch.equal(getattr(tree, name), getattr(expected, name))


@pytest.mark.parametrize("logits", ["equal", "one_hot", "impossible"])
def test_ties_never_lose_an_ancestor(logits):
    tensor = torch.zeros(1, 4, 6)
    if logits == "one_hot":
        tensor[..., 2] = 1e4
    if logits == "impossible":
        tensor[..., 1:] = -torch.inf
    for budget, beam_width in itertools.product((1, 3, 8, 20, 200), (None, 1, 2, 5, 50)):
        assert_well_formed(build_tree(tensor, budget, beam_width), 4)


def test_a_budget_of_zero_is_the_chain_of_most_probable_tokens():
    logits = torch.randn(3, 5, 11)
    assert torch.equal(build_tree(logits, 0).tokens, logits.argmax(-1))


def test_a_narrow_beam_and_few_tokens_keep_their_limits():
    tree = build_tree(torch.randn(1, 6, 50), 40, beam_width=2, top_k=3)
    parents_per_level = [
        tree.parents[0][tree.depths[0] == depth].unique().numel() for depth in range(1, tree.depths.max() + 1)
    ]
    assert max(parents_per_level) <= 2
    assert max(Counter(tree.parents[0].tolist()).values()) <= 3
    assert_well_formed(tree, 6)


@pytest.fixture(scope="module")
def stored_models():
    return {
        path.stem.removeprefix("ngram_"): NgramModel.from_dart_trie(path, vocab_size=256)
        for path in TREES.glob("*.trie")
    }


@pytest.mark.parametrize("model", ["counted", "stored"])
@pytest.mark.parametrize(
    ("form", "case"),
    [(form, case) for form, cases in SEARCHES.items() for case in cases],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_the_tree_with_an_ngram_term_is_darts(form, case, model, stored_models):
    logits = load_file(TREES / "dart_search.safetensors")[f"{case['name']}.logits"]
    ngram = (CountedNgram if model == "counted" else stored_models.get)(case["ngram_model"])
    scoring = TreeScoring(
        logit_decay=DART_SCORING.logit_decay,
        ngram_weight=case["w_ng"],
        level_exponent=DART_SCORING.level_exponent,
        epsilon=DART_SCORING.epsilon,
        first_ngram_level=1 if form == "reference" else 0,
        softmax_over_top_k=form == "reference",
    )
    tree = build_tree(
        # Twice the same row: a batch is searched row by row.
        logits.to(torch.float32 if form == "reference" else torch.float64).expand(2, -1, -1),
        case.get("theta", case.get("remain_total")),
        beam_width=case["beam"],
        top_k=case["k"],
        ngram=ngram,
        ngram_context=torch.tensor([case["context_tail"]] * 2),
        scoring=scoring,
        end_token_id=case.get("eos"),
        end_rule="last",
    )
    assert_well_formed(tree, logits.shape[0])
    for row in range(2):
        assert set(paths_of(tree, row)) == {tuple(path) for path in case["paths"]}


def ending_logits():
    """The end token, 3, is by far the most probable at every level."""
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    logits[..., 3] += 6
    return logits


@pytest.mark.parametrize("ngram", [None, "model"])
def test_an_end_token_gets_no_children_unless_a_rule_says_so(ngram):
    options = {"budget": 12, "top_k": 4, "beam_width": 4}
    if ngram:
        options |= {
            "ngram": NgramModel.from_token_stream([[3, 3, 3, 1, 2]], vocab_size=9),
            "ngram_context": torch.tensor([[3]]),
        }
        options["scoring"] = DART_SCORING
    for ends in ({3}, {3, 5}):
        ids = torch.tensor(sorted(ends)) if len(ends) > 1 else 3
        paths = paths_of(build_tree(ending_logits(), end_token_id=ids, **options))
        assert (3,) in paths
        assert not [path for path in paths if ends & set(path[:-1])]
    ignoring = build_tree(ending_logits(), end_token_id=3, end_rule="ignore", **options)
    assert paths_of(ignoring) == paths_of(build_tree(ending_logits(), **options))
    assert (3, 3) in paths_of(ignoring)


def test_the_beam_takes_ended_prefixes_last_if_that_is_the_rule():
    options = {"budget": 30, "top_k": 3, "end_token_id": 3, "end_rule": "last"}
    wide = paths_of(build_tree(ending_logits(), beam_width=3, **options))
    assert (3, 3) in wide, "three extensions, three places"
    narrow = paths_of(build_tree(ending_logits(), beam_width=2, **options))
    assert (3,) in narrow
    assert not [path for path in narrow if len(path) == 2 and path[0] == 3]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"end_rule must be one of .*'stop'"):
        build_tree(torch.zeros(1, 2, 3), 4, end_token_id=1, end_rule="sometimes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": -1}, "budget"),
        ({"budget": 4, "beam_width": 0}, "beam_width"),
        ({"budget": 4, "top_k": 0}, "top_k"),
        ({"budget": 4, "ngram": lambda context, tokens: tokens}, "ngram_context"),
    ],
)
def test_bad_widths_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_tree(torch.zeros(1, 2, 3), **arguments)


def assert_well_formed(tree, depth):
    for row in range(tree.tokens.shape[0]):
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths), "no prefix twice"
        assert [len(path) for path in paths] == tree.depths[row].tolist() == sorted(tree.depths[row].tolist())
        assert tree.depths.max() <= depth
        expected = [[paths[i][: len(paths[j])] == paths[j] for j in range(len(paths))] for i in range(len(paths))]
        assert tree.ancestors[row].tolist() == expected
    assert torch.equal(ancestors_of(tree.parents, depth), tree.ancestors)


class CountedNgram:
    """A stand-in continuity model over the counts of the fixtures: longest matching context, relative counts."""

    def __init__(self, name):
        tables = load_file(TREES / "ngram.safetensors")
        self.counts = {}
        self.order = max(int(key[-1]) for key in tables if key.startswith(f"{name}.grams"))
        for n in range(1, self.order + 1):
            grams, counts = tables[f"{name}.grams{n}"].tolist(), tables[f"{name}.counts{n}"].tolist()
            self.counts.update({tuple(gram): count for gram, count in zip(grams, counts, strict=True)})

    def probability(self, context, token):
        for length in range(min(self.order - 1, len(context)), 0, -1):
            suffix = tuple(context[-length:])
            if (*suffix, token) in self.counts:
                return self.counts[(*suffix, token)] / self.counts[suffix]
        return 0.0

    def __call__(self, contexts, candidates):
        return torch.tensor(
            [
                [[self.probability(context, token) for token in tokens] for context in row]
                for row, tokens in zip(contexts.tolist(), candidates.tolist(), strict=True)
            ],
            dtype=torch.float64,
        )


@pytest.mark.parametrize("nodes", [3, 17, 64, 65, 128, 300])
def test_the_ancestors_of_a_deep_chain_are_all_nodes_before(nodes):
    """There are more paths between nodes that far apart than a float can count."""
    parents, expected = torch.arange(nodes)[None], torch.ones(nodes, nodes, dtype=torch.bool).tril()
    for depth in (nodes, nodes + 1, 4096):
        assert torch.equal(ancestors_of(parents, depth)[0], expected)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(ancestors_of(parents, nodes)[0], expected)
