"""Which pass over the training data a step belongs to: what is drawn differs between passes, and resumes with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from .run_identity import read_identity

# Where a checkpoint's note of its run has the place in a stream.
STREAM = "stream"


class PassCounter(TrainerCallback):
    """Tells listeners which pass it is: patterns, anchors and continuations follow from that.

    Of a stream nobody knows the length. Trainer counts all passes over it as one epoch, and would look for the place of a
    checkpoint in the first of them.

    Args:
        listeners: whose `epoch` is set.

    Attributes:
        place: of a stream, `number` of the pass, from 0, and `began`, the step after which it did; `None` before it is known.
    """

    def __init__(self, listeners: list[Any]) -> None:
        self.listeners = listeners
        self.place: dict[str, int] | None = None
        self._is_resumed = False

    def resume(self, checkpoint: str | None) -> None:
        """Go on where a checkpoint stands in a stream, if it says so; from the start without one."""
        identity = None if checkpoint is None else read_identity(Path(checkpoint))
        self.place = (identity or {}).get(STREAM)
        self._is_resumed = self.place is not None

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        epoch = int(state.epoch or 0) if has_length(train_dataloader) else self._next_pass(state.global_step)
        for listener in self.listeners:
            listener.epoch = epoch

    def _next_pass(self, step: int) -> int:
        """The number of the pass over a stream that begins, or goes on, after a step."""
        if not self._is_resumed:
            self.place = {"number": 0 if self.place is None else self.place["number"] + 1, "began": step}
        self._is_resumed = False
        return self.place["number"]


class GroupedByLength(LengthGroupedSampler):
    """transformers' sampler, in an order that follows from a seed and the pass: the same again when a run resumes.

    Args:
        usual: the one that it takes the place of.
        seed: of the order.
    """

    epoch = 0

    def __init__(self, usual: LengthGroupedSampler, seed: int) -> None:
        super().__init__(usual.batch_size, lengths=usual.lengths)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()
