"""How well a drafter drafts while it trains: what becomes of its drafts when the target goes on from held-out prompts."""

import itertools
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.base import ParallelDrafter
from ..models.inputs import input_device
from ..user_input.models import context_length, end_of_text_ids, without_settings_of_its_own
from .data.documents import IGNORED, checked
from .metrics import MOST_POSITIONS

# Of a text that is supervised from its start, what is taken for the prompt.
PROMPT_SHARE = 0.5


def no_counts() -> torch.Tensor:
    return torch.zeros(MOST_POSITIONS, dtype=torch.float64)


@dataclass
class Drafting:
    """What was counted while the target went on from some prompts with a drafter.

    Attributes:
        tokens: that were written.
        rounds: forwards of the target.
        seconds: that it took.
        accepted, proposed: `(positions,)`, rounds in which each draft position was accepted, and proposed.
    """

    tokens: float = 0
    rounds: float = 0
    seconds: float = 0.0
    accepted: torch.Tensor = field(default_factory=no_counts)
    proposed: torch.Tensor = field(default_factory=no_counts)

    def add(self, stats: Any, seconds: float) -> None:
        """Count a call of `generate`.

        Args:
            stats: its [`DecodeStats`].
            seconds: that it took.
        """
        self.tokens += sum(stats.tokens_per_round)
        self.rounds += len(stats.tokens_per_round)
        self.seconds += seconds
        for counted, lengths in ((self.accepted, stats.accepted_per_round), (self.proposed, stats.depths_per_round)):
            for length in lengths:
                counted[: min(length, MOST_POSITIONS)] += 1

    def over_processes(self, total: Callable[[torch.Tensor], torch.Tensor]) -> "Drafting":
        """All processes' counts as one.

        Args:
            total: sums over processes, each of which has to call this then.
        """
        own = torch.tensor([self.tokens, self.rounds, self.seconds], dtype=torch.float64)
        sums = total(torch.cat([own, self.accepted, self.proposed])).cpu()
        return Drafting(*sums[:3].tolist(), *sums[3:].split(MOST_POSITIONS))

    def metrics(self) -> dict[str, float]:
        """By the names under which they are reported: `tau`, the bonus token counted; `acceptance_k`, of the rounds that proposed
        position k the share that accepted it; `decoded_tokens_per_second`, of one process, its prompts' reading included."""
        if not self.rounds:
            return {"tau": 0.0}
        shares = [
            accepted / proposed for accepted, proposed in zip(self.accepted, self.proposed, strict=True) if proposed
        ]
        return {
            "tau": round(self.tokens / self.rounds, 4),
            **{f"acceptance_{k}": round(share.item(), 4) for k, share in enumerate(shares, start=1)},
            "decoded_tokens_per_second": round(self.tokens / self.seconds, 2),
        }


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
def draft_from(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    prompts: list[torch.LongTensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Drafting:
    """Let `target` go on from each prompt with `drafter`, and count. The random state of the caller stays as it is.

    Of the target's own generation settings only the tokens that end a text count.

    Args:
        target, drafter: in evaluation mode.
        prompts: `(length,)` each.
        max_new_tokens: tokens to write per prompt; fewer if the target ends its text, or its context does.
        temperature: 0 is greedy.
        seed: of the sampling, so that one evaluation compares with the next.
    """
    settings = {"do_sample": False, "eos_token_id": sorted(end_of_text_ids(target)) or None, "pad_token_id": 0}
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    counted, context = Drafting(), context_length(target.config)
    with torch.random.fork_rng(), without_settings_of_its_own(target):
        torch.manual_seed(seed)
        for prompt in prompts:
            room = max_new_tokens if context is None else min(max_new_tokens, context - len(prompt))
            if room < 1:
                continue
            ids, started = prompt[None].to(input_device(target)), time.perf_counter()
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                # Each round at full depth, whatever the clock says.
                generation_config=GenerationConfig(max_new_tokens=room, draft_schedule="fixed", **settings),
                # Under ZeRO's stage 3 generate takes every model for a part of one, and this target is whole.
                synced_gpus=False,
            )
            counted.add(drafter.last_stats, time.perf_counter() - started)
    return counted


def whole_copy(drafter: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A drafter like one whose weights are spread over processes, with all of them."""
    copy = type(drafter)(drafter.config)
    copy.generation_config = drafter.generation_config
    copy.load_state_dict(weights)
    if drafter.draft_token_ids is not None and copy.draft_token_ids is None:
        # Of an ordinary causal LM it is not among the weights.
        copy.set_draft_vocabulary(drafter.draft_token_ids)
    return copy.to(drafter.device).eval()
