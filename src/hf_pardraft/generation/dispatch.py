"""Which loop a call of `generate` gets, and which schedule; or none, where plain `generate` is faster."""

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..models.base import ParallelDrafter
from .aligned import AlignedDecoding
from .choosing.processors import see_the_batch
from .compiled.decoder import CompiledDecoding
from .decoder import SpeculativeDecoding
from .one_off import seconds_spent
from .scheduling.fixed import FixedSchedule
from .scheduling.knowledge import Knowledge
from .scheduling.plans import COMPILED_NODES, NOTHING, Plan, all_plans, compiled_plans
from .scheduling.schedule import Schedule
from .settings import DraftSettings, returns_states, wants_compiled
from .stopping import other_criteria
from .target_side.prompt import TOKEN_TYPES
from .target_side.rope import longest_text
from .target_side.servable import check_scales_by_position, check_takes_masks
from .target_side.structure import is_hybrid, layer_types_of, text_config_of, told_by_hooks

logger = logging.get_logger(__name__)

# Seconds of a clock's step beside which a short round is long. Windows' clock of threads has steps of 16 milliseconds.
FINE = 1e-4

# Tokens of a call that is drafted, at least. The first round reads the prompt, mostly without a draft, and the last token is the
# target's own: a draft of one token at best is not worth our loop.
FEWEST_TOKENS = 3

# For each drafter and target, what is known of their rounds, by kind. In memory only: another machine's is worth nothing.
_known: "weakref.WeakKeyDictionary[ParallelDrafter, weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, Knowledge]]]"
_known = weakref.WeakKeyDictionary()


def schedule_for(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    settings: DraftSettings,
    generation_config: GenerationConfig,
    batch: int,
) -> Schedule | FixedSchedule:
    """What each round of a call for so many items drafts and verifies."""
    full = Plan(settings.depth, settings.tree_budget)
    if not settings.is_automatic:
        return FixedSchedule(full)
    compiled, sampled = wants_compiled(generation_config), generation_config.do_sample
    on_a_cpu = {target.device.type, drafter.device.type} == {"cpu"}
    # What trees have over chains is another matter where they hold more than what was drafted.
    looks_up = bool(settings.prompt_lookup_num_tokens and settings.tree_budget and (on_a_cpu or not compiled))
    kind = (compiled, target.device, sampled and temperature_class(generation_config.temperature), looks_up)
    of_pair = _known.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    knowledge = of_pair.get(kind) or of_pair.setdefault(kind, Knowledge(compiled))
    plans = plans_for(settings, compiled, on_a_cpu, batch)
    first = Plan(settings.depth) if Plan(settings.depth) in plans else full
    reads_again = is_hybrid(text_config_of(target))
    clock = clock_for(target, drafter)
    return Schedule(
        knowledge,
        plans,
        first,
        lambda: clock() - seconds_spent(clock),
        # What is compiled reads all of a draft.
        looks=on_a_cpu and not compiled,
        compares=on_a_cpu,
        reads_again=reads_again,
        is_compiled=compiled,
    )


def temperature_class(temperature: float | None) -> float:
    """Temperatures that share what is known: those of one tenth, and all high ones. Of every other there would be a beginning."""
    return round(min(1.0 if temperature is None else temperature, 2.0), 1)


def plans_for(settings: DraftSettings, compiled: bool, on_a_cpu: bool, batch: int) -> list[Plan]:
    """What rounds choose from.

    On an accelerator nobody looks at drafts, for which the host would have to wait, so that trees can't be compared with chains;
    and a few tokens more or less that are read make no difference, for which something would have to be compiled.
    """
    depth, budget = settings.depth, settings.tree_budget
    if not on_a_cpu and (compiled or budget):
        return [NOTHING, Plan(depth, budget)]
    return compiled_plans(depth, budget) if compiled else all_plans(depth, budget, batch)


def clock_for(target: PreTrainedModel, drafter: ParallelDrafter) -> Callable[[], float]:
    """What tells the schedule how long rounds take.

    On a CPU this thread's own time: whoever else wants the core lets a round of a few milliseconds take several times as long, or
    not at all longer, and the longer ones of two plans more often. Elapsed time where a device is waited for, or a disk.
    """
    places = {target.device.type, drafter.device.type, *map(str, (vars(target).get("hf_device_map") or {}).values())}
    is_fine = time.get_clock_info("thread_time").resolution <= FINE
    return time.thread_time if places == {"cpu"} and is_fine else time.perf_counter


