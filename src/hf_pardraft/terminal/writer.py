"""One answer: `generate` with the drafter, watched run by run, stopped by Ctrl-C, and compared with plain `generate`."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..models.base import ParallelDrafter
from ..pairing.remembered import warn_by_this_prompt
from ..user_input.models import context_length, end_of_text_ids
from .pace import PlainPace, Timing
from .sampling import Sampling

# Settings that count an answer's tokens from its first: an answer that two calls write is another with them.
COUNT_FROM_THE_PROMPT = (
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "max_time",
    "min_length",
    "min_new_tokens",
    "stop_strings",
    "watermarking_config",
)


@dataclass
class ShownAnswer:
    """What was written.

    Attributes:
        runs: token ids, as they arrived: one for each forward of the target.
        timing: when.
        cache: the target's afterwards; `None` if it is not known what is in it.
        cut_by: what ended it before the target did: "user", "max_new_tokens" or "context".
    """

    runs: list[list[int]]
    timing: Timing
    cache: Cache | None = None
    cut_by: str | None = None

    @property
    def ids(self) -> list[int]:
        return [token for run in self.runs for token in run]


class RunRecorder(BaseStreamer):
    """Notes each run and when it arrived, and hands it on."""

    def __init__(self, show: Callable[[list[int]], None]) -> None:
        self.show = show
        self.started = time.perf_counter()
        self.runs: list[list[int]] = []
        self.times: list[float] = []
        self.has_prompt = False

    def put(self, value: torch.LongTensor) -> None:
        """Take token ids of `(tokens,)` or `(1, tokens)`: of each call the prompt first."""
        if not self.has_prompt:
            self.has_prompt = True
            return
        self.times.append(time.perf_counter() - self.started)
        self.runs.append(value.flatten().tolist())
        self.show(self.runs[-1])

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [token for run in self.runs for token in run]

    def end(self) -> None:
        """The next call's prompt comes next."""
        self.has_prompt = False


class StopFlag(StoppingCriteria):
    """Ends a text once somebody has set it, so that the cache is what `generate` leaves."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self.is_set, dtype=torch.bool, device=input_ids.device)

    @contextmanager
    def set_by_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C sets it; a second one raises `KeyboardInterrupt` as ever, in a long forward, say. In the main thread only."""

        def interrupt(signum: int, frame: Any) -> None:
            if self.is_set:
                raise KeyboardInterrupt
            self.is_set = True

        self.is_set = False
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Writer:
    """Writes a chat's answers.

    Args:
        target: the model whose text it is.
        drafter: its drafter; `None` for plain `generate`.
        tokenizer: the target's.
        sampling: how tokens are chosen.
        compares: whether to time plain `generate`: it then writes the first tokens of an answer, the same ones, where it is not
            known what it takes after a text of this length.

    Attributes:
        pace: what it takes, as last measured.

    Raises:
        ValueError: if the drafter doesn't fit, or a setting can't be honoured.
    """

    PLAIN_TOKENS = 8

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: ParallelDrafter | None,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        compares: bool = True,
    ) -> None:
        if drafter is not None:
            drafter.check_target(target)
        # A cache of another kind does not go from call to call.
        target.generation_config.cache_implementation = None
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        counts = any(vars(target.generation_config).get(name) for name in COUNT_FROM_THE_PROMPT)
        self.compares = compares and drafter is not None and not counts
        self.pace: PlainPace | None = None
        self.stop = StopFlag()
        self.set_sampling(sampling)

    def set_sampling(self, sampling: Sampling) -> None:
        """Choose tokens in another way from now on."""
        sampling.check_draws(self.target.generation_config)
        self.sampling = sampling

    def answer(self, ids: list[int], cache: Cache | None, show: Callable[[list[int]], None]) -> ShownAnswer:
        """Write an answer.

        Args:
            ids: of the conversation.
            cache: of its beginning; `None` to read all of it.
            show: is called with each run as it arrives.

        Raises:
            ValueError: if the conversation leaves no room, or something can't be served.
        """
        room, recorder = self._room(len(ids)), RunRecorder(show)
        num_plain, tau, text = 0, None, ids
        try:
            with self.stop.set_by_ctrl_c():
                if self._needs_pace(len(ids)) and room > self.PLAIN_TOKENS:
                    warn_by_this_prompt(self.drafter, torch.tensor([ids]), self.tokenizer)
                    cache = self._write(ids, cache, recorder, self.PLAIN_TOKENS, None)
                    num_plain = len(recorder.runs)
                    self.pace = PlainPace.of_steps(recorder.times, len(ids)) or self.pace
                    text = [*ids, *recorder.ids]
                if not (num_plain and (self._is_over(text) or self.stop.is_set)):
                    cache = self._write(text, cache, recorder, room - num_plain, self.drafter)
                    tau = None if self.drafter is None else self.drafter.last_stats.tau
        except KeyboardInterrupt:
            cache, self.stop.is_set = None, True
        timing = Timing([len(run) for run in recorder.runs], recorder.times, num_plain, tau)
        return ShownAnswer(recorder.runs, timing, cache, self._cut_by(recorder.ids, room))

    def _needs_pace(self, length: int) -> bool:
        return self.compares and not (self.pace and self.pace.holds_for(length))

    def _cut_by(self, written: list[int], room: int) -> str | None:
        """See [`ShownAnswer`]; `room` is how many tokens there was room for."""
        if self.stop.is_set:
            return "user"
        if self._is_over(written) or len(written) < room:
            return None
        return "max_new_tokens" if room == self.sampling.max_new_tokens else "context"

    def _write(
        self,
        ids: list[int],
        cache: Cache | None,
        recorder: RunRecorder,
        max_new_tokens: int,
        drafter: ParallelDrafter | None,
    ) -> Cache:
        """Let `generate` go on; returns the cache."""
        text = torch.tensor([ids], device=self.target.device)
        output = self.target.generate(
            text,
            attention_mask=torch.ones_like(text),
            past_key_values=cache,
            assistant_model=drafter,
            max_new_tokens=max_new_tokens,
            streamer=recorder,
            stopping_criteria=StoppingCriteriaList([self.stop]),
            # A drafter that was trained with another tokenizer says so.
            tokenizer=self.tokenizer,
            return_dict_in_generate=True,
            **self.sampling.arguments,
        )
        return output.past_key_values

    def _room(self, length: int) -> int:
        context, most = context_length(self.target.config), self.sampling.max_new_tokens
        room = most if context is None else min(most, context - length)
        if room < 1:
            raise ValueError(
                f"the conversation has {length} tokens, and the target's context is {context}: /clear begins a new one"
            )
        return room

    def _is_over(self, ids: list[int]) -> bool:
        return bool(ids) and ids[-1] in end_of_text_ids(self.target)
