"""Dialogues that the target writes by itself, the user's part too (arXiv 2406.08464, Magpie).

An instruct model that is asked to go on right after its chat template's user header invents what a user might say.
"""

import json
import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .journal import Journal
from .local_writer import LocalWriter
from .prompt_filters import gist, refusal
from .regenerate import Regeneration, Shard, check_output, writer_settings
from .rewriting import SEED_BITS, Answer, Rewrite, check_sampling
from .row_sampling import RowNoise
from .user_turns import UserTurns, marks_of, user

# How many batches of prompts are answered together, sorted by length.
BATCHES_PER_WINDOW = 4
# Of so many prompts in a row at least two have to be of use; else the settings or the target are not.
PATIENCE = 256
CUT_OFF, DUPLICATE = "cut off", "duplicate"


@dataclass(frozen=True)
class PromptSampling:
    """How users' messages are sampled.

    Attributes:
        temperature, top_p: of the law that they are sampled from.
        max_tokens: a message that is not at its end by then is not used.
        more_turns: the probability that a user goes on after an answer.
        max_turns: most messages of a user in a dialogue.
        systems: system messages that steer what users ask about first, one after another; an empty one is none. Answers don't
            see them: that system messages draw other prompts out of a model is the paper's way to code and mathematics.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256
    more_turns: float = 0.25
    max_turns: int = 4
    systems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.max_tokens)
        if not self.temperature:
            raise ValueError("expected a temperature of prompts above 0, got 0: all prompts would be the same one")
        if not 0 <= self.more_turns <= 1 or self.max_turns < 1:
            raise ValueError(
                f"expected more_turns in [0, 1] and max_turns >= 1, got {self.more_turns} and {self.max_turns}"
            )


@dataclass
class SelfPrompting(Regeneration):
    """What became of the dialogues of a shard.

    Attributes:
        num_prompts: first messages that were sampled, those of earlier runs too.
        refused: how many of them were not used, by reason.
    """

    num_prompts: int = 0
    refused: Counter = field(default_factory=Counter)


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
        """End with the last answer: what the user said behind it can't be answered."""
        self._ahead, self._written = [], self._written[:-1]


@dataclass(frozen=True)
class UserTurn:
    """A message of a user that is to be written; a [`PromptWriter`] takes it as a [`LocalWriter`] takes a row.

    Attributes:
        index: of the prompt or the dialogue.
        messages: what was said before.
        salt: tells apart the seeds of first messages, of later ones, and of answers.
    """

    index: int
    messages: list[dict[str, Any]]
    salt: str
    prompt_text: str | None = None

    def seed(self, seed: int) -> int:
        return zlib.crc32(f"{seed} {self.index} {len(self.messages)} {self.salt}".encode()) & SEED_BITS


@dataclass(frozen=True)
class Prompt(Answer):
    """What a user says, and why it is not used; `None` if it is."""

    refused: str | None = None


