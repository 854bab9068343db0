"""What plain `generate` would give a target in each step: its `prepare_inputs_for_generation`, asked before any work starts.

The decode loop calls the target itself, with the new tokens, their positions and the cache. That is all that
`GenerationMixin.prepare_inputs_for_generation` prepares for a text; a class, or whoever patches an instance (PEFT's prompt
learning), may prepare something else. So it is asked about the steps that matter, and its answers are compared.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .rope import NO_CHANGES, RopeChanges

# The loop says these itself: how many logits it wants, and whether to use the cache.
OWN_INPUTS = {"logits_to_keep", "num_logits_to_keep", "use_cache"}
# What the method itself is told about a step; some pass it on.
STEP_ARGUMENTS = {"next_sequence_length", "is_first_iteration"}
# They say of each token what kind it is, and some targets leave them out, always or after the prompt.
TYPE_INPUTS = {"token_type_ids", "mm_token_type_ids"}
# Not an input's name: the step has no cache and reads all of the text again.
REREADS = "whole text"
# What code that is asked about a step it was not written for may raise.
PROBE_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class StepInputs:
    """How a target's steps differ from the anchor with its position and the cache.

    Attributes:
        rereads_beyond: the step after a text of so many columns is without a cache and reads all of the text again (Phi-3,
            whose rotary frequencies change there); `None` if no step does.
        rope: where its rotary frequencies change with the length of a forward's longest text.
        types_in_first, types_in_others: whether `token_type_ids`, if they are given, go into the first step, and into others.
        last_read: how many tokens of a text it can read, if texts of this call may grow beyond that; else `None`.
    """

    rereads_beyond: int | None = None
    types_in_first: bool = True
    types_in_others: bool = True
    rope: RopeChanges = NO_CHANGES
    # Where drafts end; a step there is as any other.
    last_read: int | None = field(default=None, compare=False)

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how many tokens the longest text has, padding not counted."""
        return self.rope.any or self.last_read is not None

    def rereads(self, length: int, num_cached: int | None = None) -> bool:
        """Whether the step over a text of `length` columns, all but one of them cached, or `num_cached`, reads it all again."""
        if self.rereads_beyond is None:
            return False
        num_cached = length - 1 if num_cached is None else num_cached
        return 0 < num_cached <= self.rereads_beyond < length

    def room(self, length: int, depth: int) -> int:
        """How many tokens may be drafted after a text of `length` columns, so that no step that reads all again is missed."""
        if self.rereads_beyond is None or length > self.rereads_beyond:
            return depth
        return max(0, min(depth, self.rereads_beyond - length))


SLICED_INPUTS = StepInputs()


def step_inputs(
    target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], limits: Iterable[int] = ()
) -> StepInputs:
    """How a target's steps differ from what the loop gives it.

    Args:
        target: the model.
        input_ids: `(batch, length)`, the prompt.
        model_kwargs: as `generate` prepared them.
        limits: lengths of text beyond which a target may do otherwise.

    Raises:
        ValueError: if its steps are of a kind that the loop can't do.
    """
    for name in ("_sample", "_prefill"):
        if not _is_common(target, name):
            raise ValueError(
                f"{type(target).__name__} decodes in a way of its own ({name}), which drafting can't follow: call generate "
                "without assistant_model"
            )
    own = target.prepare_inputs_for_generation
    # PEFT and others patch instances.
    is_common = inspect.ismethod(own) and own.__func__ is GenerationMixin.prepare_inputs_for_generation
    if is_common and _is_common(target, "_update_model_kwargs_for_generation"):
        return SLICED_INPUTS
    length, cache = input_ids.shape[1], model_kwargs.get("past_key_values")
    num_cached = 0 if cache is None else int(cache.get_seq_length())
    try:
        first = _differences(target, input_ids, length - num_cached, model_kwargs, is_first_iteration=True)
        lengths = {length + 1, *(limit + step for limit in limits if limit >= length for step in (1, 2))}
        later = {at: _differences_in_step(target, input_ids, model_kwargs, at) for at in sorted(lengths)}
    except PROBE_ERRORS as error:
        raise ValueError(
            f"what {type(target).__name__} reads in each step could not be found out ({type(error).__name__}: {error}), so "
            "drafting can't follow it: call generate without assistant_model"
        ) from error
    rereads_beyond = next((limit for limit in limits if REREADS in later.get(limit + 1, ())), None)
    if REREADS in first:
        rereads_beyond = next((limit for limit in limits if num_cached <= limit < length), None)
    found = set(first).union(*later.values()) - TYPE_INPUTS
    is_elsewhere = any(REREADS in differences for at, differences in later.items() if at - 1 != rereads_beyond)
    if rereads_beyond is not None and not is_elsewhere:
        found -= {REREADS}
    if found:
        raise ValueError(
            "drafting gives a target the new tokens, their positions and the cache, and the prepare_inputs_for_generation of "
            f"this {type(target).__name__} (or of PEFT's prompt learning) prepares other {', '.join(sorted(found))}: call "
            "generate without assistant_model"
        )
    # Far steps are asked about without them.
    return StepInputs(rereads_beyond, not first & TYPE_INPUTS, not later[length + 1] & TYPE_INPUTS)


