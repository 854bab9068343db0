"""What each supervised position says of its label and of the target's law, a chunk at a time, so that no (positions, vocab)
tensor is ever whole. Pure, but for the heads that it is given."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...likeliest import likeliest

# The value of each position, and its gradient by the position's logits, if there is one.
ValuesAndSlopes = tuple[torch.Tensor, torch.Tensor | None]
# So many in float32 are 4 MiB.
CACHED_LOGITS = 2**20
# How many logits a chunk may have, and stay until the backward pass; and the least rows of a chunk.
LOGITS_AT_ONCE, LEAST_ROWS = 25_000_000, 512
# A label among so many likeliest tokens is a hit.
HIT = 10
# The bytes and the least rows of a chunk on a CPU. More than 32 MiB malloc asks the system for each time, which zeroes them.
BYTES_ON_CPU, LEAST_ROWS_ON_CPU = 2**25 - 2**16, 128


def rows_at_once(num_columns: int, device: torch.device, dtype: torch.dtype) -> int:
    """How many positions go through a head of so many columns at a time, unless a user says.

    Args:
        num_columns: of the logits.
        device, dtype: of the logits.
    """
    if device.type == "cpu":
        return max(LEAST_ROWS_ON_CPU, BYTES_ON_CPU // (num_columns * dtype.itemsize))
    return rows_that_stay(num_columns)


def rows_that_stay(num_columns: int) -> int:
    """Of how many positions the logits may be kept for the backward pass, rather than computed again."""
    return max(LEAST_ROWS, LOGITS_AT_ONCE // num_columns)


def wide_dtype(logits: torch.Tensor) -> torch.dtype:
    """float32, or the wider dtype that they have."""
    return torch.promote_types(logits.dtype, torch.float32)


def label_log_probs(
    logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor | None = None
) -> torch.Tensor:
    """log p(label), `(...)`, from logits `(..., vocab)` and labels `(...)`; what an invalid label is doesn't matter."""
    if valid is not None:
        labels = labels.masked_fill(~valid, 0)
    logits = logits.to(wide_dtype(logits))
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none")
    return -losses.view(labels.shape)


def are_among(
    logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor, count: int = HIT
) -> torch.BoolTensor:
    """Whether each label `(positions,)` is among the `count` likeliest tokens by `(positions, vocab)`; no invalid one is."""
    of_labels = logits.gather(1, labels.masked_fill(~valid, 0)[:, None])
    return ((logits > of_labels).sum(dim=1) < count) & valid


