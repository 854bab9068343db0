"""Packs what `pardraft regenerate --self-prompts` wrote, and counts it in the README beside it.

    python benchmarks/pack_dialogues.py --tokenizer TARGET --hours 1.2 --to benchmarks/data/NAME greedy.jsonl sampled.jsonl

Each file becomes NAME.jsonl.gz, which `datasets` and so `pardraft train --dataset` read; several are read together as
"benchmarks/data/NAME/*.jsonl.gz". A file that is being written may be packed, too: a line that is not whole yet is left out.
The table of counts in the folder's README.md, between two marks, is renewed.
"""

import argparse
import gzip
import json
import statistics
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

MARKS = ("<!-- counts -->", "<!-- end of counts -->")
HEAD = (
    "| file | dialogues | of several turns | answers | tokens of answers | of prompts | answers cut off | mean answer |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def read_whole_lines(path: Path) -> list[dict]:
    """The dialogues of a file, by their index."""
    lines = path.read_bytes().splitlines(keepends=True)
    return sorted((json.loads(line) for line in lines if line.endswith(b"\n")), key=lambda row: row["index"])


def pack(rows: list[dict], path: Path) -> None:
    """Write them such that the same rows give the same bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def count(rows: list[dict], tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """A line of the table."""
    lengths: dict[str, list[int]] = {"user": [], "assistant": []}
    for row in rows:
        for message in row["messages"]:
            lengths[message["role"]].append(len(tokenizer(message["content"])["input_ids"]))
    turns = Counter(len(row["messages"]) // 2 for row in rows)
    answers, cut = lengths["assistant"], sum(row["truncated"] for row in rows)
    return (
        f"| {name} | {len(rows):,} | {len(rows) - turns[1]:,} | {len(answers):,} | {sum(answers):,} | "
        f"{sum(lengths['user']):,} | {cut:,} | {statistics.mean(answers):.0f} tokens |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what was written, .jsonl")
    parser.add_argument("--to", type=Path, required=True, help="folder with a README.md that has the marks")
    parser.add_argument("--tokenizer", required=True, help="of the target")
    parser.add_argument("--hours", required=True, help="that the writing has taken so far")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    readme = options.to / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = HEAD
    for file in options.files:
        rows, packed = read_whole_lines(file), options.to / f"{file.name}.gz"
        pack(rows, packed)
        table += count(rows, tokenizer, packed.name)
    told = f"{MARKS[0]}\nWritten in {options.hours} hours:\n\n{table}{MARKS[1]}"
    readme.write_text(before + told + after, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
