"""How a drafter attends while it trains: in runs of queries, or with flex attention where that is faster."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...models.masks import additive, attention_windows
from ..losses.scoring import slices
from .masks import BlockQueries, PrefixQueries, QueryRun, dense_mask, flex_mask, run_mask

FLEX, IN_RUNS = "flex_attention", "hf_pardraft_in_runs"
ATTENTIONS = ("auto", "dense", "flex")
# Of an item, how many weights of attention are held at a time: a few megabytes.
WEIGHTS_AT_ONCE = 300_000


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """What attention computes in, autocast considered; an additive mask has to be of that dtype."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


@dataclass(frozen=True)
class LayoutRuns:
    """What [`attend_in_runs`] has to know of a batch.

    Attributes:
        runs: of its queries.
        masks: by the window of a layer (`None` if it sees everything), a mask for each run, `(batch, 1, queries, keys)`.
    """

    runs: list[QueryRun]
    masks: dict[int | None, list[torch.BoolTensor]]


def layout_attention(queries: PrefixQueries | BlockQueries, drafter: PreTrainedModel) -> dict[str, Any]:
    """Who sees whom, as arguments of the drafter's forward: runs, a `BlockMask`, or a mask of all queries and keys to add,
    `(batch, 1, queries, keys)`, whichever the implementation takes that it attends with. Masks are one per layer type if the
    drafter has several.

    Raises:
        ValueError: for layers that see chunks of a text: the layouts have no such mask.
    """
    windows, implementation = attention_windows(drafter.config), drafter.config._attn_implementation
    if "chunked_attention" in windows:
        raise ValueError(
            f"can't train a drafter with chunked attention, which the {drafter.config.model_type} model has"
        )
    if implementation == IN_RUNS:
        runs = queries.runs()
        masks = {window: [run_mask(queries, run, window)[:, None] for run in runs] for window in windows.values()}
        return {"attention_mask": None, "layout_runs": LayoutRuns(runs, masks)}
    if implementation == FLEX:
        compiled = queries.block.device.type != "cpu"
        masks = {name: flex_mask(queries, window, compiled) for name, window in windows.items()}
    else:
        dtype = compute_dtype(drafter)
        masks = {name: additive(dense_mask(queries, window), dtype) for name, window in windows.items()}
    return {"attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}


# Each step has other runs, of other lengths.
@torch.compiler.disable
def attend_in_runs(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    layout_runs: LayoutRuns,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers' models call it: scaled dot-product attention, each run of queries by itself.

    Args:
        query: `(batch, heads, queries, head_dim)`.
        key, value: `(batch, key heads, keys, head_dim)`.
        layout_runs: of the batch.
        sliding_window: of the layer.

    Returns:
        `(batch, queries, heads, head_dim)`, and no weights.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # As it would be inside, and so in the backward pass, which knows of no autocast.
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    attend = partial(ALL_ATTENTION_FUNCTIONS["sdpa"], module, dropout=dropout, scaling=scaling)
    parts = list(zip(layout_runs.runs, layout_runs.masks[sliding_window], strict=True))
    # With dropout, attending again would take the same random numbers again.
    in_runs = run_by_run if dropout else RunByRun.apply
    return in_runs(attend, parts, query, key, value), None


AttentionInterface.register(IN_RUNS, attend_in_runs)


def run_by_run(
    attend: Callable, parts: list[tuple[QueryRun, torch.BoolTensor]], query: torch.Tensor, *keyed: torch.Tensor
) -> torch.Tensor:
    """`attend`, once for each run and its mask; shapes as of [`attend_in_runs`]."""
    found = [attend(query[:, :, run.queries], *map(run.keys_of, keyed), mask)[0] for run, mask in parts]
    return torch.cat(found, dim=1)


class RunByRun(torch.autograd.Function):
    """[`run_by_run`], which attends again in the backward pass.

    The keys of a run are a copy, as long as its text is. Of all runs together they would take more memory than a mask of
    everything that they do without.
    """

    @staticmethod
    def forward(ctx, attend, parts, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.attend, ctx.parts = attend, parts
        return run_by_run(attend, parts, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        query, *keyed = tensors
        # Sums over many runs, so they are kept wide.
        wide = torch.promote_types(query.dtype, torch.float32)
        totals = [torch.zeros_like(tensor, dtype=wide) for tensor in tensors]
        gradients = gradients_by_products if query.device.type == "cpu" else gradients_by_attending
        for run, mask in ctx.parts:
            inputs = query[:, :, run.queries], *map(run.keys_of, keyed)
            found = gradients(ctx.attend, inputs, mask, gradient[:, run.queries])
            totals[0][:, :, run.queries] = found[0]
            for total, part in zip(totals[1:], found[1:], strict=True):
                run.add_to(total, part)
        return None, None, *(total.to(query.dtype) for total in totals)


def gradients_by_attending(
    attend: Callable, inputs: tuple[torch.Tensor, ...], mask: torch.BoolTensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of a run's queries, keys and values, from that of what they attend to, `(batch, queries, heads, head_dim)`."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        attended = attend(*inputs, mask)[0]
    return torch.autograd.grad(attended, inputs, gradient)


def gradients_by_products(
    attend: Callable, inputs: tuple[torch.Tensor, ...], mask: torch.BoolTensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """[`gradients_by_attending`] of scaled dot-product attention, by plain products.

    On a CPU the kernel and its backward pass take up to twice as long, and want the keys copied for each head that shares them.
    A query that sees nothing, of which no layout has any, would see everything.
    """
    query, key, value = inputs
    batch, heads, num_keys = key.shape[:3]
    scale = attend.keywords["scaling"]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # Queries of heads that share keys are rows of one matrix.
    scaled = (query * scale).reshape(batch, heads, -1, query.shape[3])
    gradient = gradient.transpose(1, 2).reshape(batch, heads, -1, value.shape[3])
    hidden, queries = ~mask[:, 0], torch.arange(scaled.shape[2]) % query.shape[2]
    by_query, wide = torch.empty_like(scaled), torch.promote_types(query.dtype, torch.float32)
    by_key, by_value = (torch.zeros_like(tensor, dtype=wide) for tensor in (key, value))
    for head in range(heads):
        keys, values = key[:, head], value[:, head]
        for few in slices(len(queries), WEIGHTS_AT_ONCE // num_keys):
            rows, slopes = scaled[:, head, few], gradient[:, head, few]
            scores = rows @ keys.transpose(1, 2)
            weights = scores.masked_fill_(hidden[:, queries[few]], torch.finfo(scores.dtype).min).softmax(dim=-1)
            by_weights = slopes @ values.transpose(1, 2)
            by_scores = torch._softmax_backward_data(by_weights, weights, -1, weights.dtype)
            by_query[:, head, few] = by_scores @ keys
            by_key[:, head] += by_scores.transpose(1, 2) @ rows
            by_value[:, head] += weights.transpose(1, 2) @ slopes
    return by_query.mul_(scale).view(query.shape), by_key, by_value


def training_attention(drafter: PreTrainedModel, setting: str, device: torch.device) -> str:
    """The attention implementation to train with.

    Args:
        drafter: the model.
        setting: "dense": scaled dot-product attention, in runs of queries. "flex": flex attention, which skips what sees
            nothing. "auto": "flex" on a CUDA device if the drafter supports it.
        device: where it will train.

    Raises:
        ValueError: if flex attention is asked for where it can't train.
    """
    obstacle = flex_obstacle(drafter, device)
    if setting == "flex" and obstacle:
        raise ValueError(f'can\'t train with flex attention: {obstacle}. Use training_attention="dense"')
    if setting == "flex" or (setting == "auto" and not obstacle):
        return FLEX
    return IN_RUNS


def flex_obstacle(drafter: PreTrainedModel, device: torch.device) -> str:
    """Why this drafter can't train with flex attention there; empty if it can."""
    if device.type != "cuda":
        return f"it has no backward pass on {device.type}, only on CUDA devices"
    if not drafter._supports_flex_attn:
        return f"a {type(drafter).__name__} does not support it"
    if drafter.config.to_dict().get("attention_dropout"):
        return "it knows no attention_dropout, and the drafter's config sets one"
    return ""


@contextmanager
def attending_with(drafter: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let a drafter attend in another way for a while: what decodes or is saved keeps its own."""
    own = drafter.config._attn_implementation
    drafter.config._attn_implementation = implementation
    try:
        yield
    finally:
        drafter.config._attn_implementation = own
