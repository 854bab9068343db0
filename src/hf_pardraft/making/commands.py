"""The command of each stage, as words after `pardraft`: a user can repeat them, or change them and go on by hand."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..training.recipe import read_recipe
from .plan import PROBE_STEPS, EvaluationPlan, TrainingPlan
from .settings import MakeSettings

RECIPES = {"pard": "pard", "dflash": "left_to_right", "dflare": "dflare", "dart": "dart"}
# Up to this width of the target, or without an accelerator, a drafter of a published size would take longer to draft than it
# saves, and too long to train.
SMALL_HIDDEN_SIZE = 1024
PACKED = {"max_length": 512, "packing": True, "learning_rate": 5e-4, "lr_scheduler_type": "cosine"}
BLOCK = {"num_layers": 2, "block_size": 8, "num_anchors": 128, "objective": "forward_kl", "loss_gamma": 3.0}
SMALL = {
    "pard": {"max_length": 512, "packing": True},
    "dflash": {**PACKED, **BLOCK},
    "dflare": {**PACKED, **BLOCK, "loss_gamma_epoch_step": 0.25},
    "dart": {**PACKED, "num_anchors": 128},
}
# Examples of a step.
CPU_STEP, SMALL_STEP = 1, 4
# What a small drafter proposes from, where the target's vocabulary is twice as large or more.
SMALL_VOCABULARY = 8192
# Answers are cut off about where training would cut them.
SMALL_ANSWER, ANSWER = 384, 2048
BATCH = 32
TAU = {"tau_prompts": 4, "tau_new_tokens": 64}


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what.

    Attributes:
        path: of the folder.
        target_name, kind_name: which the drafter is named after.
    """

    path: Path
    target_name: str
    kind_name: str

    @property
    def text(self) -> Path:
        return self.path / "text"

    @property
    def train(self) -> Path:
        return self.text / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.text / "held-out.jsonl"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def probe(self) -> Path:
        return self.path / "probe"

    @property
    def states(self) -> Path:
        return self.path / "states"

    @property
    def probe_states(self) -> Path:
        return self.path / "probe-states"

    @property
    def drafter(self) -> Path:
        return self.path / f"{self.target_name}-{self.kind_name}"

    @property
    def results(self) -> Path:
        return self.path / "eval.json"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.md"


