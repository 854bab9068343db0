"""A text while it is written: `generate` runs in a thread of its own, and what it has so far can be looked at."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.terminal.pace import Timing, summary
from hf_pardraft.terminal.runs import GrowingText
from hf_pardraft.terminal.writer import RunRecorder, StopFlag

# Seconds between two looks: a page needs no more.
EACH = 0.15
# Backgrounds that the text of light and dark pages stands out from.
SHADES = ("rgba(46, 160, 67, 0.35)", "rgba(56, 139, 253, 0.35)")


@dataclass
class Written:
    """What there is so far.

    Attributes:
        pieces: the text of each run, what one forward of the target added.
        timing: when each arrived.
        num_drafted: how many runs had a draft; `None` until that is known.
    """

    pieces: list[str] = field(default_factory=list)
    timing: Timing = field(default_factory=lambda: Timing([], []))
    num_drafted: int | None = None

    def html(self, marks: bool) -> str:
        """The text for a page, each run in a shade of its own if `marks`."""
        shades = [f"background: {SHADES[index % len(SHADES)]}" if marks else "" for index in range(len(self.pieces))]
        spans = [
            f'<span style="{shade}">{escape(piece)}</span>' for shade, piece in zip(shades, self.pieces, strict=True)
        ]
        return f'<div style="white-space: pre-wrap; min-height: 16em">{"".join(spans)}</div>'

    def told(self) -> str:
        """How it went so far."""
        if not self.pieces:
            return ""
        drafted = "" if self.num_drafted is None else f", drafts in {self.num_drafted} of {len(self.timing.sizes)} runs"
        return summary(self.timing, None) + drafted

    def points(self, way: str) -> dict[str, list[Any]]:
        """Columns of a plot of tokens over time."""
        counts = [0, *accumulate(self.timing.sizes)]
        return {"seconds": [0.0, *self.timing.times], "tokens": counts, "way": [way] * len(counts)}


def watch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.LongTensor,
    drafter: ParallelDrafter | None = None,
    seed: int = 0,
    **settings: Any,
) -> Iterator[Written]:
    """Let `target` go on from `input_ids (1, length)`, and show what there is from time to time, and at the end.

    Whoever closes the iterator stops the text.

    Args:
        target, tokenizer: the model, and its tokenizer.
        drafter: its drafter; `None` for plain `generate`.
        seed: of what is drawn.
        **settings: for `generate`.
    """
    runs: SimpleQueue[list[int] | BaseException | None] = SimpleQueue()
    recorder, stop = RunRecorder(runs.put), StopFlag()

    def write() -> None:
        torch.manual_seed(seed)
        try:
            options = {"assistant_model": drafter, "tokenizer": tokenizer, "streamer": recorder, **settings}
            mask, criteria = torch.ones_like(input_ids), StoppingCriteriaList([stop])
            target.generate(input_ids, attention_mask=mask, stopping_criteria=criteria, **options)
            runs.put(None)
        # The page's thread tells the user.
        except BaseException as error:  # noqa: BLE001
            runs.put(error)

    writing = Thread(target=write)
    writing.start()
    try:
        yield from looks(runs, recorder, GrowingText(tokenizer), drafter)
    finally:
        stop.is_set = True
        writing.join()


def looks(
    runs: SimpleQueue, recorder: RunRecorder, text: GrowingText, drafter: ParallelDrafter | None
) -> Iterator[Written]:
    """What `recorder` has noted, from time to time; raises what was raised in its thread."""
    written, is_over = Written(), False
    while not is_over:
        # Asleep until then: who waits for each run takes the time of the thread that writes them.
        time.sleep(EACH)
        with suppress(Empty):
            while not is_over:
                run = runs.get_nowait()
                if isinstance(run, BaseException):
                    raise run
                is_over = run is None
                written.pieces.append(text.rest() if is_over else text.add(run))
                if not is_over:
                    written.timing.sizes.append(len(run))
        written.timing.times = recorder.times[: len(written.timing.sizes)]
        if is_over and drafter is not None:
            written.timing.tau = drafter.last_stats.tau
            written.num_drafted = sum(drafted > 0 for drafted in drafter.last_stats.drafted_per_round)
        yield written