class PromptWriter(LocalWriter):
    """Writes users' messages with the target of another writer, up to a token, or a text, that ends them.

    Args:
        writer: of the answers.
        sampling: of the messages.

    Raises:
        ValueError: if the chat template does not show where a user's message begins, or refuses a system message.
    """

    def __init__(self, writer: LocalWriter, sampling: PromptSampling) -> None:
        super().__init__(
            writer.target,
            writer.tokenizer,
            writer.drafter,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            batch_size=writer.batch_size,
            seed=writer.seed,
            template_kwargs=writer.template_kwargs,
        )
        self.turns = UserTurns(writer.tokenizer, writer.template_kwargs)
        self.openings = [[{"role": "system", "content": text}] if text else [] for text in sampling.systems or ("",)]
        for messages in self.openings:
            self.turns.header_ids(messages)
        self.marks = marks_of(writer.tokenizer)
        self.good_ends = self.end_ids | ({self.turns.end.token} - {None})
        # No message goes on behind a special token, whichever it is.
        self.end_ids = self.good_ends | set(self.marks)

    def first_turn(self, number: int) -> UserTurn:
        """That of the prompt of this number."""
        return UserTurn(number, self.openings[number % len(self.openings)], "prompt")

    def ask(self, turns: list[UserTurn]) -> list[Prompt]:
        """What a user says in each of some turns.

        Raises:
            ValueError: if a conversation leaves no room for a user's message.
        """
        return self.answer(turns, [self.prompt_ids(turn) for turn in turns])

    def answer_of(self, ids: list[int], behind: list[int]) -> Prompt:
        """The message up to what ends it."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        text, ending = self.decode(ids[:end]), self.turns.end.text
        is_whole = end is not None and ids[end] in self.good_ends
        if ending is not None and ending in text:
            text, is_whole = text.split(ending, 1)[0], True
        if not is_whole:
            return Prompt(text.strip(), is_whole=False, refused=CUT_OFF if end is None else "special tokens")
        text = text.strip()
        written = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, refused=refusal(text, written, list(self.marks.values())))

    def _chat_ids(self, rewrite: UserTurn) -> list[int]:
        return self.turns.header_ids(rewrite.messages)

    def is_at_end(self, ids: list[int]) -> bool:
        ending = self.turns.end.text
        return super().is_at_end(ids) or (ending is not None and ending in self.decode(ids))

    def _sampling(self, noise: RowNoise, seeds: list[int]) -> dict[str, Any]:
        options = super()._sampling(noise, seeds)
        if self.turns.end.text is not None:
            options |= {"stop_strings": [self.turns.end.text], "tokenizer": self.tokenizer}
        return options


class PromptPool:
    """First messages of a shard's dialogues, each another one. They depend on the seed alone, and not on when a run is cut off.

    All that were sampled are in a journal, hidden beside the output, so that a run that goes on neither samples them again nor
    asks one twice.

    Args:
        journal: where they are written.
        writer: writes them.
        shard: of several, each samples others.
        after_batch: called whenever some were sampled.

    Attributes:
        prompts: those of use.
        refused: how many were not, by reason.
    """

    def __init__(self, journal: Journal, writer: PromptWriter, shard: Shard, after_batch: Callable[[], None]) -> None:
        self.journal, self.writer, self.shard, self.after_batch = journal, writer, shard, after_batch
        self.prompts: list[str] = []
        self.refused: Counter[str] = Counter()
        self._gists: set[str] = set()
        self._latest: deque[bool] = deque(maxlen=PATIENCE)
        with journal.path.open(encoding="utf-8") as file:
            for line in file:
                self._take(json.loads(line))

    def up_to(self, count: int) -> list[str]:
        """The first prompts, at least `count`; those that are not there yet are sampled.

        Raises:
            ValueError: if hardly any prompt is of use.
        """
        while len(self.prompts) < count:
            start = len(self.journal.done)
            numbers = range(start, start + self.writer.batch_size)
            turns = [self.writer.first_turn(self.shard.number + number * self.shard.count) for number in numbers]
            for number, prompt in zip(numbers, self.writer.ask(turns), strict=True):
                reason = prompt.refused or (DUPLICATE if gist(prompt.text) in self._gists else None)
                row = {"index": number, "prompt": prompt.text, "refused": reason}
                self.journal.append(row)
                self._take(row)
            self.after_batch()
            self._check_use()
        return self.prompts

    def _take(self, row: dict[str, Any]) -> None:
        self._latest.append(row["refused"] is None)
        if row["refused"] is not None:
            self.refused[row["refused"]] += 1
            return
        self.prompts.append(row["prompt"])
        self._gists.add(gist(row["prompt"]))

    def _check_use(self) -> None:
        if len(self._latest) == PATIENCE and sum(self._latest) < 2:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
            raise ValueError(
                f"hardly any of the last {PATIENCE} prompts that the target wrote is of use; refused in all: {reasons}. Another "
                "temperature, top_p or limit of tokens for prompts may help, with another output; what was written stays"
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
        ValueError: if the output is no .jsonl file or was begun with other settings, the tokenizer has no chat template that
            shows where a user's message begins, or hardly any prompt is of use.
        OSError: if the output can't be written.
    """
    sampling, shard = sampling or PromptSampling(), shard or Shard.of_this_process()
    path, prompter = shard.path(check_output(output)), PromptWriter(writer, sampling)
    told = {"target": target_name, "seed": writer.seed, "shard": f"{shard.number}/{shard.count}"}
    first = {name: value for name, value in asdict(sampling).items() if name not in ("more_turns", "max_turns")}
    first |= told | {"chat_template_kwargs": writer.template_kwargs}
    indices = range(shard.number, count, shard.count)
    with (
        Journal(path, told | writer_settings(writer) | {"prompts": asdict(sampling)}) as journal,
        Journal(path.with_name(f".{path.name}.prompts"), first) as prompts,
    ):
        result = SelfPrompting(path, len(indices), len(journal.done))
        started = time.monotonic()
        with tqdm(total=len(indices), initial=len(journal.done), desc=path.name, disable=not progress) as bar:

            def show_speed() -> None:
                result.num_tokens = writer.num_tokens + prompter.num_tokens
                result.seconds = time.monotonic() - started
                speed = result.num_tokens / result.seconds
                bar.set_postfix_str(f"{len(prompts.done)} prompts sampled, {speed:.0f} tokens/s")

            pool = PromptPool(prompts, prompter, shard, show_speed)
            missing = [(place, index) for place, index in enumerate(indices) if index not in journal.done]
            for dialogue in finished(opened(missing, pool), prompter, writer, sampling, result):
                journal.append(dialogue.result())
                result.num_written += 1
                bar.update()
                show_speed()
        result.num_prompts, result.refused = len(prompts.done), pool.refused
    return result


def opened(missing: list[tuple[int, int]], pool: PromptPool) -> Iterator[Dialogue]:
    """Dialogues with their first messages, from their places in the pool and their indices."""
    for place, index in missing:
        yield Dialogue(index, pool.up_to(place + 1)[place])


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
                result.failed[dialogue.index] = str(error)
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


def asked_on(dialogues: list[Dialogue], prompter: PromptWriter) -> Iterator[tuple[Dialogue, Prompt | None]]:
    """Dialogues and what their users say next; `None` of one that leaves no room for it."""
    readable = []
    for dialogue in dialogues:
        turn = UserTurn(dialogue.index, dialogue.messages, "user")
        try:
            readable.append((len(prompter.prompt_ids(turn)), dialogue, turn))
        except ValueError:
            yield dialogue, None
    readable.sort(key=lambda one: one[0], reverse=True)
    for start in range(0, len(readable), prompter.batch_size):
        batch = readable[start : start + prompter.batch_size]
        prompts = prompter.ask([turn for _, _, turn in batch])
        yield from ((dialogue, prompt) for (_, dialogue, _), prompt in zip(batch, prompts, strict=True))
