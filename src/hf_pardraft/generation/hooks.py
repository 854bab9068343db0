"""The one place that touches `GenerationMixin`: `generate(..., assistant_model=drafter)` reaches our loop from here."""

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..checkpoints.adopt import adopted
from ..checkpoints.published import MUSE_GLIMMER, find_drafter_class
from ..pairing.remembered import tokenizer_of, warn_if_other_text
from .candidate_generator import ParallelCandidateGenerator, evaluating
from .checks import check_mode, check_request, warn_of_dropout, warn_of_hooks
from .dispatch import FEWEST_TOKENS, decoding_for, does_without_compiling, fit_to, schedule_for
from .draft_judge import DraftJudge, lookup_for
from .plain import is_compiled_alike, new_ids_of, write_plain
from .settings import REQUESTED_DEPTH, RESOLVED, read_settings, settings_of_call
from .stopping import length_limit, whole_length
from .target_side.structure import is_hybrid, text_config_of, walking_once
from .tree_search import check_ngram_model

logger = logging.get_logger(__name__)

_originals: dict[str, Any] = {}
# Puts drafters in the place of their names among the arguments of a call; set by by_name.py, which may load.
load_named: Callable[[PreTrainedModel, dict[str, Any]], dict[str, Any]] | None = None


def is_drafter(assistant: Any) -> bool:
    """Whether an assistant is one of our drafters, by its config: remote code brings classes of its own."""
    if assistant is None:
        return False
    # Any model may be an assistant, and only our configurations have this attribute.
    return getattr(assistant.config, "drafter_kind", None) is not None


def is_our_call(assistant: Any, generation_config: Any) -> bool:
    """Whether this call is ours to handle; `speculation_type` asks for one of transformers' own ways."""
    return is_drafter(assistant) and generation_config.speculation_type is None


def warn_if_loaded_plainly(assistant: PreTrainedModel | None) -> None:
    """Say so where an assistant is a drafter's checkpoint that was loaded as the model that its layout is like."""
    if assistant is None or is_drafter(assistant):
        return
    drafter_class = find_drafter_class(assistant.config.to_dict())
    if drafter_class is not None and assistant.config.model_type != MUSE_GLIMMER:
        logger.warning_once(
            f"This assistant is a {drafter_class.__name__}'s checkpoint, loaded as a plain {type(assistant).__name__}, which "
            "drafts token by token if at all: import hf_pardraft before AutoModelForCausalLM or AutoModel loads it, or load it "
            f"with hf_pardraft.AutoDrafter.from_pretrained({assistant.name_or_path!r})."
        )


def install() -> None:
    """Wrap the methods of `GenerationMixin` that are listed in `HOOKED`. Calling it again changes nothing."""
    if _originals:
        return
    for name, hook in HOOKED.items():
        _originals[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, hook)


def uninstall() -> None:
    """Put transformers' own methods back."""
    for name in list(_originals):
        original = _originals.pop(name)
        delattr(GenerationMixin, name)
        # What `GenerationMixin` inherits is there again.
        if getattr(GenerationMixin, name, None) is not original:
            setattr(GenerationMixin, name, original)


# What `generate` takes after the model, by name, until its keywords come.
POSITIONAL = list(inspect.signature(GenerationMixin.generate).parameters)[1:-1]


@functools.wraps(GenerationMixin.generate)
def generate(self, *args, **kwargs):
    """transformers' own, which takes a drafter by its name, too, and refuses one beside a paged cache in a few words."""
    # An assistant, or its name, may stand at its place among the positional arguments.
    named = dict(zip(POSITIONAL[1:], args[1:], strict=False))
    if not named.keys() & kwargs.keys():
        args, kwargs = args[:1], named | kwargs
    if load_named is not None:
        kwargs = load_named(self, kwargs)
    if kwargs.get("cache_implementation") == "paged" and is_drafter(kwargs.get("assistant_model")):
        raise ValueError(
            "cache_implementation='paged' is transformers' continuous batching, which takes no assistant: leave it out to draft "
            "(a padded batch, too), or leave out assistant_model"
        )
    return _originals["generate"](self, *args, **kwargs)