def fit_to(
    settings: DraftSettings, target: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> DraftSettings:
    """The settings for this target and call, as far as nobody asked for something else: trees only where they can be had."""
    # Ranks must decide alike, and their clocks differ.
    is_split = target.tp_size is not None and target.tp_size > 1
    if is_split:
        settings = replace(settings, draft_schedule="fixed")
    if not settings.may_do_without_trees:
        return settings
    text_config = text_config_of(target)
    on_a_cpu = target.device.type == "cpu"
    takes_trees = on_a_cpu and not (is_split or is_hybrid(text_config))
    if wants_compiled(generation_config):
        settings = replace(settings, tree_budget=COMPILED_NODES)
    try:
        check_takes_masks(target, model_kwargs)
        check_scales_by_position(target, generation_config.max_length + settings.depth + settings.tree_budget)
    except ValueError:
        takes_trees = False
    return settings if takes_trees else replace(settings, tree_budget=0)


def does_without_compiling(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    device: torch.device,
    generation_config: GenerationConfig,
    arguments: dict[str, Any],
) -> bool:
    """Whether a call asks for compiled rounds that it can't have. From then on its `generation_config` asks for none.

    Args:
        target, drafter, generation_config: of the call.
        device: of its `input_ids`.
        arguments: of [`SpeculativeDecoding`], as far as they are known.
    """
    if not wants_compiled(generation_config):
        return False
    aligned = reason_to_align(target, arguments) if arguments["batch"] > 1 else None
    reason = aligned or reason_against(target, drafter, device, generation_config, arguments)
    if reason is None:
        return False
    logger.warning_once(f"Rounds are not compiled, but run as without cache_implementation='static': {reason}")
    generation_config.disable_compile = True
    return True


def decoding_for(
    target: PreTrainedModel, *, generation_config: GenerationConfig, **arguments: Any
) -> SpeculativeDecoding:
    """The loop for a call of `generate`, with compiled rounds if it (still) asks for them.

    Args:
        target: of the call.
        generation_config, arguments: of [`SpeculativeDecoding`].
    """
    arguments["generation_config"] = generation_config
    if wants_compiled(generation_config):
        return CompiledDecoding(target, compile_config=generation_config.compile_config, **arguments)
    if generation_config.compile_config is not None and not generation_config.disable_compile:
        logger.warning_once(
            "You have set `compile_config`, but rounds are compiled with cache_implementation='static' only, got "
            f"{generation_config.cache_implementation!r}. Compilation will be skipped."
        )
    is_aligned = arguments["batch"] > 1 and reason_to_align(target, arguments) is not None
    return (AlignedDecoding if is_aligned else SpeculativeDecoding)(target, **arguments)


def reason_to_align(target: PreTrainedModel, arguments: dict[str, Any]) -> str | None:
    """Why a batch's texts have to be of one length at each step, as plain `generate` has them; `None` if they need not."""
    if names := see_the_batch(arguments["logits_processor"], arguments["stopping_criteria"]):
        return f"{', '.join(names)} may look at all items of a batch"
    if reason := reason_of_positions(arguments):
        return reason
    if "adapter_names" in told_by_hooks(target):
        return "items of the batch have adapters of their own"
    return None


def reason_of_positions(arguments: dict[str, Any]) -> str | None:
    """What of the target's positions stands against texts of several lengths, and compiled rounds; `None` if nothing does."""
    if changes_on_the_way(arguments):
        return "the target's rotary frequencies change within this call"
    if arguments["inputs"].last_read is not None:
        return "texts of up to max_length tokens outgrow the target's positions"
    return None


def changes_on_the_way(arguments: dict[str, Any]) -> bool:
    """Whether some of a call's texts may be on either side of a length at which the target reads otherwise.

    Plain `generate` reads with the longest text of the batch, and so must items that are shorter, or go their own ways.
    """
    positions, inputs = arguments["model_kwargs"].get("position_ids"), arguments["inputs"]
    changes = inputs.rope
    if positions is None or not changes.any:
        return changes.any or inputs.rereads_beyond is not None
    ends, columns = positions[..., -1] + 1, positions.shape[-1]
    padding = columns - longest_text(positions, columns)
    longest = arguments["generation_config"].max_length - padding
    return inputs.rereads_beyond is not None or changes.are_met(int(ends.min()), longest)


def reason_against(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    device: torch.device,
    generation_config: GenerationConfig,
    arguments: dict[str, Any],
) -> str | None:
    """Why a call's rounds can't be compiled; `None` if they can. Arguments as of [`does_without_compiling`]."""
    model_kwargs = arguments["model_kwargs"]
    config = text_config_of(target)
    if is_hybrid(config):
        return "the state of recurrent layers can't be held in a static cache"
    if "dummy" in layer_types_of(config)[0]:
        return "layers of the target share the entries of others"
    if reason := reason_of_positions(arguments):
        return reason
    if model_kwargs.get(TOKEN_TYPES) is not None and arguments["inputs"].types_in_others:
        return "the target is told the type of each token"
    if "llama4" in target.config.model_type:
        return "transformers can't compile Llama 4"
    if getattr(target, "hf_quantizer", None) is not None and not target.hf_quantizer.is_compileable:
        return "the target's quantization can't be compiled"
    devices = {parameter.device for model in (target, drafter) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"target and drafter are on several devices ({', '.join(sorted(map(str, devices)))})"
    if device not in devices:
        return f"the prompt is on {device}, and the target on {', '.join(map(str, devices))}"
    if returns_states(generation_config):
        return "hidden states or attentions are to be returned"
    if (
        generation_config._eos_token_tensor is None
        and arguments["batch"] > 1
        and other_criteria(arguments["stopping_criteria"])
    ):
        return "items of a batch without an end-of-text token go on where a stopping criterion has cut them"
    try:
        check_takes_masks(target, model_kwargs)
    except ValueError as error:
        return str(error)
    return None
