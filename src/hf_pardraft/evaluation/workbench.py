"""An evaluation from its plan on: everything loaded and checked, measured, and shown."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.atomic_files import write_whole
from ..generation.settings import read_settings
from ..models.base import ParallelDrafter
from ..pairing.chat_format import has_chat_template
from ..pairing.mask_token import special_token_ids
from ..pairing.remembered import public_name
from ..user_input.models import end_of_text_ids, load_config, load_tokenizer
from .calls import Condition, call, generation_config, new_texts
from .encoding import Chat, encode_all, random_prompts, room_for_prompts
from .entries import (
    Entry,
    assisted_entry,
    drafter_entries,
    plain_entry,
    prompt_lookup_entry,
    stock_dflash_entries,
    with_compiled,
)
from .facts import facts_of
from .measurement import Around
from .models import assistant_tokenizers, load_fitting_drafter, load_target
from .plan import EvaluationPlan
from .plots import save_plots
from .report import (
    LEGEND,
    Report,
    as_json,
    difference_lines,
    drafts_table,
    markdown,
    print_table,
    screen_table,
    skipped_line,
)
from .runner import evaluate_conditions


@dataclass(frozen=True)
class Workbench:
    """Everything that an evaluation needs, loaded and checked.

    Attributes:
        plan: what was asked for.
        target, drafters: the models; drafters by name.
        entries: all that is to be compared, plain `generate` first.
        prompts: token ids, each `(1, length)`.
        report: has facts and no rows yet.
        around: the context of each call.
    """

    plan: EvaluationPlan
    target: PreTrainedModel
    drafters: dict[str, ParallelDrafter]
    entries: list[Entry]
    prompts: list[torch.LongTensor]
    report: Report
    around: Around = lambda entry: nullcontext()


@dataclass(frozen=True)
class Encoding:
    """How prompts become token ids.

    Attributes:
        config: of the target.
        tokenizer: `None` for random tokens.
        chat: the template is used if there is one, and if nobody said otherwise.
        room: tokens that a prompt may have; `None` for any number.
    """

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    chat: Chat
    room: int | None

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config(decoder=True).vocab_size


def evaluate(bench: Workbench, screen: Console, notes: Console) -> Report:
    """Measure, print the table, and write the files that were asked for.

    Args:
        bench: what to measure.
        screen: for the table.
        notes: for what goes on meanwhile.

    Raises:
        ValueError: if nothing could be measured.
    """
    conditions = bench.plan.conditions
    for note in evaluate_conditions(bench.target, bench.entries, bench.prompts, conditions, bench.report, bench.around):
        notes.print(note)
        save_json(bench)
    show(bench, screen, notes)
    return bench.report


def prepare(plan: EvaluationPlan, notes: Console) -> Workbench:
    """Load and check everything.

    Raises:
        ImportError, OSError: if a model or the prompts can't be had.
        ValueError: if they don't fit together. All this before anything is measured, and mostly before the target is loaded.
    """
    encoding = encoding_for(plan)
    drafters = {
        name: load_fitting_drafter(source, plan.placement, encoding.vocab_size)
        for name, source in plan.contenders.drafters.items()
    }
    check_settings(drafters, plan)
    small = {name: load_target(name, plan.placement) for name in plan.contenders.small_models}
    target = load_target(plan.target, plan.placement, plan.random_weights)
    return lay_out(plan, encoding, target, drafters, small, notes)


def encoding_for(plan: EvaluationPlan) -> Encoding:
    """How prompts will be encoded, as far as the plan, the configuration and the tokenizer tell."""
    trusts_code = plan.placement.trust_remote_code
    config = load_config(plan.target, trusts_code)
    room = room_for_prompts(config, plan.max_new_tokens)
    tokenizer = None
    if plan.prompts.questions is not None or plan.tokenizer:
        tokenizer = load_tokenizer(plan.tokenizer or plan.target, trusts_code)
    arguments = plan.chat.template_arguments
    use_template = plan.chat.use_template and tokenizer is not None and has_chat_template(tokenizer, arguments)
    if arguments and not use_template:
        raise ValueError(
            f"{plan.tokenizer or plan.target} has no chat template, or was told not to use it: leave out --chat-argument"
        )
    return Encoding(config, tokenizer, Chat(use_template, arguments), room)


def lay_out(
    plan: EvaluationPlan,
    encoding: Encoding,
    target: PreTrainedModel,
    drafters: dict[str, ParallelDrafter],
    small_models: dict[str, PreTrainedModel],
    notes: Console,
) -> Workbench:
    """All that is to be compared and continued, of models that are loaded; raises what [`prepare`] does."""
    for drafter in drafters.values():
        drafter.check_target(target)
    entries = [plain_entry(), *drafter_entries(drafters, plan.contenders.choices)]
    entries += baseline_entries(plan.contenders.baselines, drafters, small_models, encoding)
    if plan.contenders.compiled:
        entries = with_compiled(entries)
    notes.print(f"Preparing prompts from {plan.prompts.name} ...")
    prompts, num_left_out = make_prompts(plan, encoding, target)
    largest = max(condition.batch_size for condition in plan.conditions)
    if largest > len(prompts):
        raise ValueError(
            f"a batch of {largest} needs as many prompts, got {len(prompts)} ({num_left_out} were left out, since they are "
            "empty or do not fit into the target's context)"
        )
    prompt_facts = {
        "name": plan.prompts.name,
        "count": len(prompts),
        "left_out": num_left_out,
        "chat_template": encoding.chat.use_template,
        "chat_arguments": encoding.chat.template_arguments,
    }
    report = Report(facts_of(plan, target, drafters, prompt_facts))
    return Workbench(plan, target, drafters, entries, prompts, report)


def check_settings(drafters: dict[str, ParallelDrafter], plan: EvaluationPlan) -> None:
    """Raise a `ValueError` if a drafter can't do what a setting asks for."""
    for entry in drafter_entries(drafters, plan.contenders.choices):
        try:
            entry.assistant.checked_depth(entry.setting.get("num_assistant_tokens"))
            read_settings(entry.assistant, GenerationConfig(**entry.setting))
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from error