def generate_batch(self, inputs, *args, **kwargs):
    """transformers' own continuous batching, which takes no assistant and does not say so."""
    assistant = kwargs.get("assistant_model")
    if isinstance(assistant, (str, os.PathLike)) or is_drafter(assistant):
        logger.warning_once(
            "generate_batch (continuous batching) works without an assistant, so this drafter is not used: the text is the same, "
            "but not sooner. Call generate(..., assistant_model=drafter) with a padded batch to draft."
        )
    return _originals["generate_batch"](self, inputs, *args, **kwargs)


def _extract_generation_mode_kwargs(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
    """transformers' own, which drops the assistant where a function decodes."""
    if callable(custom_generate) and is_drafter(assistant_model):
        logger.warning_once(
            "A function as custom_generate gets no assistant_model from transformers, so this drafter is not used unless the "
            "function does so itself: leave custom_generate out to draft, or name a repository or folder instead of a function."
        )
    return _originals["_extract_generation_mode_kwargs"](
        self, custom_generate, kwargs, synced_gpus, assistant_model, streamer
    )


def _prepare_generation_config(self, generation_config, **kwargs):
    """transformers' own, with a note of the draft depth that the call asks for: it fills in one where there is none."""
    requested = kwargs.get("num_assistant_tokens")
    for config in (generation_config, self.generation_config):
        if requested is None and config is not None:
            requested = config.num_assistant_tokens
    prepared, model_kwargs = _originals["_prepare_generation_config"](self, generation_config, **kwargs)
    setattr(prepared, REQUESTED_DEPTH, requested)
    return prepared, model_kwargs


def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
    """Refuse, before any work, what a drafter can't do; then transformers' own checks."""
    drafter = generation_mode_kwargs.get("assistant_model")
    warn_if_loaded_plainly(drafter)
    if is_our_call(drafter, generation_config):
        check_mode(self, generation_mode, generation_config, generation_mode_kwargs.get("synced_gpus"))
        drafter = adopted(drafter)
        settings = read_settings(drafter, generation_config)
        setattr(generation_config, RESOLVED, settings)
        drafter.check_target(self, drafter.taps_for(self, settings.use_target_features))
        check_ngram_model(settings, drafter, self, tokenizer_of(generation_mode_kwargs.get("tokenizer")))
        if settings.decode_loop == "native":
            # What transformers' own loop refuses (several return sequences, recurrent layers) ours can do, or checks itself.
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
            generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
    return _originals["_validate_generation_mode"](self, generation_mode, generation_config, generation_mode_kwargs)


def _get_candidate_generator(self, generation_config, input_ids, *args, assistant_model=None, **kwargs):
    """Our candidate generator for our drafters."""
    if is_our_call(assistant_model, generation_config):
        assistant_model = adopted(assistant_model)
        generator = ParallelCandidateGenerator(assistant_model, self, generation_config)
        assistant_model.last_stats = generator.stats
        return generator
    return _originals["_get_candidate_generator"](
        self, generation_config, input_ids, *args, assistant_model=assistant_model, **kwargs
    )


@walking_once()
def _assisted_decoding(
    self,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    inputs_tensor=None,
    assistant_model=None,
    assistant_tokenizer=None,
    tokenizer=None,
    **model_kwargs,
):
    """Our loop for our drafters, unless they ask for transformers' own."""
    prepared = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer,
    }
    drafts = nullcontext()
    if is_our_call(assistant_model, generation_config):
        assistant_model = adopted(assistant_model)
        # A caller's own criterion takes the place of the one that `generate` makes of its config.
        longest = length_limit(stopping_criteria)
        generation_config.max_length = max(whole_length(generation_config.max_length), longest or 0)
        asked = settings_of_call(assistant_model, generation_config)
        settings = fit_to(asked, self, model_kwargs, generation_config)
        setattr(generation_config, RESOLVED, settings)
        warn_if_other_text(assistant_model, input_ids, tokenizer_of(tokenizer))
        warn_of_dropout(self)
        warn_of_hooks(self)
        inputs = check_request(self, input_ids, model_kwargs, generation_config, settings, streamer)
        drafts = evaluating(assistant_model)
        if settings.decode_loop == "native":
            with drafts:
                return _decode_or_leave(
                    self,
                    input_ids,
                    assistant_model,
                    inputs,
                    model_kwargs,
                    asked=asked,
                    synced_gpus=synced_gpus,
                    **prepared,
                )
    with drafts:
        return _originals["_assisted_decoding"](
            self,
            input_ids,
            synced_gpus=synced_gpus,
            inputs_tensor=inputs_tensor,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            tokenizer=tokenizer,
            **prepared,
            **model_kwargs,
        )


