"""Queries attend in runs to few keys: as with a mask of all queries and all keys, forwards and backwards, and without one."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pardraft import DraftTrainingArguments
from hf_pardraft.training.batch_scorer import BatchScorer
from hf_pardraft.training.layouts import AnchoredBlocks, DroppedMasks, SharedPrefixes
from hf_pardraft.training.layouts.attention import IN_RUNS, LayoutRuns, attend_in_runs
from hf_pardraft.training.layouts.masks import RUN_QUERIES, dense_mask, run_mask
from hf_pardraft.training.losses.objectives import objective_sums, total_loss
from tiny_models import tiny_drafter, tiny_target

KINDS = ("pard", "pard2", "dflash", "dflare", "dart")
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


class Grouped(torch.nn.Module):
    """What an attention function looks at in a model's attention."""

    num_key_value_groups = HEADS // KEY_HEADS
    is_causal = True


def ragged_examples(rng: random.Random, longest: int = 40) -> list[dict]:
    """A long text, and packed and short ones."""
    examples = []
    for sizes in ([longest], [rng.randint(4, 12) for _ in range(3)], [rng.randint(3, 9)]):
        ids = [rng.randint(3, 60) for _ in range(sum(sizes))]
        documents = [number for number, size in enumerate(sizes) for _ in range(size)]
        prompt = rng.randint(0, 3)
        examples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "document_ids": documents})
    return examples


def layout_queries(name: str, seed: int):
    layout = {
        "dropped_masks": DroppedMasks(63, num_tokens=5, retention=0.8, seed=seed),
        "anchored_blocks": AnchoredBlocks(63, block_size=4, num_anchors=9, seed=seed),
        "shared_prefix": SharedPrefixes(num_tokens=5, shifted=seed % 2 == 0, num_anchors=9, seed=seed),
    }[name]
    return type(layout).queries(layout(ragged_examples(random.Random(seed))))


LAYOUTS = ("dropped_masks", "anchored_blocks", "shared_prefix")


@pytest.mark.parametrize("size", [1, 3, 7, 16, RUN_QUERIES])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_query_has_a_run_that_has_all_keys_that_it_sees(name, size):
    for seed in range(6):
        queries, window = layout_queries(name, seed), (None, 3)[seed % 2]
        whole, seen = dense_mask(queries, window), 0
        for run in queries.runs(size):
            assert run.queries.start == seen
            seen = run.queries.stop
            keys = run.keys_of(torch.arange(queries.num_keys)[None, None, :, None]).flatten()
            assert len(set(keys.tolist())) == len(keys)
            rows = torch.zeros_like(whole[:, run.queries])
            rows[:, :, keys] = run_mask(queries, run, window)
            assert torch.equal(rows, whole[:, run.queries])
        assert seen == whole.shape[1]


def test_runs_of_blocks_have_the_text_before_their_last_anchor_and_themselves():
    example = {"input_ids": list(range(100)), "labels": list(range(100))}
    queries = AnchoredBlocks.queries(AnchoredBlocks(63, block_size=5, num_anchors=None)([example]))
    # 99 anchors, from 0 on: 4 blocks of 5 places at a time.
    runs = queries.runs(23)
    assert len(runs) == 25
    assert [(run.context, run.own) for run in runs[:2]] == [(3, slice(100, 120)), (7, slice(120, 140))]
    assert (runs[-1].context, runs[-1].own) == (98, slice(580, 595))


def attention_case(name: str, seed: int, dtype: torch.dtype):
    queries = layout_queries(name, seed)
    generator = torch.Generator().manual_seed(seed)
    batch, num_queries = queries.block.shape
    sizes = [(HEADS, num_queries), (KEY_HEADS, queries.num_keys), (KEY_HEADS, queries.num_keys)]
    tensors = [torch.randn(batch, *size, HEAD_DIM, generator=generator, dtype=torch.float64) for size in sizes]
    return queries, [tensor.to(dtype).requires_grad_() for tensor in tensors]


