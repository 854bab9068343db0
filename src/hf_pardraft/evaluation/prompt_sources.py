"""Questions by the name of a benchmark, or from a file."""

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..user_input.conversations import template_inputs, without_nones
from ..user_input.files import decode_text, parse_json, read_text
from .prompts import BENCHMARKS, Question, alpaca, asked, turns

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".json")
OWN_COLUMNS = (
    "messages (a conversation), turns (a list of what the user says), prompt, question, problem, instruction or text"
)


@dataclass(frozen=True)
class PromptSource:
    """Where questions come from: `benchmark` (a name), `file`, or a file with a benchmark's columns."""

    benchmark: str | None
    file: Path | None

    @property
    def name(self) -> str:
        """What the results call them; of a file only its own name, since results are published."""
        return self.benchmark or self.file.name


def read_source(spec: str) -> PromptSource:
    """Understand `--prompts`: a benchmark's name, a file, or `benchmark=file`.

    Raises:
        ValueError: if it is none of them.
    """
    known = ", ".join(BENCHMARKS)
    if spec in BENCHMARKS:
        return PromptSource(spec, None)
    name, has_file, path = spec.partition("=")
    if has_file and name in BENCHMARKS:
        file = Path(path)
    elif Path(spec).is_file():
        name, file = None, Path(spec)
    else:
        raise ValueError(
            f"no prompts {spec!r}: expected a file, one of {known}, or one of them with a file, as in gsm8k=test.jsonl"
        )
    if not file.is_file():
        raise ValueError(f"no prompts for {name}: there is no file {path!r}")
    suffixes = ROW_SUFFIXES if name else (*ROW_SUFFIXES, *TEXT_SUFFIXES)
    if not file.name.endswith(suffixes):
        raise ValueError(f"can't tell what is in {file.name}: expected a name that ends in {', '.join(suffixes)}")
    return PromptSource(name, file)


def load_questions(source: PromptSource, limit: int | None = None) -> list[Question]:
    """The questions of a source; of more than `limit` that many, evenly over all, since some are sorted by task.

    Raises:
        ImportError: if a benchmark is wanted from the Hub and `datasets` is not installed.
        ValueError: if there is no question, or a row lacks a column.
        OSError: if a file or the Hub can't be read.
    """
    if source.file is not None and source.file.name.endswith(TEXT_SUFFIXES):
        lines = read_text(source.file).split("\n")
        questions = [asked(line) for line in evenly([line for line in lines if line.strip()], limit)]
    else:
        rows = read_rows(source.file) if source.file else hub_rows(source.benchmark)
        # Numbered before most are left out: a message names the row of the file.
        numbers = evenly(range(len(rows)), limit)
        questions = questions_of(((number + 1, rows[number]) for number in numbers), source)
    if not questions:
        raise ValueError(f"there is no prompt in {source.file or source.benchmark}: expected one per line")
    return questions


def evenly(rows: Any, limit: int | None) -> list[Any]:
    """Up to `limit` of the rows, in their order, the same distance apart."""
    count = len(rows) if limit is None else min(limit, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def questions_of(rows: Iterable[tuple[int, dict[str, Any]]], source: PromptSource) -> list[Question]:
    """A question of each row, which comes with its number."""
    benchmark = BENCHMARKS.get(source.benchmark)
    questions = []
    for number, row in rows:
        where = f"prompt {number} of {source.name}"
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object: expected the columns of a question, got {type(row).__name__}")
        if benchmark is None:
            questions.append(own_question(row, where))
            continue
        missing = benchmark.missing_columns(row)
        if missing:
            raise ValueError(
                f"{where} has the columns {sorted(row)}: expected {' and '.join(missing)} for {source.benchmark}"
            )
        questions.append(benchmark.question(row))
    return questions


def own_question(row: dict[str, Any], where: str) -> Question:
    """A question of a user's own row, whichever of [`OWN_COLUMNS`] it has.

    Raises:
        ValueError: if it has none of them, or not of the right type.
    """
    conversation = row.get("messages", row.get("prompt"))
    if isinstance(conversation, list) and conversation and all(isinstance(part, dict) for part in conversation):
        return conversation_question(conversation, where, template_arguments_of(row, where))
    if "turns" in row or isinstance(row.get("prompt"), list):
        said = row.get("turns", row.get("prompt"))
        if not isinstance(said, list) or not said or not all(isinstance(turn, str) and turn for turn in said):
            raise ValueError(f"{where}: expected turns to be a list of texts, got {said!r:.80}")
        return turns({"turns": said})
    column = next((name for name in ("prompt", "question", "problem", "instruction", "text") if name in row), None)
    if column is None:
        raise ValueError(f"{where} has the columns {sorted(row)}: expected {OWN_COLUMNS}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise ValueError(f"{where}: expected {column} to be a text, got {row[column]!r:.80}")
    return alpaca(row) if column == "instruction" else asked(row[column])


def template_arguments_of(row: dict[str, Any], where: str) -> dict[str, Any]:
    """What a row says to the chat template besides its messages: its `tools` (perhaps as JSON), and `chat_template_kwargs`."""
    try:
        tools, own = template_inputs(row, {})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return ({"tools": tools} if tools else {}) | own


def conversation_question(messages: list[dict[str, Any]], where: str, template_arguments: dict[str, Any]) -> Question:
    """A conversation up to its last user message, which is what is to be answered."""
    messages = [without_nones(message) for message in messages]
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError(f"{where}: expected each message to have a role")
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{where}: expected a message of the role 'user', got {[m['role'] for m in messages]}")
    kept = tuple(messages[: last + 1])
    for message in kept:
        # A call of a tool needs no text, and the chat template has a say in the rest.
        if not isinstance(message.get("content", [] if "tool_calls" in message else None), str | list):
            raise ValueError(f"{where}: expected each message to have a role and a content that is a text")
    texts = [text for message in kept for text in texts_of(message.get("content", []))]
    return Question(kept, "\n\n".join(texts), template_arguments=template_arguments)


def texts_of(content: str | list[Any]) -> list[str]:
    """The texts of a message's content, which may come in parts."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def read_rows(file: Path) -> list[Any]:
    """The rows of a JSON Lines file (perhaps gzipped), or of a JSON file with a list.

    Raises:
        ValueError: if it is not JSON.
    """
    data = file.read_bytes()
    try:
        text = decode_text(gzip.decompress(data) if file.name.endswith(".gz") else data, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"can't read {file}: {error}") from error
    if not file.name.endswith(".json"):
        # A line ends at a line feed only: JSON texts may hold other separators as they are.
        lines = enumerate(text.split("\n"), start=1)
        return [parse_json(line, f"{file}, line {number},") for number, line in lines if line.strip()]
    rows = parse_json(text, file)
    if not isinstance(rows, list):
        raise ValueError(
            f"expected a list of rows in {file}, got {type(rows).__name__}: one object per line goes in a .jsonl file"
        )
    return rows


def hub_rows(name: str) -> Any:
    """The rows of a benchmark's data set."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "benchmarks come through datasets: pip install datasets, or pass a file as --prompts"
        ) from error
    benchmark = BENCHMARKS[name]
    options = {"data_files": benchmark.data_files} if benchmark.data_files else {"name": benchmark.config}
    try:
        return load_dataset(benchmark.path, split=benchmark.split, **options)
    except OSError as error:
        raise OSError(
            f"can't get {name} from the Hub ({error}): --prompts {name}=FILE reads its rows from a file"
        ) from error
