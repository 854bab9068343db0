"""What smollm2.py measures: the target and its drafters, the papers' benchmarks, and the ways to decode."""

import hashlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_pardraft.demo.family import DRAFTER_NAMES
from hf_pardraft.evaluation.encoding import Chat, encode_all, room_for_prompts
from hf_pardraft.evaluation.entries import (
    Entry,
    compiled_twin,
    prompt_lookup_entry,
    stock_dflash_entries,
)
from hf_pardraft.evaluation.prompt_sources import load_questions, read_source
from hf_pardraft.generation.settings import DEFAULT_LOOKUP
from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.user_input.models import load_drafter, load_model, load_tokenizer

# What a table calls each benchmark, and where `--data` has it. In the order of the tables.
BENCHMARKS = {
    "humaneval": ("HumanEval", "humaneval/HumanEval.jsonl.gz"),
    "mbpp": ("MBPP", "mbpp/mbpp.jsonl"),
    "gsm8k": ("GSM8K", "gsm8k/test.jsonl"),
    "math500": ("MATH-500", "math500/math500.jsonl"),
    "mt_bench": ("MT-Bench", "mt_bench/question.jsonl"),
    "spec_bench": ("Spec-Bench", "spec_bench/question.jsonl"),
}
SHAPES = ("chain", "tree")
# What a table calls the ways of a drafter. "With n-grams": trees that the model of `--ngrams` chooses. "With text": trees that
# hold what the text itself suggests, too; "auto" has them.
DRAFTED = {
    "chain": "chain",
    "tree": "tree",
    "tree_ngrams": "tree with n-grams",
    "tree_text": "tree with text",
    "auto": "auto",
    "auto_alone": "auto without text",
}
SCHEDULED = ("auto", "auto_alone")
WAYS = ("prompt_lookup", "stock_dflash", *DRAFTED)


@dataclass(frozen=True)
class Way:
    """An entry and what tables need to know of it.

    Attributes:
        entry: how to decode.
        way: one of [`WAYS`].
        drafter: its name; `None` for prompt lookup.
        compiled: whether its rounds are compiled.
    """

    entry: Entry
    way: str
    drafter: str | None = None
    compiled: bool = False

    def facts(self, weights: dict[str, str]) -> dict[str, Any]:
        """What sets a row apart; a drafter that was trained on is another one."""
        return {
            "name": self.entry.name,
            "way": self.way,
            "drafter": self.drafter,
            "compiled": self.compiled,
            "weights": weights.get(self.drafter),
        }