def plain_attention(query, key, value, mask, scaling):
    """Softmax over everything, written out; `(batch, queries, heads, head_dim)`."""
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(~mask[:, None], -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [5, RUN_QUERIES])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients_are_those_of_one_softmax_over_everything(name, size, dtype, bound):
    for seed, window in enumerate([None, 4]):
        queries, tensors = attention_case(name, seed, dtype)
        runs = queries.runs(size)
        masks = {window: [run_mask(queries, run, window)[:, None] for run in runs]}
        found, _ = attend_in_runs(
            Grouped(), *tensors, None, LayoutRuns(runs, masks), scaling=0.3, sliding_window=window
        )
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected = plain_attention(*exact, dense_mask(queries, window), 0.3)
        assert relative(found, expected) < bound
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = torch.autograd.grad((found.double() * weights).sum(), tensors)
        expected = torch.autograd.grad((expected * weights).sum(), exact)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            assert relative(mine, theirs) < bound


def test_dropout_draws_its_numbers_once():
    """The gradient of a linear function of the values is right only if both passes drop the same."""
    queries, (query, key, value) = attention_case("anchored_blocks", 0, torch.float64)
    runs = queries.runs(8)
    masks = {None: [run_mask(queries, run)[:, None] for run in runs]}
    torch.manual_seed(0)
    found, _ = attend_in_runs(Grouped(), query, key, value, None, LayoutRuns(runs, masks), dropout=0.5, scaling=0.3)
    (gradient,) = torch.autograd.grad(found.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), found.sum())


def step_gradients(kind: str, attention: str, dtype: torch.dtype, tmp_path):
    """Loss and gradients of one step of a tiny drafter."""
    target = tiny_target("qwen3").to(dtype).requires_grad_(False)
    drafter = tiny_drafter(kind, target).to(dtype).train()
    args = DraftTrainingArguments(tmp_path, use_cpu=True, draft_tokens=4, report_to=[])
    scorer = BatchScorer.for_training(drafter, target, args)
    assert scorer.attention == IN_RUNS
    scorer.attention = attention
    batch = scorer.layout.for_drafter(drafter, args)(ragged_examples(random.Random(0)))
    scores = scorer.scores(drafter, batch)
    loss = total_loss(scorer.coefficients, objective_sums(scorer.coefficients, scores, args.objective_settings(None)))
    loss.backward()
    gradients = {name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_gradients_that_it_has_with_a_mask_of_everything(kind, dtype, tmp_path):
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    loss, gradients = step_gradients(kind, IN_RUNS, dtype, tmp_path)
    exact_loss, exact = step_gradients(kind, "sdpa", torch.float64, tmp_path)
    assert abs(loss - exact_loss) < bound * exact_loss
    assert gradients.keys() == exact.keys()
    # As one vector: single small weights have gradients of next to nothing.
    every, expected = (torch.cat([part[name].flatten().double() for name in exact]) for part in (gradients, exact))
    assert relative(every, expected) < bound


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_as_large_as_a_mask_of_all_queries_and_keys(kind, tmp_path):
    """Nor is one made in the backward pass."""
    target = tiny_target("qwen3").requires_grad_(False)
    drafter = tiny_drafter(kind, target).train()
    args = DraftTrainingArguments(
        tmp_path, use_cpu=True, draft_tokens=4, report_to=[], num_anchors="all", cod_retention=1.0
    )
    scorer = BatchScorer.for_training(drafter, target, args)
    ids = torch.randint(3, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = scorer.layout.for_drafter(drafter, args)([{"input_ids": ids, "labels": ids}])
    queries = scorer.layout.queries(batch)
    everything = queries.block.shape[1] * queries.num_keys
    assert everything > 2_000_000
    with LargestTensor() as largest:
        scores = scorer.scores(drafter, batch)
        total_loss(
            scorer.coefficients, objective_sums(scorer.coefficients, scores, args.objective_settings(None))
        ).backward()
    assert largest.elements < everything / 8
