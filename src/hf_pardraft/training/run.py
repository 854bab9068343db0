"""A run from its words on: its models and data, training with all that is saved, or the states that it would read."""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    IntervalStrategy,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..checkpoints.atomic_files import write_whole
from ..checkpoints.atomic_folders import writing_folder
from ..checkpoints.published import TARGET_BOUND_CLASSES
from ..models.base import ParallelDrafter
from ..models.modeling_pard import PardDrafter
from ..user_input.data import load_data
from ..user_input.models import load_drafter, load_model, load_tokenizer
from ..user_input.options import checked_dtype
from .adapters import lora_config
from .arguments import DraftTrainingArguments
from .checks import check_reporting
from .data.overlap import load_test_set, without_overlap
from .data.sources import split_off
from .data.trainer_data import prepare_for_training
from .losses.objectives import parse_objective, reads_logits
from .recipe import TrainingRun, config_fields, training_run
from .run_folder import check_no_other_run, checkpoint_to_resume, step_of, tidy
from .run_options import DrafterOptions
from .target.feature_writing import DTYPES, cache_features, feature_bytes, texts_of
from .trainer import DraftTrainer

# Another seed of training is not to change what is held out.
SPLIT_SEED = 0
SETTINGS_FILE = "train_settings.yaml"
# What such a recipe does not repeat: where the settings came from, a secret, and what one call was told about an earlier one.
NOT_STORED = ("recipe", "hub_token", "resume_from_checkpoint", "overwrite_output", "resume_changed")


@dataclass
class Loaded:
    """What a run works with."""

    run: TrainingRun
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: ParallelDrafter
    train_examples: Any
    eval_examples: Any


def load_run(run: TrainingRun) -> Loaded:
    """The models and the data of a run.

    Raises:
        OSError: if a model or file can't be loaded.
        ValueError: if they don't fit together.
    """
    options = run.options
    checked_dtype(options.target_dtype)
    tokenizer = load_tokenizer(options.target, options.trust_remote_code)
    train = load_data(options.dataset, options.dataset_config, options.dataset_split)
    if options.exclude_overlap:
        train = without_overlap(train, map(load_test_set, options.exclude_overlap))
    if options.eval_dataset is not None:
        held_out = load_data(options.eval_dataset, split=options.eval_split)
    else:
        train, held_out = split_off(train, options.eval_size, SPLIT_SEED, is_asked_for="eval_size" in run.given)
    # A fresh drafter's weights are random, and a run that is repeated is to begin with the same.
    set_seed(run.training_arguments().seed)
    # With DeepSpeed's stage 3, a process would load a part of each model. The trainer spreads the drafter, and only that.
    unset_hf_deepspeed_config()
    target = load_model(options.target, options.trust_remote_code, dtype=options.target_dtype)
    drafter = new_drafter(run.drafter, target, tokenizer)
    if run.drafter.drafter is not None and run.recipe_kind is not None:
        tell_of_another_kind(drafter, run.recipe_kind, options.recipe)
    return Loaded(run, target, tokenizer, drafter, train, held_out)


