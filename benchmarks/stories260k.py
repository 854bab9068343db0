"""Train a drafter of each kind for a small target that nobody here trained, and measure them beside plain `generate`.

    python benchmarks/stories260k.py --target PATH/stories260K --training-text A.txt --prompt-text B.txt

The target continues beginnings of stories from the one text file; the drafters learn from what it wrote. They are then
compared on the beginnings of 50 stories from the other file: with chains, with trees, and with trees whose score an n-gram
model of the first file has a part in; greedily and sampled (`--temperatures`), where story n starts from the random seed n.
The table is printed, and all figures go to benchmarks/results/stories260k.json. What an earlier run left in `--work` is not
made again; with `--train-only PARD` several processes can train side by side.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging

from hf_pardraft import (
    AutoDrafter,
    DartDrafter,
    DFlareDrafter,
    DFlashDrafter,
    DraftTrainer,
    DraftTrainingArguments,
    NgramModel,
    PardDrafter,
)
from hf_pardraft.evaluation.calls import Condition, run
from hf_pardraft.evaluation.entries import Entry, plain_entry
from hf_pardraft.evaluation.measurement import padded_batch, race
from hf_pardraft.evaluation.report import markdown_table
from hf_pardraft.evaluation.rows import compare
from hf_pardraft.models.base import ParallelDrafter
from result_files import RESULTS, kept, save, this_machine

RESULT = RESULTS / "stories260k.json"
PROMPT_TOKENS = 24
EVALUATION_TOKENS = 16
TEXT_TOKENS = 256
BLOCK_SIZE = 8
TREE_BUDGET = 16
KINDS = ("PARD", "DFlash", "DFlare", "DART")
# All rounds draft alike.
FIXED = {"draft_schedule": "fixed"}


def story_beginnings(path: Path, tokenizer, count: int, length: int) -> torch.LongTensor:
    """The first `length` tokens of up to `count` stories: paragraphs that begin as stories do. `(stories, length)`."""
    starts = ("Once", "One day", "There was", "Lily", "In a")
    paragraphs = [p.strip() for p in path.read_text(encoding="utf-8").split("\n") if p.strip().startswith(starts)]
    ids = [tokenizer(paragraph)["input_ids"][:length] for paragraph in dict.fromkeys(paragraphs)]
    return torch.tensor([story for story in ids if len(story) == length][:count])


def sampled_text(target, beginnings: torch.LongTensor, count: int) -> Dataset:
    """Stories that the target wrote: `count` continuations, each beginning used about equally often."""
    prompts = beginnings.repeat(count // len(beginnings) + 1, 1)[:count]
    examples = []
    for index, batch in enumerate(prompts.split(256)):
        # Short prompts first, long ones later: drafters have to start from both.
        length = (4, 8, 16, PROMPT_TOKENS)[index % 4]
        batch = batch[:, :length]
        sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0} if index % 3 else {"do_sample": False}
        written = target.generate(
            batch, attention_mask=torch.ones_like(batch), max_length=TEXT_TOKENS, pad_token_id=0, **sampling
        )
        for story in written.tolist():
            ends = [i for i, token in enumerate(story) if i >= length and token in (1, 2)]
            end = ends[0] + 1 if ends else len(story)
            examples.append({"input_ids": story[:end], "labels": [-100] * length + story[length:end]})
    return Dataset.from_list(examples)


def train(drafter, target, text: Dataset, steps: int, folder: Path) -> dict:
    """Train in place; returns seconds and the held-out estimate of tau."""
    split = text.train_test_split(test_size=64, seed=0)
    started = time.perf_counter()
    trainer = DraftTrainer(
        model=drafter,
        target=target,
        args=DraftTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            weight_decay=0.01,
            warmup_steps=steps // 20,
            lr_scheduler_type="cosine",
            loss_gamma=4.0,
            num_anchors=48,
            draft_tokens=BLOCK_SIZE,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
    )
    trainer.train()
    scores = trainer.evaluate()
    seconds = round(time.perf_counter() - started)
    return {"seconds": seconds, "steps": steps, "expected_tau": scores["eval_expected_tau"]}


def fresh_drafter(name: str, target, tokenizer):
    """An untrained drafter of one layer; the target has five."""
    if name == "PARD":
        shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 16}
        config = LlamaConfig.from_dict({**target.config.to_dict(), **shape})
        return PardDrafter.from_causal_lm(LlamaForCausalLM(config), tokenizer=tokenizer)
    if name == "DART":
        return DartDrafter.for_target(target, draft_length=BLOCK_SIZE - 1, intermediate_size=512)
    drafter_class = {"DFlash": DFlashDrafter, "DFlare": DFlareDrafter}[name]
    return drafter_class.for_target(
        target,
        num_layers=1,
        block_size=BLOCK_SIZE,
        tokenizer=tokenizer,
        target_layer_ids=[0, 1, 2, 3],
        intermediate_size=512,
    )


def target_text(arguments, target, tokenizer, evaluated: torch.LongTensor) -> Dataset:
    """What the target wrote for the drafters to learn from, made once."""
    folder = arguments.work / "text"
    if not folder.exists():
        beginnings = story_beginnings(arguments.training_text, tokenizer, 4000, PROMPT_TOKENS)
        # The two excerpts of TinyStories may share stories.
        is_new = ~(beginnings[:, None, :EVALUATION_TOKENS] == evaluated).all(dim=-1).any(dim=1)
        sampled_text(target, beginnings[is_new], arguments.rows).save_to_disk(str(folder))
    text = load_from_disk(str(folder))
    if len(text) != arguments.rows:
        sys.exit(
            f"error: {folder} has {len(text)} stories, not {arguments.rows}: give --rows, or another folder as --work"
        )
    return text


def trained_drafter(
    name: str, arguments, target, tokenizer, evaluated: torch.LongTensor
) -> tuple[dict, ParallelDrafter]:
    """How training went, and the drafter, trained if no earlier run did it."""
    folder, log = arguments.work / name, arguments.work / f"{name}.json"
    settings = {"steps": arguments.steps, "rows": arguments.rows}
    report = kept(log, settings)
    if report is None:
        drafter = fresh_drafter(name, target, tokenizer)
        text = target_text(arguments, target, tokenizer, evaluated)
        report = train(drafter, target, text, arguments.steps, arguments.work / f"{name}-run") | settings
        drafter.eval().save_pretrained(folder)
        log.write_text(json.dumps(report) + "\n")
        print(name, report, flush=True)
    return report, AutoDrafter.from_pretrained(folder)


def ngram_folder(arguments, tokenizer) -> str:
    """An n-gram model of order 3 of the training text's stories."""
    folder = arguments.work / "ngram"
    if not folder.exists():
        stories = arguments.training_text.read_text(encoding="utf-8").split("\n")
        documents = [tokenizer(story)["input_ids"] for story in stories if story.strip()]
        NgramModel.from_token_stream(documents, tokenizer=tokenizer, order=3, save_directory=folder)
    return str(folder)