def _decode_or_leave(
    target, input_ids, drafter, inputs, model_kwargs, *, asked, synced_gpus, generation_config, **prepared
):
    """[`_decode`], or plain `generate` where no draft would pay.

    Args:
        asked: the settings before they were fit to the call: if compiled rounds can't be had, they are fit to it anew.
        target, input_ids, drafter, inputs, model_kwargs, generation_config, **prepared: see [`_decode`].
        synced_gpus: as `generate` prepared it.
    """
    prepared = {"generation_config": generation_config, **prepared}
    known = {"batch": len(input_ids), "inputs": inputs, "model_kwargs": model_kwargs, **prepared}
    if does_without_compiling(target, drafter, input_ids.device, generation_config, known):
        setattr(generation_config, RESOLVED, fit_to(asked, target, model_kwargs, generation_config))
    settings = settings_of_call(drafter, generation_config)
    may_leave = is_compiled_alike(target, generation_config)
    most = generation_config.max_length - input_ids.shape[1]
    whole = {"synced_gpus": synced_gpus, **prepared, **model_kwargs}
    if may_leave and settings.is_automatic and most < FEWEST_TOKENS:
        return write_plain(target, drafter, input_ids, is_brief=True, **whole)
    shape = input_ids.shape
    schedule = schedule_for(target, drafter, settings, generation_config, shape[0])
    if may_leave and (schedule.ends_too_soon(*shape, most) or schedule.leaves_to_plain(*shape)):
        result = write_plain(target, drafter, input_ids, **whole)
        schedule.note_plain(drafter.last_stats.rounds)
        if schedule.looks_back:
            lookup = lookup_for(settings, is_hybrid(text_config_of(target)))
            if lookup is not None:
                lookup.begin(input_ids.tolist())
                DraftJudge(schedule, lookup).look_back(new_ids_of(result, input_ids.shape[1])[0].tolist())
        return result
    return _decode(target, input_ids, drafter, inputs, model_kwargs, schedule=schedule, **prepared)


def _decode(target, input_ids, drafter, inputs, model_kwargs, *, generation_config, logits_processor, **prepared):
    """Continue `input_ids` by our loop; `inputs` is what [`check_request`] found, the rest as `generate` prepared it."""
    candidates = target._get_candidate_generator(
        generation_config=generation_config,
        input_ids=input_ids,
        inputs_tensor=None,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
        assistant_model=drafter,
    )
    decoding = decoding_for(
        target,
        candidates=candidates,
        generation_config=generation_config,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
        batch=input_ids.shape[0],
        inputs=inputs,
        **prepared,
    )
    return decoding.run(input_ids)


HOOKED = {
    hook.__name__: hook
    for hook in (
        _assisted_decoding,
        _extract_generation_mode_kwargs,
        _get_candidate_generator,
        _prepare_generation_config,
        _validate_generation_mode,
        generate,
        generate_batch,
    )
}