def new_drafter(
    options: DrafterOptions, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> ParallelDrafter:
    """The drafter to train, in float32: small steps would be lost on weights of 16 bits."""
    if options.drafter is not None:
        return load_drafter(options.drafter, dtype=torch.float32)
    given = {name: value for name, value in vars(options).items() if value is not None}
    if len(options.mask_token_id or []) == 1:
        # Shared by all masks.
        given["mask_token_id"] = options.mask_token_id[0]
    if options.kind in TARGET_BOUND_CLASSES:
        fields = {name: given[name] for name in given if name not in ("kind", "drafter_config")}
        if options.kind != "dart":
            fields["tokenizer"] = tokenizer
        others = config_fields(options.drafter_config)
        if twice := {name for name in fields.keys() & others.keys() if fields[name] != others[name]}:
            raise ValueError(
                f"{', '.join(sorted(twice))}: given as a setting, and otherwise in drafter_config {options.drafter_config}: "
                "leave one of them out"
            )
        return TARGET_BOUND_CLASSES[options.kind].for_target(target, **{**others, **fields}).float()
    taps = {name: given[name] for name in ("target_layers", "target_scale") if name in given}
    base = load_model(options.base, dtype=torch.float32)
    conditions = {"target": target, **taps} if options.kind == "pard2" else {}
    return PardDrafter.from_causal_lm(base, given.get("mask_token_id"), tokenizer=tokenizer, **conditions)


def tell_of_another_kind(drafter: ParallelDrafter, kind: str, recipe: str) -> None:
    """Warn that a drafter to go on with is trained by the recipe of another kind: that may be meant, or a slip."""
    own = drafter.config.drafter_kind
    if own not in (kind, kind.removesuffix("2")):
        warnings.warn(
            f"--recipe {recipe} is for {kind} drafters, and --drafter is a {own} one: its objective and steps are used all the "
            "same",
            UserWarning,
            stacklevel=3,
        )


def train_drafter(words: list[str]) -> dict[str, Any]:
    """Train, evaluate and save as the words of a command line say: the measured evaluation, and where the drafter is.

    The output folder gets the drafter, `eval_results.json`, and `train_settings.yaml`, a recipe that repeats the run.
    """
    run = training_run(words)
    arguments = run.training_arguments()
    peft_config = lora_config(run.adapter)
    check_reporting(arguments)
    is_first = arguments.process_index == 0
    with writing_folder(run.options.output) if is_first else nullcontext():
        if is_first:
            tidy(Path(run.options.output))
        return train_in_folder(run, arguments, peft_config)


def train_in_folder(run: TrainingRun, arguments: DraftTrainingArguments, peft_config: Any) -> dict[str, Any]:
    """[`train_drafter`], while nobody else writes its output."""
    resume = arguments.resume_from_checkpoint
    checkpoint = checkpoint_to_resume(True if resume in ("true", "True", "last") else resume, arguments.output_dir)
    if checkpoint is None:
        check_no_other_run(arguments.output_dir, arguments.overwrite_output, files=True)
    loaded = load_run(run)
    trainer = DraftTrainer(
        model=loaded.drafter,
        target=loaded.target,
        args=arguments,
        train_dataset=loaded.train_examples,
        eval_dataset=loaded.eval_examples,
        processing_class=loaded.tokenizer,
        peft_config=peft_config,
    )
    if loaded.eval_examples is not None and arguments.eval_strategy == IntervalStrategy.NO:
        trainer.saves_before_last_evaluation = True
        trainer.add_callback(EvaluateAtTheEnd())
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = {} if loaded.eval_examples is None else last_evaluation(arguments, trainer.state) or trainer.evaluate()
    if not trainer.is_world_process_zero():
        return {}
    settings = {name: value for name, value in run.given.items() if name not in NOT_STORED}
    write_whole(Path(run.options.output) / SETTINGS_FILE, yaml.safe_dump(settings, sort_keys=False))
    if metrics:
        trainer.save_metrics("eval", metrics, combined=False)
    return {**metrics, "drafter": run.options.output}


class EvaluateAtTheEnd(TrainerCallback):
    """Evaluates after the last step, while reporters still listen: after training they would begin another run."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


def last_evaluation(args: DraftTrainingArguments, state: TrainerState) -> dict[str, float]:
    """What was said of the drafter that training ended with, the best or the last one; nothing if none was evaluated.

    The best is the best that was saved: there may be fewer checkpoints than evaluations.
    """
    is_loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
    step = step_of(Path(state.best_model_checkpoint)) if is_loaded else state.global_step
    found = [logs for logs in state.log_history if "eval_loss" in logs and logs["step"] == step]
    return {name: value for name, value in found[-1].items() if name != "step"} if found else {}


def cache_target_features(
    words: list[str], folder: str | None, dtype: str = "bfloat16", batch_size: int = 8
) -> dict[str, Any]:
    """Store the hidden states that a run with the same settings would read, for training and evaluation.

    Args:
        words: of a command line, as for [`train_drafter`].
        folder: for the states.
        dtype: to store them in.
        batch_size: texts that the target reads at once.

    Raises:
        ValueError: if the drafter reads none.
        OSError: if there is not enough room.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    run = training_run([*words, "--output", folder or ""])
    arguments = run.training_arguments()
    if arguments.features_folder is not None:
        raise ValueError(
            f"cache-features writes to --output, got --features-folder {arguments.features_folder} too: name the folder for the "
            "states as --output, and pass --features-folder to pardraft train"
        )
    with writing_folder(folder):
        return store_states(run, arguments, folder, dtype, batch_size)


def store_states(
    run: TrainingRun, arguments: DraftTrainingArguments, folder: str, dtype: str, batch_size: int
) -> dict[str, Any]:
    """[`cache_target_features`], while nobody else writes its folder."""
    loaded = load_run(run)
    taps = loaded.drafter.taps_for(loaded.target)
    if not taps:
        raise ValueError(
            f"a {type(loaded.drafter).__name__} reads token ids only, so there are no states to store: train it without "
            "--features-folder"
        )
    with_last = reads_logits(parse_objective(arguments.objective or loaded.drafter.training_objective))
    parts = [part for part in (loaded.train_examples, loaded.eval_examples) if part is not None]
    prepare = partial(prepare_for_training, loaded.drafter, loaded.target, arguments, loaded.tokenizer)
    examples = [example for part in parts for example in prepare(part)]
    num_tokens = sum(map(len, texts_of(examples)))
    needed = feature_bytes(loaded.target, taps, num_tokens, dtype, with_last)
    sys.stderr.write(f"{num_tokens} tokens of hidden states {taps}: {needed / 1e6:.1f} MB as {dtype}\n")
    loaded.target.to(arguments.device)
    store = cache_features(
        loaded.target,
        taps,
        examples,
        folder,
        dtype,
        with_last=with_last,
        batch_size=batch_size,
        progress=True,
    )
    return {"texts": len(store), "tokens": num_tokens, "megabytes": round(needed / 1e6, 1), "folder": folder}
