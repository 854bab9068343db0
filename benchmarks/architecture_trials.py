"""One target of the sweep: what each kind of drafter, chain and tree, batch and prompt comes to."""

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import hf_pardraft
from architecture_cases import SCALES, tiny_model
from architecture_variants import variants_of
from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.models.base import ParallelDrafter

DEPTH = 5
NEW_TOKENS = 16
TREE_BUDGET = 12
ONE, LONGER, RAGGED = (21,), (40,), (10, 28, 21)
# How often an oracle's first choice is right, and how often, where it is not, its second.
RATE, RUNNER_UP = 0.75, 0.5
# Texts with fewer different tokens would hide errors, if there is a scale of weights with which they have more.
VARIED, TRIES = 6, 3


@dataclass(frozen=True)
class Case:
    """One call of `generate`.

    Attributes:
        drafter: "pard", which reads token ids only, or "dflash", which reads the target's hidden states.
        lengths: of the prompts.
        tree: whether to draft trees.
        ends: whether one of the tokens that the target writes ends the text.
    """

    drafter: str
    lengths: tuple[int, ...]
    tree: bool = False
    ends: bool = False

    @property
    def label(self) -> str:
        shape = "tree" if self.tree else "chain"
        prompt = {ONE: "batch 1", LONGER: "batch 1, longer prompt", RAGGED: "batch 3"}[self.lengths]
        return f"{shape}, {prompt}, {self.drafter}" + (", ends" if self.ends else "")


CASES = (
    Case("pard", ONE),
    Case("pard", ONE, tree=True),
    Case("pard", RAGGED),
    Case("pard", RAGGED, tree=True),
    Case("pard", LONGER, tree=True),
    Case("dflash", ONE, tree=True),
    Case("dflash", RAGGED),
    Case("dflash", LONGER),
    Case("dflash", RAGGED, tree=True, ends=True),
)


def vocab_size_of(target: PreTrainedModel) -> int:
    return target.config.get_text_config(decoder=True).vocab_size


def token_drafter(target: PreTrainedModel) -> PardDrafter:
    """An untrained drafter that reads token ids only."""
    vocab_size = vocab_size_of(target)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    drafter = PardDrafter.from_causal_lm(Qwen3ForCausalLM(config), mask_token_id=vocab_size - 1)
    drafter.generation_config.num_assistant_tokens = DEPTH
    return drafter


def block_drafter(drafter_class: type[DFlashDrafter]) -> Callable[[PreTrainedModel], ParallelDrafter]:
    return lambda target: drafter_class.for_target(
        target, num_layers=1, block_size=DEPTH + 1, mask_token_id=vocab_size_of(target) - 1
    )


MAKERS: dict[str, Callable[[PreTrainedModel], ParallelDrafter]] = {
    "pard": token_drafter,
    "dflash": block_drafter(DFlashDrafter),
    "dflare": block_drafter(DFlareDrafter),
    "dart": lambda target: DartDrafter.for_target(target, draft_length=DEPTH - 1),
}


@contextlib.contextmanager
def knowing(drafter: ParallelDrafter, texts: list[list[int]], seed: int = 0) -> Iterator[None]:
    """Within, a drafter runs as ever, but its drafts are those of an oracle that knows the `texts` of a batch's items."""
    generator, drafter_class = torch.Generator().manual_seed(seed), type(drafter)

    def new_draft_state(target: PreTrainedModel) -> Any:
        state = drafter_class.new_draft_state(drafter, target)
        state.items, select_items = list(range(len(texts))), state.cache.select_items

        def select_and_note(rows: list[int]) -> None:
            state.items = [state.items[row] for row in rows]
            select_items(rows)

        state.cache.select_items = select_and_note
        return state

    def draft(context: Any, state: Any, depth: int) -> torch.Tensor:
        logits = torch.zeros_like(drafter_class.draft(drafter, context, state, depth))
        for row, item in enumerate(state.items):
            ahead = texts[item][int(context.new_positions[row, -1]) + 1 :]
            for place in range(logits.shape[1]):
                truth = ahead[place] if place < len(ahead) else 3
                first, second = torch.rand(2, generator=generator).tolist()
                logits[row, place, (truth + (first >= RATE)) % logits.shape[-1]] = 10.0
                if first >= RATE and second < RUNNER_UP:
                    logits[row, place, truth] = 9.5
        return logits

    drafter.new_draft_state, drafter.draft = new_draft_state, draft
    try:
        yield
    finally:
        del drafter.new_draft_state, drafter.draft