def kl_divergences(draft_logits: torch.Tensor, target_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """T^2 KL(target || draft), `(...)`, both `(..., vocab)` softened by T. Natural log; the target's logits are constants.

    T^2 keeps the gradients' size independent of T.
    """
    return _kl_terms(draft_logits, target_logits, temperature)[2].sum(dim=-1) * temperature**2


def _kl_terms(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The draft's log law, the target's law, and what each token adds to KL(target || draft)."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    dtype, target_logits = wide_dtype(draft_logits), target_logits.detach()
    if temperature != 1:
        # Logits are the largest tensors of a step, and divided ones are copies.
        draft_logits, target_logits = draft_logits.to(dtype) / temperature, target_logits.to(dtype) / temperature
    draft, target = draft_logits.log_softmax(dim=-1, dtype=dtype), target_logits.log_softmax(dim=-1, dtype=dtype)
    probabilities = target.exp()
    # What the target never writes costs nothing, where a logit of -inf says so, too.
    return draft, probabilities, (probabilities * (target - draft)).masked_fill_(probabilities == 0, 0)


def label_log_probs_and_slopes(
    logits: torch.Tensor, labels: torch.LongTensor, valid: torch.BoolTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`label_log_probs`] of `(positions, vocab)`, and the gradient of each by its logits: one-hot(label) - p."""
    labels = labels.masked_fill(~valid, 0).long()[:, None]
    log_probs = logits.log_softmax(dim=-1, dtype=wide_dtype(logits))
    values = log_probs.gather(1, labels).squeeze(1)
    return values, log_probs.exp_().neg_().scatter_add_(1, labels, torch.ones_like(values)[:, None])


def kl_divergences_and_slopes(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`kl_divergences`] of `(positions, vocab)`, and the gradient of each by its draft logits: T (p_draft - p_target)."""
    draft, target, terms = _kl_terms(draft_logits, target_logits, temperature)
    return terms.sum(dim=-1) * temperature**2, draft.exp_().sub_(target).mul_(temperature)


def slices(count: int, size: int) -> list[slice]:
    """Of so many positions `size` at a time. Of none there is one that is empty, which keeps results in the graph."""
    return [slice(start, start + size) for start in range(0, max(count, 1), max(size, 1))]


class PositionScorer:
    """Called with an lm_head and the hidden states of the supervised positions, it returns what the objectives are made of.

    The states go through the head in chunks, whose logits are dropped at once. What the backward pass needs of a frozen head is
    kept instead: each score's gradient by its position's state, as large as that. For a head that learns the logits are computed
    again. Values and gradients don't depend on the chunks.

    Args:
        labels: `(positions,)`; those that the drafter can't write are negative.
        with_log_probs: whether to score them. What is scored must be learned from: a part of the graph that no gradient flows
            through would keep, after the chunks were computed again, the logits of all.
        continuations: `(positions,)`, other labels to score (the target's own), negative where there is none.
        target_logits: gives the target's logits, `(chosen, columns)`, of a slice of the positions.
        temperature: of the divergence.
        chunk_size: how many positions go through the head at a time.
        most_kept: up to so many positions keep their logits for the backward pass, if the head learns; by default a chunk.
    """

    def __init__(
        self,
        labels: torch.LongTensor,
        with_log_probs: bool = True,
        continuations: torch.LongTensor | None = None,
        target_logits: Callable[[slice], torch.Tensor] | None = None,
        temperature: float = 1.0,
        chunk_size: int = 512,
        most_kept: int | None = None,
    ) -> None:
        self.labels = labels
        self.with_log_probs = with_log_probs
        self.continuations = continuations
        self.target_logits = target_logits
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.most_kept = most_kept

    def __call__(self, head: nn.Module, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores of positions whose hidden states are `(positions, hidden)`.

        Returns:
            `(positions,)` each: `is_right`, whether the label is the likeliest token; without gradients `is_hit`, whether it is
            among the ten likeliest; and what was asked for: `log_probs` of the labels, those of the `continuations`, and
            `divergences` from the target's law.
        """
        learns = torch.is_grad_enabled()
        is_frozen = not any(weight.requires_grad for weight in head.parameters())
        if learns and is_frozen and states.requires_grad:
            return self._score_with_slopes(head, states)
        again = learns and len(states) > (self.most_kept or self.chunk_size)
        chunks = []
        for chunk in slices(len(states), self.chunk_size):
            if again:
                chunks.append(checkpoint(self._score, head, states[chunk], chunk, use_reentrant=False))
            else:
                chunks.append(self._score(head, states[chunk], chunk))
        return _joined(chunks)

    @torch.compiler.disable
    def _score_with_slopes(self, head: nn.Module, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """[`__call__`] for a head that learns nothing."""
        chunks, slopes = [], []
        for chunk in slices(len(states), self.chunk_size):
            scores, of_chunk = self._scores_and_slopes(head, states[chunk].detach(), chunk)
            chunks.append(scores)
            slopes.append(of_chunk)
        scores, slopes = _joined(chunks), _joined(slopes)
        return {
            name: WithSlopes.apply(states, values, slopes[name]) if name in slopes else values
            for name, values in scores.items()
        }

    def _scores_and_slopes(self, head: nn.Module, states: torch.Tensor, chunk: slice) -> tuple[dict, dict]:
        """Scores of a chunk, and the gradient of each that has one by its position's state, `(positions, hidden)`."""
        with torch.enable_grad():
            states.requires_grad_()
            logits = head(states)
        found, slopes = self._scores_of(logits, chunk, learns=True), {}
        for left, (name, (_, by_logits)) in zip(range(len(found))[::-1], found.items(), strict=True):
            (slopes[name],) = torch.autograd.grad(logits, states, by_logits, retain_graph=left > 0)
        return {name: values for name, (values, _) in found.items()} | self._is_right(logits, chunk), slopes

    def _score(self, head: nn.Module, states: torch.Tensor, chunk: slice) -> dict[str, torch.Tensor]:
        logits = head(states)
        found = self._scores_of(logits, chunk, torch.is_grad_enabled() and logits.requires_grad)
        scores = {
            name: values if slopes is None else WithSlopes.apply(logits, values, slopes)
            for name, (values, slopes) in found.items()
        }
        if not torch.is_grad_enabled():
            labels = self.labels[chunk].to(logits.device)
            scores["is_hit"], _ = few_by_few(are_among, logits, labels, labels >= 0)
        # Last, since what is computed again ends with what the backward pass needs.
        return scores | self._is_right(logits, chunk)

    def _is_right(self, logits: torch.Tensor, chunk: slice) -> dict[str, torch.BoolTensor]:
        return {"is_right": likeliest(logits.detach()) == self.labels[chunk].to(logits.device)}

    def _scores_of(self, logits: torch.Tensor, chunk: slice, learns: bool) -> dict[str, ValuesAndSlopes]:
        """What a chunk's logits `(positions, columns)` say, and each score's gradient by them if `learns`."""
        of_labels = label_log_probs_and_slopes if learns else label_log_probs
        of_laws = partial(kl_divergences_and_slopes if learns else kl_divergences, temperature=self.temperature)
        found = {}
        labels = self.labels[chunk].to(logits.device)
        if self.with_log_probs:
            found["log_probs"] = few_by_few(of_labels, logits, labels, labels >= 0)
        if self.continuations is not None:
            continuations = self.continuations[chunk].to(logits.device)
            found["continuations"] = few_by_few(of_labels, logits, continuations, continuations >= 0)
        if self.target_logits is not None:
            with torch.no_grad():
                target_logits = self.target_logits(chunk).to(logits.device)
            found["divergences"] = few_by_few(of_laws, logits, target_logits)
        return found


@torch.no_grad()
def few_by_few(
    score: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor,
    *constants: torch.Tensor,
) -> ValuesAndSlopes:
    """`score(logits, *constants)`, whose results at a position depend on that position alone; all `(positions, ...)`.

    Of all that leads from logits to values and slopes, a CPU's caches hold what a few positions need, and memory is slow.
    """
    values, slopes = [], None
    for few in slices(len(logits), cached_rows(logits)):
        found = score(logits[few], *(tensor[few] for tensor in constants))
        if isinstance(found, tuple):
            found, by_logits = found
            slopes = torch.empty_like(logits) if slopes is None else slopes
            slopes[few] = by_logits
        values.append(found)
    return torch.cat(values), slopes


def cached_rows(rows: torch.Tensor) -> int:
    """How many of `(positions, columns)` to work on at a time: what a CPU's caches hold, and all of them elsewhere."""
    return max(CACHED_LOGITS // max(rows.shape[-1], 1), 1) if rows.device.type == "cpu" else len(rows)


class WithSlopes(torch.autograd.Function):
    """Values `(positions,)` as a function of `inputs` with a known gradient, `slopes`, both `(positions, size)`."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, values: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slopes)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        by_inputs = torch.empty_like(slopes)
        for few in slices(len(slopes), cached_rows(slopes)):
            by_inputs[few] = gradient[few, None] * slopes[few]
        return by_inputs, None, None


def _joined(chunks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