def entries_for(drafters: dict[str, ParallelDrafter], ngram: str) -> list[Entry]:
    """Plain `generate`, and every drafter with every kind of proposal."""
    trees = {"": FIXED, ", tree": {"tree_budget": TREE_BUDGET}}
    trees[", tree + n-gram"] = {"tree_budget": TREE_BUDGET, "ngram_model": ngram}
    return [
        plain_entry(),
        *(
            Entry(f"{name}{suffix}", drafter, settings)
            for name, drafter in drafters.items()
            for suffix, settings in trees.items()
        ),
    ]


def stock_round(target, drafter, prompts: list[torch.LongTensor], max_new_tokens: int) -> dict[str, float]:
    """Milliseconds a round in our loop and in transformers' own, prompts taken in turns."""
    milliseconds = {}
    totals = {loop: [0.0, 0] for loop in ("native", "stock")}
    for prompt in prompts:
        for loop, total in totals.items():
            drafter.generation_config.decode_loop = loop
            timed = run(
                target, Entry(loop, drafter, FIXED), padded_batch([prompt]), Condition(max_new_tokens=max_new_tokens)
            )
            total[0] += timed.seconds
            total[1] += len(timed.tokens_per_round)
    drafter.generation_config.decode_loop = "native"
    for loop, (seconds, rounds) in totals.items():
        milliseconds[loop] = round(1000 * seconds / rounds, 3)
    return milliseconds


def compared(target, entries: list[Entry], prompts: list[torch.LongTensor], arguments) -> list[dict]:
    """The result rows of every temperature, one temperature after the other."""
    options = {"max_new_tokens": arguments.max_new_tokens, "repeats": arguments.repeats}
    conditions = [Condition(temperature=temperature, **options) for temperature in arguments.temperatures]
    return [
        {"temperature": condition.temperature, **asdict(row)}
        for condition in conditions
        for row in compare(race(target, entries, prompts, condition), condition)
    ]


def table_of(rows: list[dict]) -> str:
    """A line for each entry, with tau, tokens/s and speedup at each temperature."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    headings = ["", *(f"{figure}, T={t:g}" for t in temperatures for figure in ("tau", "tokens/s", "speedup", "text"))]
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        line = [name]
        for row in (row for row in rows if row["name"] == name):
            text = {True: "same", False: "OTHER", None: "sampled"}[row["identical"]]
            line += [f"{row['tau']:.2f}", f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x", text]
        lines.append(line)
    return markdown_table(headings, lines)


def story_parser(description: str) -> argparse.ArgumentParser:
    """A parser of what all benchmarks on this target are told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--training-text", type=Path, required=True)
    parser.add_argument("--prompt-text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4096, help="stories to sample for training")
    parser.add_argument("--prompts", type=int, default=50, help="stories to continue")
    return parser


def target_and_prompts(
    arguments: argparse.Namespace,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.LongTensor]:
    """The target, its tokenizer, and the beginnings of stories, `(prompts, tokens)`; libraries are quiet from here on."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    return target, tokenizer, story_beginnings(arguments.prompt_text, tokenizer, arguments.prompts, EVALUATION_TOKENS)


def parse_arguments() -> argparse.Namespace:
    parser = story_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1600, help="training steps of each drafter")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train-only", choices=KINDS, help="train this drafter and stop")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument("--work", type=Path, default=Path("stories260k.work"))
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    set_seed(0)
    target, tokenizer, evaluated = target_and_prompts(arguments)
    if arguments.train_only:
        trained_drafter(arguments.train_only, arguments, target, tokenizer, evaluated)
        return
    report, drafters = {"training": {}}, {}
    for name in KINDS:
        report["training"][name], drafters[name] = trained_drafter(name, arguments, target, tokenizer, evaluated)
    prompts = list(evaluated.split(1))
    entries = entries_for(drafters, ngram_folder(arguments, tokenizer))
    report["rows"] = compared(target, entries, prompts, arguments)
    print(table_of(report["rows"]), flush=True)
    report["milliseconds_per_round"] = {
        name: stock_round(target, drafter, prompts[:20], arguments.max_new_tokens) for name, drafter in drafters.items()
    }
    report["prompts"] = len(prompts)
    report["machine"] = this_machine()
    report["command"] = "python benchmarks/stories260k.py --target ... --training-text ... --prompt-text ..."
    save(arguments.output, report)


if __name__ == "__main__":
    main()
