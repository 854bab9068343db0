"""What the command `pardraft eval` does; cli/app.py only reads its arguments."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.atomic_files import write_whole
from ..evaluation.benchmark import end_of_text_ids
from ..evaluation.encoding import Chat, encode_all, random_prompts, room_for_prompts
from ..evaluation.entries import (
    Entry,
    assisted_entry,
    drafter_entries,
    plain_entry,
    prompt_lookup_entry,
    stock_dflash_entries,
    with_compiled,
)
from ..evaluation.facts import facts_of
from ..evaluation.measurement import Around, Condition, call, generation_config, new_texts
from ..evaluation.models import assistant_tokenizers, load_drafter, load_target, new_drafter
from ..evaluation.plan import EvalRequest, Plan, make_plan
from ..evaluation.plots import save_plots
from ..evaluation.report import (
    LEGEND,
    Report,
    as_json,
    difference_lines,
    drafts_table,
    markdown,
    screen_table,
    skipped_line,
)
from ..evaluation.runner import evaluate_conditions
from ..evaluation.simulation import Simulation, depth_of, write_script
from ..generation.schedule import is_readable
from ..generation.settings import read_settings
from ..models.base import ParallelDrafter
from ..pairing.mask_token import special_token_ids
from ..pairing.remembered import public_name
from ..user_input.models import load_config, load_tokenizer


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

    plan: Plan
    target: PreTrainedModel
    drafters: dict[str, ParallelDrafter]
    entries: list[Entry]
    prompts: list[torch.LongTensor]
    report: Report
    around: Around


def evaluate(request: EvalRequest, screen: Console, notes: Console) -> Report:
    """Measure, print the table, and write the files that were asked for.

    Args:
        request: what to do.
        screen: for the table.
        notes: for what goes on meanwhile.

    Raises:
        ImportError: if something is wanted that needs a package which is not installed.
        OSError: if a model, the prompts or an output can't be had.
        ValueError: if the request can't be met. All this before anything is measured, and mostly before a model is loaded.
    """
    if request.output is not None:
        raise ValueError("--output is where --tune saves the tuned drafter: add --tune, or leave it out")
    bench = prepare(request, make_plan(request), notes)
    conditions = conditions_of(request, bench.plan)
    for note in evaluate_conditions(bench.target, bench.entries, bench.prompts, conditions, bench.report, bench.around):
        notes.print(note)
        save_json(request, bench.report)
    show(request, bench.report, screen, notes)
    return bench.report


def save_json(request: EvalRequest, report: Report) -> None:
    """Write what is known so far, if it was asked for."""
    if request.json:
        write_whole(request.json, as_json(report))


def forget_unreadable_tables(drafters: dict[str, ParallelDrafter], notes: Console) -> None:
    """Tune as if for the first time where an earlier tuning's table is no such."""
    for drafter in drafters.values():
        tuned = vars(drafter.generation_config).get("tuned_drafting")
        if tuned is not None and not is_readable(tuned, drafter.max_draft_depth):
            notes.print("The table of an earlier tuning can't be read, and is replaced.")
            del drafter.generation_config.tuned_drafting


def prepare(request: EvalRequest, plan: Plan, notes: Console) -> Workbench:
    """Load and check everything; raises what [`evaluate`] does."""
    trusts_code = request.placement.trust_remote_code
    config = load_config(request.target, trusts_code)
    room = room_for_prompts(config, request.max_new_tokens)
    tokenizer = None
    if plan.questions is not None or request.tokenizer:
        tokenizer = load_tokenizer(request.tokenizer or request.target, trusts_code)
    chat = chat_for(request, plan, tokenizer)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    loaded = {
        name: load_drafter(source, request.placement, vocab_size)
        for name, source in plan.drafters.items()
        if source.kind is None
    }
    if request.tune:
        forget_unreadable_tables(loaded, notes)
    check_settings(loaded, plan)
    small = [load_target(name, request.placement, random_weights=False) for name in plan.small_models]
    target = load_target(request.target, request.placement, request.random_weights)
    drafters = {
        name: loaded[name] if name in loaded else new_drafter(source, target, tokenizer)
        for name, source in plan.drafters.items()
    }
    check_settings(drafters, plan)
    for drafter in drafters.values():
        drafter.check_target(target)
    entries = [plain_entry(), *drafter_entries(drafters, plan.choices)]
    entries += baseline_entries(
        request, drafters, list(zip(plan.small_models, small, strict=True)), vocab_size, tokenizer
    )
    if request.compiled:
        entries = with_compiled(entries)
    notes.print(f"Preparing prompts from {plan.prompts_name} ...")
    prompts, num_left_out = make_prompts(request, plan, target, tokenizer, chat, room)
    if max(request.batch_sizes) > len(prompts):
        raise ValueError(
            f"a batch of {max(request.batch_sizes)} needs as many prompts, got {len(prompts)} ({num_left_out} were left out, "
            "since they are empty or do not fit into the target's context)"
        )
    around = simulation_for(request, plan, target, entries, prompts)
    prompt_facts = {
        "name": plan.prompts_name,
        "count": len(prompts),
        "left_out": num_left_out,
        "chat_template": chat.use_template,
        "chat_arguments": plan.chat_arguments,
    }
    report = Report(facts_of(request, plan, target, drafters, prompt_facts))
    return Workbench(plan, target, drafters, entries, prompts, report, around)


