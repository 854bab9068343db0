"""The benchmarks that speculative decoding is measured on: where they are, and how a row becomes a question."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STEP_BY_STEP = "Reason step by step, and put the final answer in \\boxed{}."


@dataclass(frozen=True)
class Question:
    """Something for a target to go on from.

    Attributes:
        messages: the conversation for chat models, as `apply_chat_template` takes it: roles and contents, the user's last.
        completion: the text for models without a chat template.
        later_turns: what the user says next, after the answer, and after the answer to that.
        template_arguments: what the chat template takes besides for this question, `tools` among them.
    """

    messages: tuple[dict[str, Any], ...]
    completion: str
    later_turns: tuple[str, ...] = ()
    template_arguments: dict[str, Any] = field(default_factory=dict)


def asked(text: str, completion: str | None = None) -> Question:
    """A question of one user message; `completion` if a model without a chat template should read something else."""
    return Question(({"role": "user", "content": text},), text if completion is None else completion)


def humaneval(row: dict[str, Any]) -> Question:
    code = row["prompt"]
    return asked(
        f"Complete this Python function, and answer with the whole of it.\n```python\n{code.strip()}\n```", code
    )


def gsm8k(row: dict[str, Any]) -> Question:
    return asked(f"{row['question']}\n{STEP_BY_STEP}", f"Question: {row['question']}\nAnswer:")


def competition(row: dict[str, Any]) -> Question:
    """MATH-500 and AIME. Some copies of both call the problem a question."""
    problem = row["problem"] if "problem" in row else row["question"]
    return asked(f"{problem}\n{STEP_BY_STEP}", f"Problem: {problem}\nSolution:")


def mbpp(row: dict[str, Any]) -> Question:
    # The sanitized half of the data set calls the text a prompt.
    task = row["text"] if "text" in row else row["prompt"]
    tests = "\n".join(row["test_list"])
    return asked(
        f"{task}\nWrite it in Python. It has to pass these tests:\n```python\n{tests}\n```",
        f'"""\n{task}\n{tests}\n"""\n',
    )


def turns(row: dict[str, Any]) -> Question:
    """MT-bench on the Hub (`prompt`) and as published (`turns`), and Spec-Bench."""
    first, *later = row["turns"] if "turns" in row else row["prompt"]
    return Question(({"role": "user", "content": first},), first, tuple(later))


def alpaca(row: dict[str, Any]) -> Question:
    context = row.get("input") or ""
    text = f"{row['instruction']}\n\n{context}" if context else row["instruction"]
    return asked(text, f"{text}\n\nResponse:")


def livecodebench(row: dict[str, Any]) -> Question:
    task, starter = row["question_content"], row.get("starter_code") or ""
    rest = (
        f"\nBegin with this code:\n```python\n{starter}\n```"
        if starter
        else "\nRead standard input, write standard output."
    )
    return asked(f"{task}\n\nSolve this in Python.{rest}", f'"""\n{task}\n"""\n{starter}')


@dataclass(frozen=True)
class Benchmark:
    """A data set and what to ask.

    Attributes:
        columns: of which a row must have at least one of each tuple.
        question: makes a question of a row.
        path, config, split, data_files: arguments of `datasets.load_dataset`.
    """

    columns: tuple[tuple[str, ...], ...]
    question: Callable[[dict[str, Any]], Question]
    path: str
    split: str
    config: str | None = None
    data_files: str | None = None

    def missing_columns(self, row: dict[str, Any]) -> list[str]:
        """What `row` should have and has not."""
        return [" or ".join(names) for names in self.columns if not any(name in row for name in names)]


BENCHMARKS = {
    "humaneval": Benchmark((("prompt",),), humaneval, "openai/openai_humaneval", "test"),
    "gsm8k": Benchmark((("question",),), gsm8k, "openai/gsm8k", "test", config="main"),
    "math500": Benchmark((("problem", "question"),), competition, "HuggingFaceH4/MATH-500", "test"),
    "mbpp": Benchmark(
        (("text", "prompt"), ("test_list",)), mbpp, "google-research-datasets/mbpp", "test", config="full"
    ),
    "mt_bench": Benchmark((("prompt", "turns"),), turns, "HuggingFaceH4/mt_bench_prompts", "train"),
    # Published as a file of its authors' repository.
    "spec_bench": Benchmark(
        (("turns",),),
        turns,
        "json",
        "train",
        data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "alpaca": Benchmark((("instruction",),), alpaca, "tatsu-lab/alpaca", "train"),
    "aime": Benchmark((("problem", "question"),), competition, "HuggingFaceH4/aime_2024", "train"),
    # The data set is a script, which `datasets` no longer runs; this is its newest file.
    "livecodebench": Benchmark(
        (("question_content",),),
        livecodebench,
        "json",
        "train",
        data_files="hf://datasets/livecodebench/code_generation_lite/test6.jsonl",
    ),
}
