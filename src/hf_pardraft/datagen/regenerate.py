"""Regenerating a data set: the target rewrites the answers, so that a drafter learns what the target itself would write."""

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tqdm.auto import tqdm
from transformers.utils import logging

from ..user_input.data import load_data
from ..user_input.files import check_file_to_write
from .local_writer import LocalWriter
from .resumable_jsonl import ResumableJsonl, as_line
from .rewriting import PassingError, Rewrite
from .server_writer import ServerWriter

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Shard:
    """One of several processes' part of a data set: rows `number`, `number + count`, ..."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.number < self.count:
            raise ValueError(f"expected a shard number/count with 0 <= number < count, got {self.number}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From `number/count`, such as 0/4.

        Raises:
            ValueError: if it is not of that form.
        """
        number, slash, count = text.partition("/")
        if not (slash and number.strip().isdigit() and count.strip().isdigit()):
            raise ValueError(f"expected a shard as number/count, such as 0/4, got {text!r}")
        return cls(int(number), int(count))

    @classmethod
    def of_this_process(cls) -> "Shard":
        """What `torchrun` or `accelerate launch` says of this process; the whole data set if neither started it."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def path(self, output: str | Path) -> Path:
        """The file of this shard: `answers.jsonl` itself if it is the only one, or `answers-00000-of-00004.jsonl`."""
        output = Path(output)
        if self.count == 1:
            return output
        return output.with_name(f"{output.stem}-{self.number:05d}-of-{self.count:05d}{output.suffix}")


@dataclass
class Regeneration:
    """What became of the rows of a shard.

    Attributes:
        path: the file with the new rows.
        num_rows: of the shard.
        num_before: of them, how many an earlier run had written.
        num_written: how many this run has written.
        failed: index and reason of each row that could not be rewritten. They are in no file, and the next run tries again.
        lasting: which of them will fail again, as long as rows, target and settings are what they are.
        num_tokens: that a local target has written in this run.
        seconds: that it took.
        way_around: what to do about rows that will fail again.
    """

    way_around: ClassVar[str] = "mend them in a data set of their own"

    path: Path
    num_rows: int
    num_before: int = 0
    num_written: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    lasting: set[int] = field(default_factory=set)
    num_tokens: int = 0
    seconds: float = 0.0

    def note_failure(self, index: int, error: Exception) -> None:
        """Note why a row could not be rewritten."""
        self.failed[index] = str(error)
        if not isinstance(error, PassingError):
            self.lasting.add(index)

    def note(self, num_tokens: int, seconds: float) -> str:
        """Note what was written so far; returns what a progress bar says of it."""
        self.num_tokens, self.seconds = num_tokens, seconds
        return f"{num_tokens / seconds:.0f} tokens/s"

    def facts(self) -> dict[str, Any]:
        """What to tell about it, by name."""
        facts = {
            "output": self.path,
            "rows": self.num_rows,
            "written before": self.num_before,
            "written now": self.num_written,
            "failed": len(self.failed),
            **self.prompt_facts(),
        }
        if self.num_tokens:
            facts["tokens written now"] = self.num_tokens
            facts["tokens a second"] = round(self.num_tokens / self.seconds, 1)
        return facts | self.failure_facts()

    def prompt_facts(self) -> dict[str, Any]:
        """What to tell about prompts that were written, too."""
        return {}

    def failure_facts(self) -> dict[str, str]:
        """What to tell about rows that failed, and what to do: those that another try may write, and those that none will."""
        advice = {
            "may pass": "run the same command again, and they are tried again",
            "will stay": f"no further run writes them as they are: do without, or {self.way_around}",
        }
        indices: dict[str, list[int]] = {}
        for index in self.failed:
            indices.setdefault("will stay" if index in self.lasting else "may pass", []).append(index)
        return {
            f"failures that {kind}": f"{len(found)}, such as row {found[0]} ({self.failed[found[0]]}): {advice[kind]}"
            for kind, found in indices.items()
        }


def regenerate(
    data: Any,
    output: str | Path,
    writer: LocalWriter | ServerWriter,
    target_name: str,
    shard: Shard | None = None,
    config: str | None = None,
    split: str = "train",
    progress: bool = True,
) -> Regeneration:
    """Let the target rewrite the answers of a data set; a run that was cut off goes on where it was.

    Args:
        data: what [`~hf_pardraft.user_input.data.load_data`] takes. Rows have `messages` (or `conversations`), or a
            `prompt`, a text or messages, and perhaps a `completion`; other columns are kept.
        output: a .jsonl file. Rows are appended as they are done, each with its `index` in the data set, and `truncated` if
            its answer met the limit of tokens.
        writer: who writes.
        target_name: of the target; like the sampling settings, the data and the shard it must be the same in all runs that
            write one output.
        shard: which rows, those of this process by default.
        config, split: of a data set on the Hub.
        progress: whether to show a bar.

    Raises:
        ValueError: if the output is no .jsonl file or was begun with other settings, or the data set is empty.
        OSError: if the output can't be written, or the server doesn't answer.
    """
    output, shard = check_output(output), shard or Shard.of_this_process()
    rows = load_data(data, config, split)
    num_rows, checksum = survey(shard_rows(rows, shard))
    if not num_rows:
        if next(iter(rows), None) is None:
            raise ValueError("the data set has no row")
        # There are more processes than rows, and an error of one would end the others, too.
        return Regeneration(shard.path(output), 0)
    settings = {
        "target": target_name,
        **writer_settings(writer),
        "rows": num_rows,
        "checksum": checksum,
        "shard": f"{shard.number}/{shard.count}",
    }
    with ResumableJsonl(shard.path(output), settings) as answers:
        result = Regeneration(answers.path, num_rows, len(answers.done))
        started, before = time.monotonic(), writer.num_tokens if isinstance(writer, LocalWriter) else 0
        with tqdm(total=num_rows, initial=len(answers.done), desc=answers.path.name, disable=not progress) as bar:
            missing = ((index, row) for index, row in shard_rows(rows, shard) if index not in answers.done)
            for row in rewritten(missing, writer, result):
                answers.append(row)
                result.num_written += 1
                if isinstance(writer, LocalWriter):
                    bar.set_postfix_str(
                        result.note(writer.num_tokens - before, time.monotonic() - started), refresh=False
                    )
                bar.update()
    for index, reason in result.failed.items():
        logger.warning("row %d was not rewritten: %s", index, reason)
    return result


def check_output(output: str | Path) -> Path:
    """The file to write.

    Raises:
        OSError, ValueError: if it is no .jsonl file, or can't be written.
    """
    if Path(output).suffix != ".jsonl":
        raise ValueError(f"expected a .jsonl file to write to, got {str(output)!r}")
    check_file_to_write(Path(output))
    return Path(output)


def writer_settings(writer: LocalWriter | ServerWriter) -> dict[str, Any]:
    """What of a writer decides which law the answers come from. How fast it writes is free to change between runs."""
    return {
        "temperature": writer.temperature,
        "top_p": writer.top_p,
        "max_tokens": writer.max_tokens,
        "seed": writer.seed,
        "chat_template_kwargs": writer.template_kwargs,
    }


def shard_rows(rows: Iterable[dict[str, Any]], shard: Shard) -> Iterator[tuple[int, dict[str, Any]]]:
    """Indices and rows of a shard."""
    return ((index, row) for index, row in enumerate(rows) if index % shard.count == shard.number)


def survey(rows: Iterable[tuple[int, dict[str, Any]]]) -> tuple[int, int]:
    """How many rows there are, and a checksum of them."""
    count = checksum = 0
    for _, row in rows:
        count += 1
        checksum = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), checksum)
    return count, checksum


def rewritten(
    rows: Iterable[tuple[int, dict[str, Any]]], writer: LocalWriter | ServerWriter, result: Regeneration
) -> Iterator[dict[str, Any]]:
    """The rows that could be rewritten, in the order in which they get done; the others are noted in `result`."""

    def possible() -> Iterator[Rewrite]:
        for index, row in rows:
            try:
                # What can't be written can't be read by a tokenizer, either.
                as_line(row)
                yield Rewrite(index, row)
            except ValueError as error:
                result.note_failure(index, error)

    for outcome in writer.write(possible()):
        rewrite, error = (outcome, None) if isinstance(outcome, Rewrite) else outcome
        if error is None:
            row = rewrite.result()
            try:
                as_line(row)
            except (RecursionError, ValueError) as unwritable:
                # A server may answer otherwise the next time.
                error = PassingError(str(unwritable)) if isinstance(writer, ServerWriter) else unwritable
        if error is None:
            yield row
        else:
            result.note_failure(rewrite.index, error)
