"""What `pardraft train --help` says: every setting in its group, with its default."""

import dataclasses
import re
import shutil
import textwrap
from pathlib import Path

from transformers import TrainingArguments

from .arguments import DraftTrainingArguments
from .losses.objectives import OBJECTIVES
from .recipe import RECIPES, names_of, recipe_names
from .run_options import AdapterOptions, DrafterOptions, RunOptions

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


# What their own words don't say of this command.
OTHER_WORDS = {
    "objective": "What is learned: a weighted sum of objectives (see below), such as "
    "cross_entropy+0.3*first_error+40*chain_reward. By default annealed_kl for DART, "
    "subtask_cross_entropy for PARD, and cross_entropy for others.",
    "max_steps": "Steps to train for, rather than epochs.",
    "resume_from_checkpoint": "A checkpoint of this run to go on from, or last for the latest in --output.",
    "metric_for_best_model": "What makes a checkpoint the best one: tau, expected_tau, accuracy_1, or loss, the default.",
}
EXAMPLE = r"""Example, which ends with the checkpoint of the greatest tau:
  pardraft train --recipe dflare --target Qwen/Qwen3-4B \
    --dataset answers.jsonl --output drafter --learning-rate 3e-4 \
    --eval-strategy steps --eval-steps 500 --load-best-model-at-end \
    --metric-for-best-model tau"""


def help_text(everything: bool = False) -> str:
    """All settings in groups, with their defaults; of the Trainer's own the common ones, unless `everything` is asked for."""
    fields = [f for f in dataclasses.fields(DraftTrainingArguments) if f.init]
    own = [f for f in fields if f.name not in names_of(TrainingArguments)]
    of_adapters = [f for f in own if f.name == "keep_adapter"]
    theirs = [f for f in fields if f.name in names_of(TrainingArguments) and f.name != "output_dir"]
    shown = theirs if everything else [_in_short(f) for name in COMMON_SETTINGS for f in theirs if f.name == name]
    groups = {
        "The run": dataclasses.fields(RunOptions),
        "The drafter": dataclasses.fields(DrafterOptions),
        "An adapter": [*dataclasses.fields(AdapterOptions), *of_adapters],
        "Batches, objective and evaluation": [f for f in own if f not in of_adapters],
        "Training": shown,
    }
    recipes = {name: _first_comment(RECIPES / f"{name}.yaml") for name in recipe_names()}
    objectives = {name: objective.help for name, objective in OBJECTIVES.items()}
    parts = [
        _wrapped(
            "Usage: pardraft train ",
            "--recipe NAME --target MODEL --dataset DATA --output FOLDER [--SETTING VALUE ...]",
            22,
        ),
        _wrapped("", "Train a drafter, evaluate it and save it. Every setting of a recipe can be overridden here.", 0),
        EXAMPLE,
        "Recipes:\n" + "\n".join(_wrapped(f"  {name:15}", text, 17) for name, text in recipes.items()),
        *(f"{title}:\n" + "\n".join(map(_described, settings)) for title, settings in groups.items()),
        "Objectives:\n" + "\n".join(_wrapped(f"  {name:23}", text, 25) for name, text in objectives.items()),
    ]
    if not everything:
        more = f"{len(theirs) - len(shown)} more settings of transformers' Trainer: pardraft train --help-all"
        parts.append(_wrapped("", more, 0))
    parts.append("Several processes:\n  accelerate launch --num-processes 8 -m hf_pardraft train ...")
    return "\n\n".join(parts)


def _wrapped(start: str, text: str, indent: int) -> str:
    """`start` and `text` in as many lines as the terminal's width asks for, indented from the second on."""
    width = min(shutil.get_terminal_size().columns, 120)
    room = max(width, indent + 30)
    options = {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(
        textwrap.wrap(text, room, initial_indent=start, subsequent_indent=" " * indent, **options) or [start.rstrip()]
    )


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n")[0].lstrip("# ").split(":")[0].split(". ")[0].rstrip(".")


def _in_short(setting: dataclasses.Field) -> dataclasses.Field:
    """A setting of transformers' Trainer, of whose description the first sentence and the options are left."""
    first, *others = re.split(r"(?<=[^.]\.) (?=[A-Z])", " ".join(setting.metadata.get("help", "").split()))
    words = " ".join([first, *(sentence for sentence in others if sentence.startswith("Options"))])
    short = dataclasses.field(default=setting.default, metadata={"help": words})
    short.name = setting.name
    return short


def _described(setting: dataclasses.Field) -> str:
    name = f"  --{setting.name.replace('_', '-')}"
    default = setting.default if setting.default is not dataclasses.MISSING else None
    # Written for argparse, which formats help texts.
    words = OTHER_WORDS.get(setting.name) or str(setting.metadata.get("help", ""))
    text = " ".join(words.split()).replace("%%", "%")
    if default is not None:
        text += f" [{getattr(default, 'value', default)}]"
    start = f"{name:33} " if len(name) < 33 else f"{name}\n{'':34}"
    # Only the last line of `start` takes room.
    return start[:-34] + _wrapped(start[-34:], text, 34)