@dataclass(frozen=True)
class Models:
    """A target and its drafters in one dtype; `weights` tells states of a drafter's training apart."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, ParallelDrafter]
    weights: dict[str, str]

    def about_drafters(self) -> dict[str, dict[str, Any]]:
        """What the result says of each drafter."""
        return {
            name: {
                "kind": drafter.config.drafter_kind,
                "depth": drafter.draft_depth,
                "parameters": drafter.num_parameters(),
                "weights": self.weights[name],
            }
            for name, drafter in self.drafters.items()
        }


def load_drafters(folder: Path, dtype: torch.dtype) -> tuple[dict[str, ParallelDrafter], dict[str, Path]]:
    """The drafters in a folder, or the one that it is, and where each is, by name: its kind, or its folder if two are of a kind.

    Raises:
        OSError, ValueError: if there is none, or one can't be loaded.
    """
    single = (folder / "config.json").is_file()
    paths = [folder] if single else sorted(path.parent for path in folder.glob("*/config.json"))
    if not paths:
        raise ValueError(f"expected drafters in {folder}, a folder each, and there is no */config.json")
    loaded = [load_drafter(str(path), dtype=dtype).eval() for path in paths]
    kinds = [drafter.config.drafter_kind for drafter in loaded]
    names = [
        DRAFTER_NAMES[kind] if kinds.count(kind) == 1 else path.name for kind, path in zip(kinds, paths, strict=True)
    ]
    order = sorted(range(len(paths)), key=lambda index: ([*DRAFTER_NAMES].index(kinds[index]), names[index]))
    return {names[index]: loaded[index] for index in order}, {names[index]: paths[index] for index in order}


def load_all(arguments: Namespace, dtype: str) -> Models:
    """The target and the drafters that were asked for, in a dtype.

    Raises:
        OSError, ValueError: if one can't be loaded, or does not fit the target.
    """
    drafters, paths = load_drafters(arguments.drafters, getattr(torch, dtype))
    unknown = [name for name in arguments.names or [] if name not in drafters]
    if unknown:
        raise ValueError(f"no drafter in {arguments.drafters} is called {unknown[0]}: there are {', '.join(drafters)}")
    chosen = {name: drafter for name, drafter in drafters.items() if not arguments.names or name in arguments.names}
    target = load_model(str(arguments.target), dtype=getattr(torch, dtype)).eval()
    for drafter in chosen.values():
        drafter.check_target(target)
    weights = {name: digest_of(paths[name]) for name in chosen}
    return Models(target, load_tokenizer(str(arguments.target)), chosen, weights)


def digest_of(folder: Path) -> str:
    """The beginning of a SHA-256 over a drafter's weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def prompts_of(benchmark: str, models: Models, arguments: Namespace) -> list[torch.LongTensor]:
    """Token ids of `(1, length)` each, as `pardraft eval --first-turn-only` takes them, the chat template applied.

    Raises:
        ImportError, OSError, ValueError: if they can't be had.
    """
    file = arguments.data and arguments.data / BENCHMARKS[benchmark][1]
    questions = load_questions(read_source(f"{benchmark}={file}" if file else benchmark), arguments.limit)
    chat = Chat(models.tokenizer.chat_template is not None)
    room = room_for_prompts(models.target.config, arguments.max_new_tokens)
    prompts, _ = encode_all(questions, models.tokenizer, chat, None, room)
    if not prompts:
        raise ValueError(
            f"no prompt of {benchmark} leaves room for {arguments.max_new_tokens} new tokens in the target's context: ask for "
            "fewer, or for more prompts"
        )
    return prompts


def setting_of(
    way: str, tree_budget: int, lookup_tokens: int = DEFAULT_LOOKUP, ngrams: Path | None = None
) -> dict[str, Any]:
    """What makes a drafter decode so: fixed ways draft as deep as the drafter can in every round."""
    if way in SCHEDULED:
        return {"draft_schedule": "auto", **({"prompt_lookup_num_tokens": 0} if way == "auto_alone" else {})}
    more: dict[str, Any] = {"prompt_lookup_num_tokens": lookup_tokens} if way == "tree_text" else {}
    if way == "tree_ngrams":
        more = {"ngram_model": str(ngrams)}
    return {"draft_schedule": "fixed", "tree_budget": 0 if way == "chain" else tree_budget, **more}


def ways_of(models: Models, arguments: Namespace, batch_size: int) -> list[Way]:
    """All that is compared with plain `generate`, eager ones first."""
    ways = [Way(prompt_lookup_entry(), "prompt_lookup")]
    stock = [name for name, drafter in models.drafters.items() if drafter.config.drafter_kind == "dflash"]
    if stock:
        entries = stock_dflash_entries({name: models.drafters[name] for name in stock})
        ways += [Way(entry, "stock_dflash", name) for entry, name in zip(entries, stock, strict=True)]
    for name, drafter in models.drafters.items():
        for way, title in DRAFTED.items():
            if way == "tree_ngrams" and arguments.ngrams is None:
                continue
            setting = setting_of(way, arguments.tree_budget, arguments.lookup_tokens, arguments.ngrams)
            ways.append(Way(Entry(f"{name}, {title}", drafter, setting), way, name))
    ways = [each for each in ways if each.way in arguments.only]
    if "compiled" in arguments.rounds:
        ways += [
            Way(compiled_twin(each.entry), each.way, each.drafter, True)
            for each in ways
            if not each.entry.one_at_a_time
        ]
    if "eager" not in arguments.rounds:
        ways = [each for each in ways if each.compiled]
    # transformers' own loops take one text at a time.
    return [each for each in ways if batch_size == 1 or not each.entry.one_at_a_time]