def prompts(lengths: tuple[int, ...], vocab_size: int) -> dict[str, torch.Tensor]:
    """Random prompts, padded on the left."""
    generator, longest = torch.Generator().manual_seed(3), max(lengths)
    ids = torch.randint(3, vocab_size - 2, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def write(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    drafter: ParallelDrafter | None = None,
    ends: int | None = None,
    **options: Any,
) -> Any:
    """What `generate` returns."""
    # Dynamic RoPE leaves the frequencies of the longest text behind in the target.
    target = copy.deepcopy(target) if "dynamic" in str(target.config.to_dict().get("rope_parameters")) else target
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": ends, "pad_token_id": 0, **options}
    if drafter is not None:
        drafter.generation_config.draft_schedule = "fixed"
    return target.generate(**inputs, assistant_model=drafter, **options)


def without_padding(texts: torch.LongTensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    padding = (1 - inputs["attention_mask"]).sum(dim=1).tolist()
    return [text[count:] for text, count in zip(texts.tolist(), padding, strict=True)]


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def is_refusal(error: Exception) -> bool:
    """Whether an error is a `ValueError` that this package raises, and of one line."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(hf_pardraft.__file__).parent
    return type(error) is ValueError and raised_in.is_relative_to(package) and "\n" not in str(error)


def most_varied(name: str, overrides: dict[str, Any]) -> tuple[PreTrainedModel, int, int]:
    """The first target whose greedy text is varied, or the most varied; its seed; and how many different tokens it writes."""
    found = []
    for seed in range(TRIES * len(SCALES)):
        target = tiny_model(name, overrides, seed)
        try:
            text = write(target, prompts(ONE, vocab_size_of(target)))
        except Exception:  # noqa: BLE001
            # Whatever it is, each case will say.
            return target, seed, 0
        found.append((len(set(text[0, ONE[0] :].tolist())), -seed, target))
        if found[-1][0] >= VARIED:
            break
    variety, minus_seed, target = max(found, key=lambda each: each[:2])
    return target, -minus_seed, variety


def try_variant(name: str, variant: str) -> dict[str, Any]:
    """All cases on one target, by what they came to."""
    row: dict[str, Any] = {"architecture": name, "variant": variant}
    overrides = dict(variants_of(name))[variant]
    try:
        target, seed, row["variety"] = most_varied(name, overrides)
    except Exception as error:  # noqa: BLE001
        return {**row, "not_built": one_line(error)}
    row |= {"class": type(target).__name__, "seed": seed, "same": [], "refused": {}, "differs": [], "crashed": {}}
    drafters: dict[str, ParallelDrafter] = {}
    for kind, make in MAKERS.items():
        try:
            drafters[kind] = make(target)
        except Exception as error:  # noqa: BLE001
            note_error(row, f"for_target, {kind}", error)
    plain: dict[tuple[int, ...], torch.LongTensor | str] = {}
    for lengths in dict.fromkeys(case.lengths for case in CASES):
        try:
            plain[lengths] = write(target, prompts(lengths, vocab_size_of(target)))
        except Exception as error:  # noqa: BLE001
            row.setdefault("plain_fails", {}).setdefault(one_line(error), []).append(str(len(lengths)))
    for case in CASES:
        if case.drafter in drafters and case.lengths in plain:
            try_case(row, target, drafters[case.drafter], case, plain[case.lengths])
    return row


def try_case(
    row: dict[str, Any], target: PreTrainedModel, drafter: ParallelDrafter, case: Case, plain: torch.LongTensor
) -> None:
    """Compare one call with plain `generate`'s, and note what came of it."""
    inputs = prompts(case.lengths, vocab_size_of(target))
    ends = int(plain[0, max(case.lengths) + 9]) if case.ends else None
    expected = write(target, inputs, ends=ends) if case.ends else plain
    drafter.generation_config.tree_budget = TREE_BUDGET if case.tree else 0
    try:
        with knowing(drafter, without_padding(expected, inputs)):
            found = write(target, inputs, drafter, ends)
    except Exception as error:  # noqa: BLE001
        note_error(row, case.label, error)
        return
    if torch.equal(found, expected):
        row["same"].append(case.label)
        return
    width = min(found.shape[1], expected.shape[1])
    unlike = (found[:, :width] != expected[:, :width]).nonzero().tolist() or [[0, width - 1]]
    item, column = min(unlike, key=lambda place: place[1])
    facts = {"case": case.label, "after": column - max(case.lengths), "ahead": lead(target, inputs, item, column)}
    if not row["differs"]:
        facts["float64"] = in_double(row, case)
    row["differs"].append(facts)


def note_error(row: dict[str, Any], label: str, error: Exception) -> None:
    """Add a case to those that were refused, or crashed, with the same words."""
    if is_refusal(error):
        row["refused"].setdefault(str(error), []).append(label)
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    row["crashed"].setdefault(f"{one_line(error)} ({Path(frame.filename).name}, {frame.name})", []).append(label)


def lead(target: PreTrainedModel, inputs: dict[str, torch.Tensor], item: int, column: int) -> float:
    """How far plain `generate`'s token is ahead of the second best in one place, in standard deviations of the logits."""
    count = column - inputs["input_ids"].shape[1]
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": count + 1}
    logits = write(target, inputs, **options).logits[count][item]
    best, second = logits.topk(2).values.tolist()
    return round((best - second) / float(logits.std()), 6)


def in_double(row: dict[str, Any], case: Case) -> str:
    """What a case comes to in float64."""
    try:
        overrides = dict(variants_of(row["architecture"]))[row["variant"]]
        target = tiny_model(row["architecture"], overrides, row["seed"]).double()
        if type(target)._can_set_experts_implementation():
            # torch has no grouped products in float64.
            target.set_experts_implementation("eager")
        inputs = prompts(case.lengths, vocab_size_of(target))
        expected, drafter = write(target, inputs), MAKERS[case.drafter](target)
        drafter.generation_config.tree_budget = TREE_BUDGET if case.tree else 0
        with knowing(drafter, without_padding(expected, inputs)):
            return "same" if torch.equal(write(target, inputs, drafter), expected) else "differs"
    except Exception as error:  # noqa: BLE001
        return one_line(error)
