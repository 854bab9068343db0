"""Dialogues that the target writes by itself, the user's part too (arXiv 2406.08464, Magpie).

An instruct model that is asked to go on right after its chat template's user header invents what a user might say.
"""

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tqdm.auto import tqdm

from .local_writer import LocalWriter, PromptTooLongError
from .prompt_writer import PromptSampling, PromptWriter, SelfPrompt, UserTurn, gist
from .regenerate import Regeneration, Shard, check_output, writer_settings
from .resumable_jsonl import ResumableJsonl
from .rewriting import Rewrite, status_of_missing_rows
from .user_turns import user

# How many batches of dialogues are answered before their users go on, and of prompts are sampled together at most.
BATCHES_PER_WINDOW = 4
# Of so many prompts in a row at least two have to be of use; else the settings or the target are not.
PATIENCE = 256
DUPLICATE, TOO_LONG = "duplicate", "too long"


@dataclass
class SelfPrompting(Regeneration):
    """What became of the dialogues of a shard.

    Attributes:
        num_prompts: first messages that were sampled, those of earlier runs too.
        refused: how many of them were not used, by reason.
    """

    way_around: ClassVar[str] = "take a larger --self-prompts"

    num_prompts: int = 0
    refused: Counter = field(default_factory=Counter)

    def prompt_facts(self) -> dict[str, Any]:
        """See [`Regeneration.prompt_facts`]."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        return {
            "prompts sampled": self.num_prompts,
            "prompts not used": f"{self.refused.total()} ({reasons})" if reasons else 0,
        }


class TooFewPromptsError(ValueError):
    """The target writes hardly any prompt of use; what there were are answered."""

    @property
    def exit_status(self) -> int:
        return status_of_missing_rows()


class Dialogue(Rewrite):
    """One dialogue on its way: [`Rewrite`], whose user may go on.

    Args:
        index: of the dialogue.
        prompt: what the user says first.
    """

    def __init__(self, index: int, prompt: str) -> None:
        super().__init__(index, {"messages": [user(prompt)]})

    def wants_more(self, sampling: PromptSampling, seed: int) -> bool:
        """Whether the user goes on; decided by the seed, the index and the turn alone. Nobody asks on after half an answer."""
        is_chosen = random.Random(f"{seed} {self.index} {self.num_answers}").random() < sampling.more_turns
        return is_chosen and not self._was_cut and self.num_answers < sampling.max_turns

    def go_on(self, prompt: str) -> None:
        """Let the user say something more."""
        self._ahead = [user(prompt), {"role": "assistant", "content": ""}]
        self._read_on()

    def take_back(self) -> None:
        """End with the last answer: what the user said after it can't be answered."""
        self._ahead, self._written = [], self._written[:-1]


class PromptPool:
    """First messages of a shard's dialogues, each another one. They depend on the seed alone, and not on when a run is cut off.

    All that were sampled are in a file, hidden beside the output, so that a run that goes on neither samples them again nor
    asks one twice.

    Args:
        file: where they are written.
        writer: writes them.
        answerer: will answer those of use.
        shard: of several, each samples others.
        num_wanted: how many of use the dialogues need.
        after_prompt: called whenever some were sampled.

    Attributes:
        prompts: those of use.
        refused: how many were not, by reason.
        trouble: why no more are sampled, if hardly any was of use lately.
    """

    def __init__(
        self,
        file: ResumableJsonl,
        writer: PromptWriter,
        answerer: LocalWriter,
        shard: Shard,
        num_wanted: int,
        after_prompt: Callable[[], None],
    ) -> None:
        self.file, self.writer, self.answerer, self.shard = file, writer, answerer, shard
        self.num_wanted, self.after_prompt = num_wanted, after_prompt
        self.prompts: list[str] = []
        self.refused: Counter[str] = Counter()
        self.trouble: str | None = None
        self._gists: set[str] = set()
        self._latest: deque[bool] = deque(maxlen=PATIENCE)
        with file.path.open(encoding="utf-8") as lines:
            for line in lines:
                self._take(json.loads(line))

    def prompt(self, place: int) -> str | None:
        """One of the prompts, sampled if it is not there yet; `None` if there are no more to be had."""
        while len(self.prompts) <= place and self.trouble is None:
            # As many as are missing, and at least a batch, since some are of no use.
            most = BATCHES_PER_WINDOW * self.writer.batch_size
            self._sample(min(max(self.num_wanted - len(self.prompts), self.writer.batch_size), most))
            self.trouble = self._trouble()
        return self.prompts[place] if place < len(self.prompts) else None

    def _sample(self, count: int) -> None:
        start = len(self.file.done)
        turns = [
            self.writer.first_turn(self.shard.number + number * self.shard.count)
            for number in range(start, start + count)
        ]
        written: dict[int, SelfPrompt] = {}
        for turn, prompt in self.writer.ask(turns):
            written[turn.index] = prompt
            # In the file they stand in order, so that which of two alike ones is used doesn't depend on the batch.
            while turns and turns[0].index in written:
                prompt = written.pop(turns.pop(0).index)
                row = {"index": len(self.file.done), "prompt": prompt.text, "refused": self._refusal(prompt)}
                self.file.append(row)
                self._take(row)
            self.after_prompt()

    def _refusal(self, prompt: SelfPrompt) -> str | None:
        """Why a prompt is not used, if it is not: of itself, or since it was there before or can't be answered."""
        if prompt.refused is not None:
            return prompt.refused
        if gist(prompt.text) in self._gists:
            return DUPLICATE
        return None if leaves_room(prompt.text, self.answerer) else TOO_LONG

    def _take(self, row: dict[str, Any]) -> None:
        self._latest.append(row["refused"] is None)
        if row["refused"] is not None:
            self.refused[row["refused"]] += 1
            return
        self.prompts.append(row["prompt"])
        self._gists.add(gist(row["prompt"]))

    def _trouble(self) -> str | None:
        if len(self._latest) < PATIENCE or sum(self._latest) > 1:
            return None
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        return (
            f"hardly any of the last {PATIENCE} prompts that the target wrote is of use ({len(self.prompts)} in all; not used: "
            f"{reasons}). Those of use were answered; for more, try another temperature, top_p or limit of tokens for prompts, "
            "with another output"
        )