def baseline_entries(
    baselines: list[str],
    drafters: dict[str, ParallelDrafter],
    small_models: dict[str, PreTrainedModel],
    encoding: Encoding,
) -> list[Entry]:
    """transformers' own ways to compare with."""
    entries = [
        assisted_entry(
            public_name(model) or name,
            model,
            assistant_tokenizers(name, model, encoding.vocab_size, encoding.tokenizer),
        )
        for name, model in small_models.items()
    ]
    if "prompt_lookup" in baselines:
        entries.append(prompt_lookup_entry())
    if "stock_dflash" in baselines:
        entries += stock_dflash_entries(drafters)
    return entries


def make_prompts(
    plan: EvaluationPlan, encoding: Encoding, target: PreTrainedModel
) -> tuple[list[torch.LongTensor], int]:
    """Token ids of `(1, length)` each, and how many prompts were left out."""
    asked = plan.prompts
    if asked.questions is None:
        if encoding.room is not None and asked.random_length > encoding.room:
            raise ValueError(
                f"prompts of {asked.random_length} tokens do not fit: {encoding.room} is what the target's context has room for"
            )
        return random_prompts(asked.limit, asked.random_length, encoding.vocab_size, ending_tokens(target)), 0
    plain, condition = plain_entry(), Condition(max_new_tokens=plan.max_new_tokens)

    def answer(prompt: torch.LongTensor) -> list[int]:
        batch = {"input_ids": prompt.to(target.device), "attention_mask": torch.ones_like(prompt).to(target.device)}
        config = generation_config(plain, condition)
        return list(new_texts(target, batch, call(target, plain, batch, config), config)[0])

    say = None if plan.first_turn_only else answer
    prompts, num_left_out = encode_all(asked.questions, encoding.tokenizer, encoding.chat, say, encoding.room)
    if not prompts:
        raise ValueError(
            f"no prompt of {asked.name} leaves room for {plan.max_new_tokens} new tokens in the target's context"
        )
    return prompts, num_left_out


def ending_tokens(target: PreTrainedModel) -> set[int]:
    """Tokens that begin, end or pad a text."""
    return special_token_ids(target.config.get_text_config(decoder=True), None) | end_of_text_ids(target)


def save_json(bench: Workbench) -> None:
    """Write what is known so far, if it was asked for; before anything is known, an earlier file stays."""
    if bench.plan.outputs.json and bench.report.rows:
        write_whole(bench.plan.outputs.json, as_json(bench.report))


def show(bench: Workbench, screen: Console, notes: Console) -> None:
    """Print the tables, and write what else was asked for."""
    if not bench.report.rows:
        raise ValueError(f"nothing could be measured: {'; '.join(map(skipped_line, bench.report.skipped))}")
    # Neither a full disk nor a pipe whose reader has left costs the other.
    try:
        save_tables_and_plots(bench, notes)
    finally:
        print_report(bench.report, screen)


def save_tables_and_plots(bench: Workbench, notes: Console) -> None:
    """Write those that were asked for."""
    outputs = bench.plan.outputs
    if outputs.markdown:
        write_whole(outputs.markdown, markdown(bench.report))
    if outputs.plots:
        for path in save_plots(bench.report, outputs.plots):
            notes.print(f"Wrote {path}", highlight=False)


def print_report(report: Report, screen: Console) -> None:
    """Print all that people are told."""
    print_table(screen_table(report), screen)
    if any(row.acceptance_by_position for row in report.rows):
        print_table(drafts_table(report), screen)
    screen.print(LEGEND, highlight=False, style="dim")
    for line in difference_lines(report.rows):
        screen.print(f"{line}.", highlight=False)
    for entry in report.skipped:
        screen.print(f"Not measured: {skipped_line(entry)}.", highlight=False)
