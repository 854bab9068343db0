"""What DraftTrainer refuses before any work: models that don't go together, and settings that would not be obeyed."""

import warnings
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ..models.base import ParallelDrafter
from .arguments import DraftTrainingArguments, is_tau
from .layouts import layout_of
from .losses.objectives import OBJECTIVES

# Arguments of a Trainer that need what this one never has: a model's own loss, or the logits of whole batches.
UNUSED_ARGUMENTS = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "model_init")


def check_pair(model: Any, target: PreTrainedModel | None, args: DraftTrainingArguments) -> None:
    """Raise an error unless the model is a drafter, and has the target that it or the settings ask for."""
    if not isinstance(model, ParallelDrafter):
        raise TypeError(
            f"DraftTrainer trains a drafter, got a {type(model).__name__}: load one with AutoDrafter.from_pretrained, make "
            "one for the target with DFlashDrafter.for_target, DFlareDrafter.for_target or DartDrafter.for_target, or adapt "
            "a causal LM with PardDrafter.from_causal_lm"
        )
    if is_tau(args.metric_for_best_model) and target is None:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} needs the model that is drafted for: pass target="
        )
    if target is None and model.reads_target:
        raise ValueError(f"a {type(model).__name__} reads the target's hidden states: pass target=")


def check_asks_no_target(coefficients: Mapping[str, float], target: PreTrainedModel | None) -> None:
    """Raise a `ValueError` for objectives that the target has to say something for, where there is none."""
    asking = [name for name in coefficients if OBJECTIVES[name].asks_target]
    if asking and target is None:
        raise ValueError(f"{', '.join(asking)} learns from what the target says, and there is none: pass target=")


def check_recomputing(model: ParallelDrafter, args: DraftTrainingArguments, has_adapter: bool) -> None:
    """Raise a `ValueError` for a way to recompute activations that would lose gradients."""
    recomputing = args.activation_checkpointing_kwargs or {}
    if recomputing.get("use_reentrant") and (has_adapter or not layout_of(model).inputs_have_gradient):
        raise ValueError(
            "activation checkpointing with use_reentrant=True loses gradients where embeddings are frozen, as this "
            "drafter's are: leave use_reentrant out"
        )


def check_one_device(args: DraftTrainingArguments) -> None:
    """Let one process use one device: the batches are no tensors that `DataParallel` could divide."""
    if args.n_gpu > 1:
        warnings.warn(
            f"one process trains on one device, and sees {args.n_gpu}: the others stay idle. Start one process for each, with "
            "accelerate launch or torchrun",
            UserWarning,
            stacklevel=3,
        )
        args._n_gpu = 1


def check_arguments(args: DraftTrainingArguments, kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` for what a `Trainer` takes and this one would silently leave undone."""
    unused = [name for name in UNUSED_ARGUMENTS if kwargs.get(name) is not None]
    unused += ["label_smoothing_factor"] if args.label_smoothing_factor else []
    if unused:
        raise ValueError(
            f"DraftTrainer has no use for {', '.join(unused)}: no tensor ever holds the logits of a whole batch, and objective "
            "says what is learned. Leave it out, and read eval_tau, eval_expected_tau and eval_accuracy_k, or draft in a "
            "callback's on_evaluate"
        )
    sets = kwargs.get("eval_dataset")
    if args.metric_for_best_model in ("tau", "eval_tau") and isinstance(sets, dict):
        names = ", ".join(f"eval_{name}_tau" for name in sets)
        raise ValueError(
            f"each of several evaluation sets has a tau of its own, got metric_for_best_model={args.metric_for_best_model!r}: "
            f"choose one of {names}"
        )


def check_in_one_place(target: PreTrainedModel) -> None:
    """Raise a `ValueError` for a target that is spread over devices or processes, or lies on a disk."""
    places = {str(place) for place in (vars(target).get("hf_device_map") or {}).values()}
    if len(places) > 1:
        raise ValueError(
            f"the target is spread over {', '.join(sorted(places))}, and a process trains on one device: load it without "
            'device_map, or with device_map={"": device}, perhaps quantised, or store its states (pardraft cache-features)'
        )
    # What DeepSpeed writes on the weights that it has taken apart.
    if any("ds_id" in vars(weight) for weight in target.parameters()):
        raise ValueError(
            "each process needs the whole target, got one that DeepSpeed's stage 3 has spread over the processes while it was "
            "loaded: load it before DraftTrainingArguments are made"
        )


def check_spreading(has_adapter: bool, zero3_saves: bool | None) -> None:
    """Raise a `ValueError` for a drafter whose weights are spread over processes and could not be gathered to be saved.

    Args:
        has_adapter: whether PEFT's weights are what is trained.
        zero3_saves: whether DeepSpeed's stage 3 gathers weights to save them; `None` without it.
    """
    if has_adapter:
        raise ValueError(
            "adapters are trained with whole drafters, got FSDP or DeepSpeed's stage 3: use DDP or a lower stage"
        )
    if zero3_saves is False:
        raise ValueError(
            "DeepSpeed's stage 3 would save no drafter and measure no tau, got zero3_save_16bit_model=False: set it to true, or "
            "stage3_gather_16bit_weights_on_model_save in a configuration file of DeepSpeed's own"
        )


def check_reporting(args: TrainingArguments) -> None:
    """Raise an `ImportError` for a place to report to (TensorBoard, say) whose package is not installed."""
    for callback in get_reporting_integration_callbacks(args.report_to):
        try:
            callback()
        except RuntimeError as error:
            raise ImportError(f"can't report to {', '.join(args.report_to)}: {error}") from error
