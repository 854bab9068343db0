"""How well a drafter drafts while it trains: objectives and accuracies, counted on the device, and the true tau."""

import itertools
from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .data.documents import IGNORED, checked
from .losses.objectives import OBJECTIVES, BlockScores
from .losses.sums import Sums, added, mean_of

# Processes that have seen fewer positions than others exchange as many counts.
MOST_POSITIONS = 256
# Of a text that is supervised from its start, what is taken for the prompt.
PROMPT_SHARE = 0.5


class DraftMetrics:
    """What batches were worth since this was last asked: objectives, and right drafts per position. Waits for no device."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}
        self._right: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, sums: dict[str, Sums], scores: BlockScores) -> None:
        """Count a batch: the sums of its objectives, and which drafts are right of those that count."""
        self._sums = added(self._sums, sums)
        is_right, valid = scores.is_right, scores.valid
        counts = torch.stack([(is_right & valid).sum(dim=0), valid.sum(dim=0)]).double()
        counted, seen = torch.nn.functional.pad(counts, (0, MOST_POSITIONS - counts.shape[1]))
        self._right = counted if self._right is None else self._right + counted
        self._seen = seen if self._seen is None else self._seen + seen

    def pop_objectives(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """What each objective was, over all batches and processes as one; starts anew.

        Args:
            total: sums over processes, each of which has to call this then.
        """
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        # Numerators first, then denominators, in one exchange.
        sizes = [len(part.denominators) for part in sums.values()]
        both = [torch.cat([part[field] for part in sums.values()]) for field in range(2)]
        numerators, denominators = total(torch.stack(both))
        quotients = zip(sums, numerators.split(sizes), denominators.split(sizes), strict=True)
        return {name: mean_of(*parts, OBJECTIVES[name].epsilon).item() for name, *parts in quotients}

    def pop_accuracies(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`accuracy_k` for each position seen, and `expected_tau`; starts counting anew.

        `expected_tau` is 1 + the expected length of a chain whose positions are right independently, at these rates.

        Args:
            total: see [`pop_objectives`].
        """
        counts = (
            torch.zeros(2, MOST_POSITIONS, dtype=torch.float64)
            if self._seen is None
            else torch.stack([self._right, self._seen])
        )
        right, seen = total(counts).tolist()
        if not any(seen):
            return {}
        rates = [right / count for right, count in zip(right, seen, strict=True) if count]
        self._right = self._seen = None
        expected_tau, all_right = 1.0, 1.0
        for rate in rates:
            all_right *= rate
            expected_tau += all_right
        result = {f"accuracy_{k}": round(rate, 4) for k, rate in enumerate(rates, start=1)}
        return {**result, "expected_tau": round(expected_tau, 3)}


def prompt_of(example: dict[str, Any]) -> torch.LongTensor | None:
    """`(length,)`, the tokens of an example before the first that is to be learned; of a packed one, its first document's.

    Of a text without a prompt, where all is to be learned, its first half. `None` if that leaves nothing.
    """
    input_ids, labels, documents = checked(example)
    labels, input_ids = labels[documents == documents[:1]], input_ids[documents == documents[:1]]
    learned = (labels != IGNORED).nonzero()[:, 0]
    length = int(learned[0]) if len(learned) else len(input_ids)
    # The first token of a text has nothing to be learned from, so a label on the second still means a text without a prompt.
    if length <= 1:
        length = int(len(input_ids) * PROMPT_SHARE)
    return input_ids[:length] if length else None


def held_out_prompts(examples: Iterable[dict[str, Any]], count: int) -> list[torch.LongTensor]:
    """At most `count` prompts, `(length,)` each: of examples that lie evenly in a data set, or the first of a stream."""
    if isinstance(examples, Sized):
        step = max(1, len(examples) // max(count, 1))
        chosen = (examples[index] for index in range(0, len(examples), step)[:count])
    else:
        chosen = itertools.islice(examples, count)
    found = [prompt_of(example) for example in chosen]
    return [prompt for prompt in found if prompt is not None]


@torch.no_grad()
def tokens_and_rounds(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: list[torch.LongTensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[int, int]:
    """Let `target` go on from each prompt with `drafter`: the tokens that were written, and the target's forwards.

    The quotient of their sums over all prompts is tau, the bonus token counted. The random state of the caller stays as it is.

    Args:
        target, drafter: in evaluation mode.
        prompts: `(length,)` each.
        max_new_tokens: tokens to write per prompt; fewer if the target ends its text.
        temperature: 0 is greedy.
        seed: of the sampling, so that one evaluation compares with the next.
    """
    sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    tokens = rounds = 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                # Each round at full depth, whatever the clock says.
                generation_config=GenerationConfig(draft_schedule="fixed"),
                # Under ZeRO's stage 3 generate takes every model for a part of one, and this target is whole.
                synced_gpus=False,
                **sampling,
            )
            tokens += sum(drafter.last_stats.tokens_per_round)
            rounds += len(drafter.last_stats.tokens_per_round)
    return tokens, rounds


def whole_copy(drafter: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A drafter like one whose weights are spread over processes, with all of them."""
    copy = type(drafter)(drafter.config)
    copy.generation_config = drafter.generation_config
    copy.load_state_dict(weights)
    if drafter.draft_token_ids is not None and copy.draft_token_ids is None:
        # Of an ordinary causal LM it is not among the weights.
        copy.set_draft_vocabulary(drafter.draft_token_ids)
    return copy.to(drafter.device).eval()
