"""What a training run refuses before any work: settings that can't be, models that don't go together."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from ..checkpoints.config_checks import check_fresh_fields
from ..checkpoints.published import KIND_NAMES
from ..models.base import ParallelDrafter
from ..user_input.options import check_temperature
from .best_metric import is_tau
from .layouts import layout_of
from .layouts.attention import ATTENTIONS
from .losses.objectives import OBJECTIVES, parse_objective
from .losses.sums import check_reduction
from .run_options import DRAFTER_OPTIONS, DrafterOptions, RunOptions

if TYPE_CHECKING:
    from .arguments import DraftTrainingArguments

# For `num_anchors`: no limit.
EVERY = "all"
# Arguments of a Trainer that need what this one never has: a model's own loss, or the logits of whole batches.
UNUSED_ARGUMENTS = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")


def check_settings(args: "DraftTrainingArguments") -> None:
    """Raise a `ValueError` for settings that can't be."""
    most = ParallelDrafter.GREATEST_DEPTH
    if not 1 <= args.draft_tokens <= most:
        raise ValueError(f"draft_tokens must be from 1 to {most}, got {args.draft_tokens}: choose another value")
    if args.draft_vocab_size is not None and args.draft_vocab_size < 1:
        raise ValueError(f"draft_vocab_size must be at least 1, or None for all tokens, got {args.draft_vocab_size}")
    if not 0 < args.cod_retention <= 1 or not 0 <= args.cod_min_retention <= 1:
        raise ValueError(
            "cod_retention must be in (0, 1] and cod_min_retention in [0, 1], got "
            f"{args.cod_retention} and {args.cod_min_retention}"
        )
    if args.gradient_accumulation_steps < 1:
        raise ValueError(f"gradient_accumulation_steps must be at least 1, got {args.gradient_accumulation_steps}")
    if args.num_anchors != EVERY and (not isinstance(args.num_anchors, int) or args.num_anchors < 1):
        raise ValueError(f"num_anchors must be at least 1, or {EVERY!r}, got {args.num_anchors!r}")
    if args.loss_gamma is not None and not args.loss_gamma > 0:
        raise ValueError(f"loss_gamma must be positive, or None for uniform weights, got {args.loss_gamma}")
    if not 0 < args.kl_gamma <= 1:
        raise ValueError(f"kl_gamma must be in (0, 1], got {args.kl_gamma}: 1 weighs all positions alike")
    _check_data(args)
    _check_gamma_schedule(args)
    _check_scheduler(args)
    _check_objective(args)
    _check_tau(args)


def _check_scheduler(args: "DraftTrainingArguments") -> None:
    given = args.lr_scheduler_kwargs
    if not given:
        return
    if not isinstance(given, dict):
        raise ValueError(f"lr_scheduler_kwargs must be a mapping (JSON in a shell), got {given!r}")
    weight = torch.nn.Parameter(torch.zeros(1))
    try:
        get_scheduler(args.lr_scheduler_type, torch.optim.SGD([weight]), 1, 2, scheduler_specific_kwargs=dict(given))
    except TypeError as error:
        raise ValueError(f"{args.lr_scheduler_type} takes no such lr_scheduler_kwargs: {error}") from error


def _check_objective(args: "DraftTrainingArguments") -> None:
    if args.objective is not None:
        parse_objective(args.objective)
    check_reduction(args.loss_reduction)
    if args.loss_chunk_rows is not None and args.loss_chunk_rows < 1:
        raise ValueError(f"loss_chunk_rows must be at least 1, got {args.loss_chunk_rows}")
    if not args.kl_temperature > 0:
        raise ValueError(f"kl_temperature must be positive, got {args.kl_temperature}")
    if not 0 <= args.dpace_alpha < 1:
        raise ValueError(f"dpace_alpha must be in [0, 1), got {args.dpace_alpha}")
    if args.streak_prefixes < 1:
        raise ValueError(f"streak_prefixes must be at least 1, got {args.streak_prefixes}")


def _check_data(args: "DraftTrainingArguments") -> None:
    if args.max_length is not None and args.max_length < 2:
        raise ValueError(f"max_length must be at least 2 (a token and one to learn), or None, got {args.max_length}")
    if args.packing and args.max_length is None:
        raise ValueError("packing needs the length of a packed example, got max_length=None: set max_length, too")
    if args.training_attention not in ATTENTIONS:
        raise ValueError(f"training_attention must be one of {ATTENTIONS}, got {args.training_attention!r}")
    if not isinstance(args.chat_template_kwargs, dict | None):
        raise ValueError(f"chat_template_kwargs must be a dict (JSON in a shell), got {args.chat_template_kwargs!r}")


