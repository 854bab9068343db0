"""A clock that goes by a model of a machine: what the schedule chooses where nothing disturbs, and what noise does to that.

The two models run as ever. How long they take is not measured but said, so that one setting is no faster than another for having
had the quieter seconds, and the same command gives the same figures whatever else the machine does.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import torch

import schedule_measure
from hf_pardraft.evaluation.calls import TimedRun
from hf_pardraft.generation import plain
from hf_pardraft.generation.decoder import SpeculativeDecoding
from hf_pardraft.generation.scheduling.reading import ReadingChoice


class PartCosts(NamedTuple):
    """Milliseconds of the parts of a round.

    Attributes:
        one, two, more: the target's forward over one token and over two, and what each further one adds.
        draft: a draft, however deep.
        tree: what a tree takes more than a chain, to be built and to be kept the accepted part of.
        look: a look at the drafter's probabilities.
    """

    one: float
    two: float
    more: float
    draft: float
    tree: float
    look: float

    def forward(self, slots: int) -> float:
        """Of the target, over so many tokens."""
        return self.one if slots == 1 else self.two + self.more * (slots - 2)


@dataclass
class ModelledClock:
    """Two clocks: what rounds take, and what the schedule sees of it.

    Attributes:
        costs: of parts of a round.
        noise: by what share the schedule sees each part longer or shorter than it is (one standard deviation of its logarithm).
        now, seen: seconds.
    """

    costs: PartCosts
    noise: float = 0.0
    now: float = 0.0
    seen: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(0)

    def wait(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3
        self.seen += milliseconds / 1e3 * math.exp(self.random.gauss(0, self.noise))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let all that tells seconds go by this clock, in uncompiled rounds of one text."""

        def after(owner: Any, name: str, milliseconds: Callable[..., float]) -> Any:
            """`owner.name`, and a wait for what that is said to take, by what it returned and was called with."""
            whole = getattr(owner, name)

            @wraps(whole)
            def waited(*arguments: Any, **options: Any) -> Any:
                result = whole(*arguments, **options)
                self.wait(milliseconds(result, *arguments))
                return result

            return mock.patch.object(owner, name, waited)

        def continued(result: Any, target: Any, ids: torch.LongTensor, *_: Any) -> float:
            text = result if isinstance(result, torch.Tensor) else result.sequences
            return (text.shape[1] - ids.shape[1]) * self.costs.one

        def now() -> float:
            return self.now

        def seen() -> float:
            return self.seen

        timed = schedule_measure.run

        def run(*arguments: Any) -> TimedRun:
            """Plain `generate` takes a forward over one token for each."""
            result, entry = timed(*arguments), arguments[1]
            return replace(result, seconds=result.num_tokens * self.costs.one / 1e3) if entry.is_plain else result

        costs = self.costs
        with ExitStack() as patches:
            for patch in (
                mock.patch.object(time, "perf_counter", now),
                mock.patch.object(time, "thread_time", seen),
                mock.patch.object(schedule_measure, "run", run),
                after(plain, "_continued", continued),
                after(
                    SpeculativeDecoding,
                    "_read",
                    lambda _, loop, tree: costs.forward(1 + (tree.num_nodes if tree else 0)),
                ),
                after(SpeculativeDecoding, "_proposal", lambda _, loop, logits: 0.0 if logits is None else costs.draft),
                after(SpeculativeDecoding, "commit", lambda _, loop, *rest: costs.tree if loop.plan.budget else 0.0),
                after(ReadingChoice, "looks_at", lambda looks, *rest: costs.look if looks else 0.0),
            ):
                patches.enter_context(patch)
            yield
