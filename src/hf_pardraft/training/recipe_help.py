"""What `pardraft train --help` says: every setting in its group, with its default."""

import dataclasses
import shutil
import textwrap
from pathlib import Path

from transformers import TrainingArguments

from .adapters import AdapterOptions
from .arguments import DraftTrainingArguments
from .recipe import RECIPES, DrafterOptions, RunOptions, names_of, recipe_names

# Of the hundred settings of transformers' Trainer, those that a first look should show.
COMMON_SETTINGS = (
    *(
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
    ),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "optim", "seed"),
    *("bf16", "activation_checkpointing", "torch_compile", "use_cpu"),
    *("logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
    *("load_best_model_at_end", "metric_for_best_model", "report_to", "resume_from_checkpoint"),
)


def help_text(everything: bool = False) -> str:
    """All settings in groups, with their defaults; of the Trainer's own the common ones, unless `everything` is asked for."""
    own = [f for f in dataclasses.fields(DraftTrainingArguments) if f.name not in names_of(TrainingArguments)]
    of_adapters = [f for f in own if f.name == "keep_adapter"]
    theirs = [f for f in dataclasses.fields(TrainingArguments) if f.init and f.name != "output_dir"]
    shown = theirs if everything else [f for name in COMMON_SETTINGS for f in theirs if f.name == name]
    groups = {
        "The run": dataclasses.fields(RunOptions),
        "The drafter": dataclasses.fields(DrafterOptions),
        "An adapter": [*dataclasses.fields(AdapterOptions), *of_adapters],
        "Batches, objective and evaluation": [f for f in own if f not in of_adapters],
        "Training": shown,
    }
    parts = [
        "Usage: pardraft train --recipe NAME --target MODEL --dataset DATA --output FOLDER [--SETTING VALUE ...]",
        "Train a drafter, evaluate it and save it. Every setting of a recipe can be overridden here.",
        "Recipes:\n" + "\n".join(f"  {name:15}{_first_comment(RECIPES / f'{name}.yaml')}" for name in recipe_names()),
        *(f"{title}:\n" + "\n".join(map(_described, settings)) for title, settings in groups.items()),
    ]
    if not everything:
        parts.append(f"{len(theirs) - len(shown)} more settings of transformers' Trainer: pardraft train --help-all")
    parts.append("Several processes: accelerate launch --num-processes 8 -m hf_pardraft train ...")
    return "\n\n".join(parts)


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n")[0].lstrip("# ").split(":")[0].split(". ")[0].rstrip(".")


def _described(setting: dataclasses.Field) -> str:
    name = f"  --{setting.name.replace('_', '-')}"
    default = setting.default if setting.default is not dataclasses.MISSING else None
    # Written for argparse, which formats help texts.
    text = " ".join(str(setting.metadata.get("help", "")).split()).replace("%%", "%")
    if default is not None:
        text += f" [{getattr(default, 'value', default)}]"
    width = min(shutil.get_terminal_size().columns, 120)
    lines = textwrap.wrap(text, max(width - 34, 30)) or [""]
    first = f"{name:33} {lines[0]}" if len(name) < 33 else f"{name}\n{'':33} {lines[0]}"
    return "\n".join([first, *(f"{'':33} {line}" for line in lines[1:])])