def _check_tau(args: "DraftTrainingArguments") -> None:
    if args.tau_prompts < 0 or args.tau_new_tokens < 1:
        raise ValueError(
            f"expected tau_prompts >= 0 and tau_new_tokens >= 1, got {args.tau_prompts} and {args.tau_new_tokens}"
        )
    check_temperature(args.tau_temperature, "tau_temperature")
    if is_tau(args.metric_for_best_model) and not args.tau_prompts:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} needs prompts to decode, got tau_prompts=0: set it to 1 "
            "or more"
        )


def _check_gamma_schedule(args: "DraftTrainingArguments") -> None:
    end, epoch_step = args.loss_gamma_end, args.loss_gamma_epoch_step
    if end is not None and epoch_step is not None:
        raise ValueError(
            f"gamma grows either with the steps or with the epochs, got loss_gamma_end={end} and "
            f"loss_gamma_epoch_step={epoch_step}: leave one of them out"
        )
    if (end is not None or epoch_step is not None) and args.loss_gamma is None:
        raise ValueError("a growing gamma needs a value to start from, got loss_gamma=None: set loss_gamma, too")
    if end is not None and end <= args.loss_gamma:
        raise ValueError(f"loss_gamma_end must be above loss_gamma ({args.loss_gamma}), got {end}")
    if epoch_step is not None and epoch_step <= 0:
        raise ValueError(f"loss_gamma_epoch_step must be positive, got {epoch_step}")


def check_run(options: RunOptions, drafter: DrafterOptions, recipes: list[str]) -> None:
    """Raise a `ValueError` if something is missing, or contradicts the kind of drafter."""
    missing = [f"--{name}" for name in ("target", "dataset", "output") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"expected {', '.join(missing)}: a run needs a target, a data set and a folder for its output")
    if options.eval_size < 0:
        raise ValueError(f"eval_size must be 0 or more, got {options.eval_size}")
    chosen = {name for name, value in vars(drafter).items() if value is not None} - {"drafter", "kind"}
    check_fresh_fields(vars(drafter) | {"mask_token_id": None})
    if drafter.drafter is not None:
        if chosen or drafter.kind:
            also = ", ".join(sorted(chosen | ({"kind"} if drafter.kind else set())))
            raise ValueError(
                f"{also}: settings of a fresh drafter, got --drafter {drafter.drafter} as well: leave one out"
            )
        return
    if drafter.kind not in KIND_NAMES:
        raise ValueError(
            f"expected a kind of drafter ({', '.join(KIND_NAMES)}), a recipe ({', '.join(recipes)}) or a --drafter to go on "
            f"with, got kind {drafter.kind!r}"
        )
    if wrong := chosen - DRAFTER_OPTIONS[drafter.kind]:
        raise ValueError(
            f"a {drafter.kind} drafter takes {', '.join(sorted(DRAFTER_OPTIONS[drafter.kind]))}, got {', '.join(sorted(wrong))}: "
            "leave them out"
        )
    if len(drafter.mask_token_id or []) > 1 and drafter.kind not in ("pard", "pard2"):
        raise ValueError(
            f"a {drafter.kind} drafter has one mask token, got mask_token_id {drafter.mask_token_id}: pass one of them"
        )
    if drafter.kind in ("pard", "pard2") and drafter.base is None:
        raise ValueError(
            f"a {drafter.kind} drafter is made of a causal LM: pass it as --base, or a --drafter to go on with"
        )


def check_pair(model: Any, target: PreTrainedModel | None, args: "DraftTrainingArguments") -> None:
    """Raise an error unless the model is a drafter, and has the target that it or the settings ask for."""
    if not isinstance(model, ParallelDrafter):
        raise TypeError(
            f"DraftTrainer trains a drafter, got a {type(model).__name__}: load one with AutoDrafter.from_pretrained, make "
            "one for the target with DFlashDrafter.for_target, DFlareDrafter.for_target or DartDrafter.for_target, or adapt "
            "a causal LM with PardDrafter.from_causal_lm"
        )
    if not isinstance(target, torch.nn.Module | None):
        raise TypeError(
            f"target is the model that is drafted for, got a {type(target).__name__}: load it with "
            "AutoModelForCausalLM.from_pretrained, and pass that"
        )
    if is_tau(args.metric_for_best_model) and target is None:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} needs the model that is drafted for: pass target="
        )
    if args.neftune_noise_alpha is not None and model.get_input_embeddings() is None:
        raise ValueError(
            f"neftune_noise_alpha adds noise to a model's own embeddings, and a {type(model).__name__} borrows the target's: "
            "leave it out"
        )
    if target is None and model.reads_target:
        raise ValueError(f"a {type(model).__name__} reads the target's hidden states: pass target=")