def chat_for(request: EvalRequest, plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> Chat:
    """Whether and how to use the chat template: where there is one, unless told otherwise."""
    use_template = request.chat_template and tokenizer is not None and tokenizer.chat_template is not None
    if plan.chat_arguments and not use_template:
        raise ValueError(
            f"{request.tokenizer or request.target} has no chat template, or was told not to use it: leave out --chat-argument"
        )
    return Chat(use_template, plan.chat_arguments)


def check_settings(drafters: dict[str, ParallelDrafter], plan: Plan) -> None:
    """Raise a `ValueError` if a drafter can't do what a setting asks for, or the profile says too little for it."""
    for entry in drafter_entries(drafters, plan.choices):
        try:
            depth = depth_of(entry)
            read_settings(entry.assistant, GenerationConfig(**entry.setting))
            if plan.profile is not None:
                plan.profile.rates(depth)
        except ValueError as error:
            raise ValueError(f"{entry.name}: {error}") from error


def baseline_entries(
    request: EvalRequest,
    drafters: dict[str, ParallelDrafter],
    small_models: list[tuple[str, PreTrainedModel]],
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Entry]:
    """transformers' own ways to compare with."""
    entries = [
        assisted_entry(public_name(model) or name, model, assistant_tokenizers(name, model, vocab_size, tokenizer))
        for name, model in small_models
    ]
    if "prompt_lookup" in request.baselines:
        entries.append(prompt_lookup_entry())
    if "stock_dflash" in request.baselines:
        entries += stock_dflash_entries(drafters)
    return entries


def make_prompts(
    request: EvalRequest,
    plan: Plan,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    chat: Chat,
    room: int | None,
) -> tuple[list[torch.LongTensor], int]:
    """Token ids of `(1, length)` each, and how many prompts were left out."""
    if plan.questions is None:
        if room is not None and plan.random_length > room:
            raise ValueError(
                f"prompts of {plan.random_length} tokens do not fit: {room} is what the target's context has room for"
            )
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        count = request.limit or 1
        return random_prompts(count, plan.random_length, vocab_size, ending_tokens(target)), 0
    plain, condition = plain_entry(), Condition(max_new_tokens=request.max_new_tokens)

    def answer(prompt: torch.LongTensor) -> list[int]:
        batch = {"input_ids": prompt.to(target.device), "attention_mask": torch.ones_like(prompt).to(target.device)}
        return list(new_texts(target, batch, call(target, plain, batch, generation_config(plain, condition)))[0])

    # A simulated target has nothing of its own to answer.
    is_silent = request.first_turn_only or plan.profile is not None
    prompts, num_left_out = encode_all(plan.questions, tokenizer, chat, None if is_silent else answer, room)
    if not prompts:
        raise ValueError(
            f"no prompt of {plan.prompts_name} leaves room for {request.max_new_tokens} new tokens in the target's context"
        )
    return prompts, num_left_out


def ending_tokens(target: PreTrainedModel) -> set[int]:
    """Tokens that begin, end or pad a text."""
    return special_token_ids(target.config.get_text_config(decoder=True), None) | end_of_text_ids(target)


def simulation_for(
    request: EvalRequest, plan: Plan, target: PreTrainedModel, entries: list[Entry], prompts: list[torch.LongTensor]
) -> Around:
    """The context that calls run in: nothing, or a simulation."""
    if plan.profile is None:
        return lambda entry: nullcontext()
    deepest = max((depth_of(entry) for entry in entries if entry.is_parallel), default=0)
    longest = max(prompt.shape[1] for prompt in prompts)
    # Transformers' own DFlash loop always drafts a whole block.
    blocks = [entry.assistant.config.block_size for entry in entries if "speculation_type" in entry.setting]
    length = longest + request.max_new_tokens + max([deepest, *blocks]) + 2
    script = write_script(
        target.config.get_text_config(decoder=True).vocab_size, length, ending_tokens(target), request.seed
    )
    return Simulation(target, script, plan.profile, request.simulate_runner_up).during


def conditions_of(request: EvalRequest, plan: Plan) -> list[Condition]:
    """Every batch size with every temperature."""
    return [
        Condition(
            batch_size,
            temperature,
            request.max_new_tokens,
            request.top_k,
            request.top_p,
            request.repeats,
            request.seed,
            plan.generate_arguments,
        )
        for temperature in dict.fromkeys(request.temperatures)
        for batch_size in dict.fromkeys(request.batch_sizes)
    ]


def show(request: EvalRequest, report: Report, screen: Console, notes: Console) -> None:
    """Print the table, and write what else was asked for."""
    if not report.rows:
        raise ValueError(f"nothing could be measured: {'; '.join(map(skipped_line, report.skipped))}")
    screen.print(screen_table(report))
    if any(row.acceptance_by_position for row in report.rows):
        screen.print(drafts_table(report))
    screen.print(LEGEND, highlight=False, style="dim")
    for line in difference_lines(report.rows):
        screen.print(f"{line}.", highlight=False)
    for entry in report.skipped:
        screen.print(f"Not measured: {skipped_line(entry)}.", highlight=False)
    if request.markdown:
        write_whole(request.markdown, markdown(report))
    if request.plots:
        for path in save_plots(report, request.plots):
            notes.print(f"Wrote {path}", highlight=False)