@dataclass(frozen=True)
class Commands:
    """The stages of one run as commands.

    Attributes:
        settings: of the run.
        folder: of the run, and what is where in it.
        is_small: whether drafter and batches are made for a small target, or for a machine without an accelerator.
        has_accelerator: whether there is one.
        dtype: that everything computes in.
        vocab_size: of the target.
    """

    settings: MakeSettings
    folder: RunFolder
    is_small: bool
    has_accelerator: bool
    dtype: str
    vocab_size: int

    def regenerate(self, output: Path, count: int | None = None, dataset: Path | None = None) -> list[str]:
        """The target writes `count` dialogues, or answers to the prompts of a data set."""
        source = [str(dataset)] if count is None else ["--self-prompts", str(count)]
        options = {
            "target": self.settings.target,
            "output": output,
            "max_tokens": SMALL_ANSWER if self.is_small else ANSWER,
            "batch_size": BATCH,
            "dtype": self.dtype,
            "seed": self.settings.seed,
        }
        if self.settings.chat_template_kwargs:
            options["chat_template_kwargs"] = json.dumps(self.settings.chat_template_kwargs)
        return ["regenerate", *source, *as_options(options), *self._trust()]

    @property
    def may_store_states(self) -> bool:
        """Whether the target's hidden states can be stored before training, which then runs none of its layers."""
        return self.is_small and self.settings.kind != "pard"

    def cache_features(self, output: Path) -> list[str]:
        """The target's hidden states of all text."""
        return ["cache-features", *as_options({"output": output, **self._training_options()})]

    def probe(self, stored_states: bool = True) -> list[str]:
        """A few steps and an evaluation, to see what they cost, from stored states where they may be."""
        limits = {"max_steps": PROBE_STEPS, "save_strategy": "no", "eval_strategy": "no"}
        has_states = stored_states and self.may_store_states
        return self._train(self.folder.probe, self.folder.probe_states if has_states else None, limits)

    def train(self, plan: TrainingPlan, resume: bool, stored_states: bool = False) -> list[str]:
        """The training itself, evaluated by tau, of which the best checkpoint is kept; from stored states or a live target."""
        limits = {"max_steps": plan.steps}
        for name in ("eval", "save"):
            limits |= {f"{name}_strategy": "steps", f"{name}_steps": plan.eval_steps}
        limits |= {"load_best_model_at_end": True, "metric_for_best_model": "tau", "save_total_limit": 2}
        limits["logging_steps"] = max(1, min(50, plan.eval_steps // 4))
        if resume:
            limits["resume_from_checkpoint"] = "last"
        return self._train(self.folder.drafter, self.folder.states if stored_states else None, limits)

    def eval(self, plan: EvaluationPlan, has_plain_prompts: bool = False) -> list[str]:
        """Tau and speed on held-out prompts, beside plain `generate`; `has_plain_prompts`: they are no conversations."""
        options = {
            "target": self.settings.target,
            "drafter": f"{self.settings.kind_name}={self.folder.drafter}",
            "prompts": self.folder.held_out,
            "limit": plan.prompts,
            "max_new_tokens": plan.new_tokens,
            "dtype": self.dtype,
            "json": self.folder.results,
        }
        template_kwargs = {} if has_plain_prompts else self.settings.chat_template_kwargs
        arguments = ["--no-chat-template"] if has_plain_prompts else []
        for name, value in template_kwargs.items():
            arguments += ["--chat-argument", f"{name}={json.dumps(value)}"]
        return ["eval", *as_options(options), *arguments, *self._trust()]

    def card(self) -> list[str]:
        """The drafter's card, with the results."""
        options = {"results": self.folder.results, "recipe": self.folder.recipe}
        return ["card", str(self.folder.drafter), *as_options(options), "--fresh"]

    def training_settings(self) -> dict[str, Any]:
        """What is said instead of the recipe's own settings."""
        if not self.is_small:
            return {}
        batch = {
            "per_device_train_batch_size": SMALL_STEP if self.has_accelerator else CPU_STEP,
            "gradient_accumulation_steps": 1,
        }
        vocabulary = {"draft_vocab_size": SMALL_VOCABULARY} if self.vocab_size >= 2 * SMALL_VOCABULARY else {}
        return {**SMALL[self.settings.kind], **batch, **vocabulary}

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's settings, and what is said instead."""
        return read_recipe(RECIPES[self.settings.kind]) | self.training_settings()

    @property
    def examples_per_step(self) -> int:
        return self.recipe["per_device_train_batch_size"] * self.recipe.get("gradient_accumulation_steps", 1)

    def num_examples(self, num_dialogues: int, num_tokens: int) -> int:
        """Of so many dialogues, which have so many tokens: dialogues, or what several are packed into."""
        return math.ceil(num_tokens / self.recipe["max_length"]) if self.recipe.get("packing") else num_dialogues

    def _train(self, output: Path, states_folder: Path | None, limits: dict[str, Any]) -> list[str]:
        states = {} if states_folder is None else {"features_folder": states_folder}
        return ["train", *as_options({"output": output, **self._training_options(), **states, **limits})]

    def _training_options(self) -> dict[str, Any]:
        settings = self.settings
        options = {
            "recipe": RECIPES[settings.kind],
            "target": settings.target,
            "dataset": self.folder.train,
            "eval_dataset": self.folder.held_out,
            **self.training_settings(),
        }
        if settings.kind == "pard":
            options["base"] = settings.base or self.folder.base
        options |= {"target_dtype": self.dtype, "bf16": self.dtype == "bfloat16", **TAU}
        options |= {"seed": settings.seed, "report_to": "none"}
        if settings.chat_template_kwargs:
            options["chat_template_kwargs"] = settings.chat_template_kwargs
        if settings.trust_remote_code:
            options["trust_remote_code"] = True
        return options

    def _trust(self) -> list[str]:
        return ["--trust-remote-code"] if self.settings.trust_remote_code else []


def as_options(options: dict[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    words = []
    for name, value in options.items():
        is_json = isinstance(value, bool | dict)
        words += [f"--{name.replace('_', '-')}", json.dumps(value) if is_json else str(value)]
    return words