def check_asks_no_target(coefficients: Mapping[str, float], target: PreTrainedModel | None) -> None:
    """Raise a `ValueError` for objectives that the target has to say something for, where there is none."""
    asking = [name for name in coefficients if OBJECTIVES[name].asks_target]
    if asking and target is None:
        raise ValueError(f"{', '.join(asking)} learns from what the target says, and there is none: pass target=")


def check_recomputing(model: ParallelDrafter, args: "DraftTrainingArguments", has_adapter: bool) -> None:
    """Raise a `ValueError` for a way to recompute activations that would lose gradients."""
    recomputing = args.activation_checkpointing_kwargs or {}
    if recomputing.get("use_reentrant") and (has_adapter or not layout_of(model).inputs_have_gradient):
        raise ValueError(
            "activation checkpointing with use_reentrant=True loses gradients where embeddings are frozen, as this "
            "drafter's are: leave use_reentrant out"
        )


def check_one_device(args: "DraftTrainingArguments") -> None:
    """Let one process use one device: the batches are no tensors that `DataParallel` could divide."""
    if args.n_gpu > 1:
        warnings.warn(
            f"one process trains on one device, and sees {args.n_gpu}: the others stay idle. Start one process for each, with "
            "accelerate launch or torchrun",
            UserWarning,
            stacklevel=3,
        )
        args._n_gpu = 1


def warn_of_coarse_weights(model: torch.nn.Module) -> None:
    """Say so where weights that learn are in half precision: an optimizer's steps are smaller than what it can tell apart."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    if coarse := dtypes & {torch.bfloat16, torch.float16}:
        warnings.warn(
            f"weights that learn are {', '.join(sorted(map(str, coarse)))}, which rounds most steps of an optimizer away (norms "
            "hardly learn at all): load the drafter with dtype=torch.float32, and pass bf16=True to compute in bfloat16",
            UserWarning,
            stacklevel=3,
        )


def check_arguments(args: "DraftTrainingArguments", kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` for what a `Trainer` takes and this one would silently leave undone."""
    if kwargs.get("model_init") is not None:
        raise ValueError(
            "a DraftTrainer notes the target, a draft vocabulary and more in the drafter that it is given, got model_init, which "
            "makes another for each trial: pass model=, and search settings with a drafter and a trainer for each trial"
        )
    unused = [name for name in UNUSED_ARGUMENTS if kwargs.get(name) is not None]
    unused += ["label_smoothing_factor"] if args.label_smoothing_factor else []
    if unused:
        raise ValueError(
            f"DraftTrainer has no use for {', '.join(unused)}: no tensor ever holds the logits of a whole batch, and objective "
            "says what is learned. Leave it out, and read eval_tau, eval_expected_tau and eval_accuracy_k, or draft in a "
            "callback's on_evaluate"
        )


def check_optimizer(
    optimizer: torch.optim.Optimizer | None, before: list[torch.Tensor], trained: torch.nn.Module
) -> None:
    """Raise a `ValueError` if a caller's optimizer was made for other weights than those that are trained.

    Args:
        optimizer: that the trainer was given, if any.
        before: the drafter's weights when it was given.
        trained: the drafter now, with an adapter or a draft vocabulary of the trainer's making.
    """
    given = [] if optimizer is None else [weight for group in optimizer.param_groups for weight in group["params"]]
    replaced = {id(weight) for weight in before} - {id(weight) for weight in trained.parameters()}
    if any(id(weight) in replaced for weight in given) or (given and not any(w.requires_grad for w in given)):
        raise ValueError(
            "the optimizer in optimizers= holds weights that are not trained: peft_config freezes a drafter's own, and "
            "draft_vocab_size cuts the head of a DART drafter. Pass optimizer_cls_and_kwargs=(class, settings), which makes it "
            "of what is trained, or adapt the drafter, or call drafter.set_draft_vocabulary, before you make the optimizer"
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
