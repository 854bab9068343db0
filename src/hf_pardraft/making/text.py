"""The text of a run: what to ask the target next, and what of its dialogues is learned and what is held out."""

import json
import random
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..checkpoints.atomic_files import write_whole
from ..user_input.data import load_data
from .commands import Commands
from .plan import held_out
from .state import MakeState

# What training and measuring read; columns of a user's own may differ from row to row.
COLUMNS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs", "truncated")


class Text:
    """A run's text, written in chunks: dialogues of the target's own in one file, or answers to a part of the prompts in each.

    Args:
        commands: of the run.
        state: with the chunks so far.
    """

    def __init__(self, commands: Commands, state: MakeState) -> None:
        self.commands, self.state, self.folder = commands, state, commands.folder.text
        self.dataset = commands.settings.dataset
        self._prompts: Any = None

    @property
    def available(self) -> int | None:
        """How many prompts there are; `None` for any number."""
        return None if self.dataset is None else len(self._all_prompts())

    def command(self, number: int) -> list[str]:
        """The command of a chunk; the prompts that it answers are written down first."""
        upto = self.state.chunks[number]["upto"]
        if self.dataset is None:
            return self.commands.regenerate(self._output(number), count=upto)
        prompts = self.folder / f"prompts-{number:03d}.jsonl"
        if not prompts.exists():
            start = self.state.chunks[number - 1]["upto"] if number else 0
            rows = [self._all_prompts()[index] for index in self._order()[start:upto]]
            write_whole(prompts, as_lines(rows))
        return self.commands.regenerate(self._output(number), dataset=prompts)

    def forget_prompts(self, number: int) -> None:
        """Let given prompts of a chunk be read anew, of which none was answered."""
        if self.dataset is not None:
            # And the empty file of answers, which was begun with them.
            for path in [*self.folder.glob(f"*-{number:03d}.jsonl*")]:
                path.unlink()

    def all_commands(self) -> list[list[str]]:
        """The commands that write this text anew. Of several with one output the last asks for all."""
        by_output = {self._output(number): number for number in range(len(self.state.chunks))}
        return [self.command(number) for number in by_output.values()]

    def rows(self) -> list[dict[str, Any]]:
        """All dialogues so far, as they were asked for, whenever they got done."""
        found = []
        for path in dict.fromkeys(self._output(number) for number in range(len(self.state.chunks))):
            rows = read_lines(path) if path.exists() else []
            found += sorted(rows, key=lambda row: row["index"])
        return found

    def split(self) -> tuple[int, int]:
        """Write what is learned and what is held out: numbers of dialogues. Nothing is learned of a prompt that is held out."""
        rows = [learned_from(row) for row in self.rows()]
        if len(rows) < 2:
            raise ValueError(
                f"the target wrote {len(rows)} dialogues, and at least 2 are needed, one to learn and one to measure with: give "
                "it more --hours, or prompts with --dataset"
            )
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(prompt_of(row), []).append(place)
        # Where all have one prompt, their answers are all that can be apart.
        groups = [*places.values()] if len(places) > 1 else [[place] for place in range(len(rows))]
        chosen = held_out(len(groups))
        kept = [groups[number][0] for number in chosen]
        learned = sorted(place for number, group in enumerate(groups) if number not in {*chosen} for place in group)
        folder = self.commands.folder
        write_whole(folder.held_out, as_lines([rows[place] for place in kept]))
        write_whole(folder.train, as_lines([rows[place] for place in learned]))
        return len(learned), len(kept)

    def has_plain_prompts(self) -> bool:
        """Whether held-out prompts are texts, which the target goes on from as they are, without a chat template."""
        return all(isinstance(row.get("prompt"), str) for row in read_lines(self.commands.folder.held_out))

    def count_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens that the target wrote, prompts of its own included."""
        texts = [text for row in self.rows() for text in written_texts(row, self.dataset is None)]
        return sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else 0

    def _output(self, number: int) -> Path:
        return self.folder / ("dialogues.jsonl" if self.dataset is None else f"answers-{number:03d}.jsonl")

    def _all_prompts(self) -> Any:
        if self._prompts is None:
            self._prompts = load_data(self.dataset)
        return self._prompts

    def _order(self) -> list[int]:
        # Data sets are often sorted, and the hours may not do for all of them.
        count = len(self._all_prompts())
        return random.Random(self.commands.settings.seed).sample(range(count), count)


def written_texts(row: dict[str, Any], prompts_too: bool) -> list[str]:
    """What the target wrote of a row."""
    messages = row.get("messages") or row.get("completion") or []
    if isinstance(messages, str):
        return [messages]
    contents = [message.get("content") for message in messages if prompts_too or message.get("role") == "assistant"]
    # A call of a tool may have none, or parts.
    return [content for content in contents if isinstance(content, str)]


def learned_from(row: dict[str, Any]) -> dict[str, Any]:
    """What training and measuring read of a row."""
    return {name: row[name] for name in COLUMNS if row.get(name) is not None and row[name] is not False}


def prompt_of(row: dict[str, Any]) -> str:
    """What the target was asked first, in a form that can be compared."""
    messages = row.get("messages")
    if messages is None:
        return json.dumps(row.get("prompt"), sort_keys=True, default=str)
    asked = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    return json.dumps(asked, sort_keys=True, default=str)


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a JSON Lines file; what a kill left of a last one is not read."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