def write_dialogues(
    count: int,
    output: str | Path,
    writer: LocalWriter,
    target_name: str,
    sampling: PromptSampling | None = None,
    shard: Shard | None = None,
    progress: bool = True,
) -> SelfPrompting:
    """Let the target write dialogues, prompts included; a run that was cut off goes on where it was.

    Args:
        count: how many. A later run with a larger count adds to them.
        output: a .jsonl file. Dialogues are appended as they are done, each with its `index`, and `truncated` if its last
            answer met the limit of tokens.
        writer: who writes the answers.
        target_name: of the target; like the settings and the shard it must be the same in all runs that write one output.
        sampling: of the prompts.
        shard: which of the dialogues, those of this process by default. Prompts of several shards may be alike.
        progress: whether to show a bar.

    Raises:
        ValueError: if the output is no .jsonl file or was begun with other settings, or the tokenizer has no chat template
            that shows where a user's message begins; a [`TooFewPromptsError`] if hardly any prompt is of use.
        OSError: if the output can't be written.
    """
    sampling, shard = sampling or PromptSampling(), shard or Shard.of_this_process()
    path, prompter = shard.path(check_output(output)), PromptWriter(writer, sampling)
    told = {"target": target_name, "seed": writer.seed, "shard": f"{shard.number}/{shard.count}"}
    told |= sampling.settings() | {"chat_template_kwargs": writer.template_kwargs}
    turns = {"more_turns": sampling.more_turns, "max_turns": sampling.max_turns}
    indices = range(shard.number, count, shard.count)
    with (
        ResumableJsonl(path, told | writer_settings(writer) | turns) as answers,
        ResumableJsonl(path.with_name(f".{path.name}.prompts"), told) as prompts,
    ):
        result = SelfPrompting(path, len(indices), len(answers.done))
        started, before = time.monotonic(), writer.num_tokens
        with tqdm(total=len(indices), initial=len(answers.done), desc=path.name, disable=not progress) as bar:

            def show_speed() -> None:
                speed = result.note(writer.num_tokens - before + prompter.num_tokens, time.monotonic() - started)
                bar.set_postfix_str(f"{len(prompts.done)} prompts sampled, {speed}")

            pool = PromptPool(prompts, prompter, writer, shard, len(indices), show_speed)
            missing = [(place, index) for place, index in enumerate(indices) if index not in answers.done]
            for dialogue in finished(opened(missing, pool), prompter, writer, sampling, result):
                answers.append(dialogue.result())
                result.num_written += 1
                bar.update()
                show_speed()
        result.num_prompts, result.refused = len(prompts.done), pool.refused
    if pool.trouble is not None and result.num_before + result.num_written < result.num_rows:
        raise TooFewPromptsError(pool.trouble)
    return result


def leaves_room(prompt: str, writer: LocalWriter) -> bool:
    """Whether an answer to a first message fits into what the target can read."""
    try:
        writer.prompt_ids(Dialogue(0, prompt))
    except PromptTooLongError:
        return False
    return True


def opened(missing: list[tuple[int, int]], pool: PromptPool) -> Iterator[Dialogue]:
    """Dialogues with their first messages, from their places in the pool and their indices."""
    for place, index in missing:
        prompt = pool.prompt(place)
        if prompt is None:
            return
        yield Dialogue(index, prompt)


def finished(
    dialogues: Iterable[Dialogue],
    prompter: PromptWriter,
    writer: LocalWriter,
    sampling: PromptSampling,
    result: SelfPrompting,
) -> Iterator[Dialogue]:
    """The dialogues that could be written, in the order in which they get done; the others are noted in `result`."""
    dialogues, going_on = iter(dialogues), []
    # Those that go on join the next window, so that batches stay full.
    while window := going_on + list(islice(dialogues, writer.batch_size * BATCHES_PER_WINDOW - len(going_on))):
        wanting = []
        for outcome in writer.write(window):
            dialogue, error = outcome if isinstance(outcome, tuple) else (outcome, None)
            if error is not None and not dialogue.num_answers:
                result.note_failure(dialogue.index, error)
            elif error is not None:
                dialogue.take_back()
                yield dialogue
            elif dialogue.wants_more(sampling, writer.seed):
                wanting.append(dialogue)
            else:
                yield dialogue
        going_on = []
        for dialogue, prompt in asked_on(wanting, prompter):
            if prompt is None or prompt.refused is not None:
                yield dialogue
            else:
                dialogue.go_on(prompt.text)
                going_on.append(dialogue)


def asked_on(dialogues: list[Dialogue], prompter: PromptWriter) -> Iterator[tuple[Dialogue, SelfPrompt | None]]:
    """Dialogues and what their users say next; `None` of one that leaves no room for it."""
    readable: dict[int, Dialogue] = {}
    turns = []
    for dialogue in dialogues:
        turn = UserTurn(dialogue.index, dialogue.messages, "user")
        try:
            prompter.prompt_ids(turn)
        except ValueError:
            yield dialogue, None
        else:
            readable[dialogue.index] = dialogue
            turns.append(turn)
    for turn, prompt in prompter.ask(turns):
        yield readable[turn.index], prompt