def _is_common(target: PreTrainedModel, name: str) -> bool:
    """Whether a method of the target's class is transformers' own."""
    return getattr(type(target), name) is getattr(GenerationMixin, name)


def _differences(
    target: PreTrainedModel,
    ids: torch.LongTensor,
    num_new: int,
    kwargs: dict[str, Any],
    is_first_iteration: bool = False,
) -> set[str]:
    """Which inputs of a step over the text `ids`, of which `num_new` tokens are new, are not the common ones."""
    step = {"next_sequence_length": num_new, "is_first_iteration": is_first_iteration}
    own = target.prepare_inputs_for_generation(ids, **step, **kwargs)
    common = GenerationMixin.prepare_inputs_for_generation(target, ids, **step, **kwargs)
    found = _unlike(own, common)
    if "past_key_values" not in found or own.get("past_key_values") is not None:
        return found
    step["next_sequence_length"] = None
    whole = GenerationMixin.prepare_inputs_for_generation(target, ids, **step, **(kwargs | {"past_key_values": None}))
    if _unlike(own, whole):
        return found
    return set() if num_new == ids.shape[1] else {REREADS}


def _differences_in_step(
    target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], length: int
) -> set[str]:
    """[`_differences`] of a later step, over a text of `length` columns."""
    batch, num_new = input_ids.shape[0], length - input_ids.shape[1]
    # Stands for the target's, of which nobody but its length is looked at.
    cache = DynamicCache()
    nothing = torch.zeros(batch, 1, length - 1, 1, device="cpu")
    cache.update(nothing, nothing, 0)
    outputs = CausalLMOutputWithPast(past_key_values=cache)
    kwargs = {name: value for name, value in model_kwargs.items() if num_new == 1 or name not in TYPE_INPUTS}
    common = GenerationMixin._update_model_kwargs_for_generation(target, outputs, dict(kwargs), num_new_tokens=num_new)
    ids = torch.cat([input_ids, input_ids[:, -1:].expand(-1, num_new)], dim=1)
    found = _differences(target, ids, 1, common)
    if num_new == 1 and not _is_common(target, "_update_model_kwargs_for_generation"):
        own = target._update_model_kwargs_for_generation(outputs, dict(kwargs), is_encoder_decoder=False)
        found |= _unlike(own, common)
    return found


def _unlike(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """The names of inputs that two steps have not in common; one that is `None` is none."""
    names = (first.keys() | second.keys()) - OWN_INPUTS - STEP_ARGUMENTS
    return {name for name in names if not _alike(first.get(name), second.get(name))}


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_alike(first[name], second[name]) for name in first)
    return first is second or (type(first) is type(second) and not isinstance(first, torch.Tensor) and first == second)
